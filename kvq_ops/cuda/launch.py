"""From tensors to launches: strides, grids, outputs. No check of its own, no host read, no arithmetic on lengths.

Everything here also runs over fake tensors and in Triton's interpreter over CPU tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from ..format import NIBBLE_BLOCK, CacheFormat, get_format
from . import plan
from .append import append_kernel, finish_kernel
from .attend import attend_kernel, combine_kernel

__all__ = ["KERNELS", "append", "attend"]

KERNELS: dict[str, list[Any]] = {
    "append": [append_kernel, finish_kernel],
    "attend": [attend_kernel, combine_kernel],
    "attend_lse": [attend_kernel, combine_kernel],
}
"""By op: what compile caches must hash."""
_FAKE_MULTIPROCESSORS = 132
"""Of a device that is not here: an H200's."""


def _launch(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
    """In order; tracing records the launch. The interpreter's kernels are no JITFunction."""
    wrapped = torch.library.wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel
    wrapped[(programs, 1, 1)](*arguments, **constants)


def _cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return _FAKE_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _strides(part: Tensor | None) -> tuple[int, int, int]:
    """Of batch, head, and token, block, plane or slot: what comes after is contiguous."""
    return (0, 0, 0) if part is None else (part.stride(0), part.stride(1), part.stride(2))


def append(
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    format: str,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
) -> None:
    """``kvq::append`` of arguments that passed the checks."""
    batch, heads_kv, tokens, head_dim = key.shape
    if batch == 0 or tokens == 0:
        return
    side, max_tokens = get_format(format).key, key_codes.shape[2]
    facts = plan.constants(format, head_dim)
    rows = plan.append_rows(head_dim, heads_kv * tokens)
    row_programs = _cdiv(heads_kv * tokens, rows)
    chunks = heads_kv * _cdiv(head_dim, NIBBLE_BLOCK) * _cdiv(tokens, side.key_block) if side.key_block else 0
    alone = row_programs == 1 and not side.key_block
    parts = [key_codes, key_scales, key_zeros, key_full, value_codes, value_scales, value_zeros, value_full]
    pointers = [key if part is None else part for part in parts]  # not lengths: it is written
    strides = [*key.stride(), *value.stride(), *(stride for part in parts for stride in _strides(part))]
    programs = row_programs + chunks
    sizes = [heads_kv, tokens, max_tokens, row_programs, programs]
    constants = facts | {"ROWS": rows, "NARROW": side.scheme == "hq", "ADVANCE": alone}
    if heads_kv:
        _launch(append_kernel, batch * programs, key, value, *pointers, lengths, *strides, *sizes, **constants)
    if alone:
        return
    keys = [key, key if key_full is None else key_full, lengths, *key.stride(), *_strides(key_full)]
    names = ("HEAD_DIM", "BLOCKS", "SINKS", "KEY_BLOCK", "VERSION")
    constants = {name: facts[name] for name in names} | {"ROWS": plan.append_rows(head_dim, 16)}
    _launch(finish_kernel, batch, *keys, heads_kv, tokens, max_tokens, **constants)


def _align(codes: Tensor, words: bool) -> int:
    """Columns that rows start at multiples of, 16 bytes at most: Triton itself tells multiples of 16 from others only,
    and would read rows of 40 words one by one."""
    size, most = (2, 8) if words else (1, 16)
    offsets = [codes.storage_offset(), *codes.stride()[:3]]
    return next(n for n in (16, 8, 4, 2, 1) if n <= most and all(offset % (n * size) == 0 for offset in offsets))


def _words(codes: Tensor) -> bool:
    """Whether rows are 16-bit words: they and their distances even. A base lies as its offset does: allocations are
    aligned."""
    even = codes.shape[-1] % 2 == 0 and codes.storage_offset() % 2 == 0
    return even and all(stride % 2 == 0 for stride in codes.stride()[:3])


def _attend_constants(
    cache: CacheFormat, tile: plan.AttendPlan, dtype: torch.dtype, key_codes: Tensor, value_codes: Tensor
) -> plan.Constants:
    """What does not follow from format and head size alone."""
    key_words, value_words = _words(key_codes), _words(value_codes)
    return {
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "SLOTS": max(16, plan.power_of_two(cache.sinks)),
        "KEY_WORDS": key_words,
        "VALUE_WORDS": value_words,
        "KEY_ALIGN": _align(key_codes, key_words),
        "VALUE_ALIGN": _align(value_codes, value_words),
        "KEY_SPLIT": dtype == torch.float32 or (bool(cache.key.key_block) and dtype == torch.float16),
        "SPLIT": dtype == torch.float32,
    }


def attend(
    return_lse: bool,
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str,
    scale: float | None = None,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``kvq::attend`` and ``kvq::attend_lse`` of arguments that passed the checks; lse is of no meaning unless
    asked for."""
    cache, batch, head_dim = get_format(format), query.shape[0], query.shape[-1]
    heads_kv, max_tokens, group = key_codes.shape[1], key_codes.shape[2], query.shape[1] // key_codes.shape[1]
    tokens = query.shape[2] if query.dim() == 4 else 1
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else query
    if batch == 0 or group == 0 or tokens == 0:
        return out, lse
    tile = plan.attend_plan(cache, head_dim, group * tokens, query.dtype == torch.float32)
    row_tiles = _cdiv(group * tokens, tile.rows)
    heads = batch * heads_kv
    pieces = plan.splits(heads * row_tiles, max_tokens, tile.tokens, multiprocessors(query.device))
    facts, alone = plan.constants(format, head_dim), pieces == 1
    constants = facts | _attend_constants(cache, tile, query.dtype, key_codes, value_codes)
    constants |= {"ALONE": alone, "LSE": return_lse}
    parts = [key_codes, key_scales, key_zeros, key_full, value_codes, value_scales, value_zeros, value_full]
    pointers = [query if part is None else part for part in parts]
    strides = [stride for part in parts for stride in _strides(part)]
    strides[2] //= 2 if constants["KEY_WORDS"] else 1  # rows of codes are read in columns of a word or a byte
    strides[14] //= 2 if constants["VALUE_WORDS"] else 1
    query_strides = [*query.stride()] if query.dim() == 4 else [query.stride(0), query.stride(1), 0, query.stride(2)]
    rows = heads * group * tokens
    partial, stats = out, query
    if not alone:
        partial = query.new_empty((rows, pieces, head_dim), dtype=torch.float32)
        stats = query.new_empty((rows, pieces, 2), dtype=torch.float32)
    softmax_scale = 1 / math.sqrt(head_dim) if scale is None else scale
    sizes = [heads_kv, group, tokens, max_tokens, row_tiles, pieces]
    given = [query, *pointers, lengths, partial, lse, stats, softmax_scale, *query_strides, *strides, *sizes]
    constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    _launch(attend_kernel, heads * row_tiles * pieces, *given, **constants)
    if not alone:
        a_sequence = heads_kv * group * tokens
        _combine([partial, stats, lengths, out, lse, a_sequence, max_tokens, pieces], rows, facts, tile, return_lse)
    return out, lse


def _combine(arguments: list[Any], rows: Any, facts: plan.Constants, tile: plan.AttendPlan, lse: bool) -> None:
    wide, pieces = NIBBLE_BLOCK * facts["BLOCKS"], arguments[-1]
    names = ("HEAD_DIM", "SINKS", "VERSION")
    constants = {name: facts[name] for name in names} | {"WIDTH": wide, "TOKENS": tile.tokens, "LSE": lse}
    constants |= {"ALL": plan.power_of_two(pieces), "STEP": max(1, min(16, 4096 // wide))}
    _launch(combine_kernel, rows, *arguments, **constants)
