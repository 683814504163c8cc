"""Every rejection, in one wording: ``<op>: <argument> must <requirement>, got <value>``.

Ops raise ``RuntimeError`` with the same text from the fake and from the C++ kernels; :class:`QuantizedKVCache` raises
``ValueError`` for what it refuses itself. Functions named after an op read shapes, dtypes, strides and devices only,
so they trace with symbolic sizes; what needs the data (lengths against capacity and tokens) is the kernels' to check.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .format import MAX_HEAD_DIM, MAX_TOKENS, MIN_HEAD_DIM, CacheFormat, Part, get_format

__all__ = [
    "append",
    "attend",
    "cache_format",
    "cache_sizes",
    "reorder_index",
    "saved_lengths",
    "state",
    "truncate_exact",
    "truncate_lengths",
]

DEBUG = os.environ.get("KVQ_DEBUG") == "1"
"""Whether tracing also looks for what is right but slow."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STATE_VERSION = 1
MAX_SCALE = torch.finfo(torch.float32).max
"""Kernels take the softmax scale in fp32."""


def _fail(op: str, argument: str, requirement: str, got: object) -> NoReturn:
    raise RuntimeError(f"{op}: {argument} must {requirement}, got {got}")


def _refuse(method: str, argument: str, requirement: str, got: object) -> NoReturn:
    raise ValueError(f"{method}: {argument} must {requirement}, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(sizes: Sequence[int]) -> str:
    return str(list(sizes))


def _head_dim_fits(head_dim: int) -> bool:
    return MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0


HEAD_DIM = f"have an even head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"


def _format(op: str, name: str) -> CacheFormat:
    try:
        return get_format(name)
    except ValueError as error:
        raise RuntimeError(f"{op}: {error}") from None


def _rows(op: str, argument: str, rows: Tensor, layouts: dict[int, str]) -> None:
    """A query or a key: one of the layouts by number of dimensions, a float dtype, a head_dim that fits."""
    if rows.dim() not in layouts:
        _fail(op, argument, f"have shape {' or '.join(layouts.values())}", _shape(rows.shape))
    if rows.dtype not in FLOATS:
        _fail(op, argument, "be float32, bfloat16 or float16", _name(rows.dtype))
    if not _head_dim_fits(rows.shape[-1]):
        _fail(op, argument, HEAD_DIM, rows.shape[-1])


def _codes_layout(op: str, key_codes: Tensor) -> None:
    if key_codes.dim() != 4:
        _fail(op, "key_codes", "have 4 dimensions [batch, heads_kv, max_tokens, row bytes]", _shape(key_codes.shape))
    if key_codes.shape[2] > MAX_TOKENS:
        _fail(op, "key_codes", f"have at most {MAX_TOKENS} tokens", key_codes.shape[2])


def _like(op: str, argument: str, tensor: Tensor, part: Part, rows: Tensor) -> None:
    if _name(tensor.dtype) != part.dtype:
        _fail(op, argument, f"be {part.dtype}", _name(tensor.dtype))
    if tensor.shape != part.shape:
        _fail(op, argument, f"have shape {_shape(part.shape)}", _shape(tensor.shape))
    if tensor.dim() != 3 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        _fail(op, argument, "be contiguous in its last dimension", f"stride {tensor.stride(-1)}")
    if tensor.device != rows.device:
        _fail(op, argument, f"be on {rows.device}", tensor.device)


def _parts(
    op: str, format: CacheFormat, name: str, rows: Tensor, heads_kv: int, given: dict[str, Tensor | None]
) -> None:
    """Every part of the cache, in the schema's order, against the format, for rows [B, ..., D] and the capacity of
    key_codes. Rows in full precision may have any float dtype: see :func:`_full_dtype`."""
    batch, head_dim, max_tokens = rows.shape[0], rows.shape[-1], _given(given, "key_codes").shape[2]
    expected = format.parts(batch, heads_kv, head_dim, max_tokens) | {"lengths": Part((batch,), "int32")}
    for argument, tensor in given.items():
        part = expected.get(argument)
        if part is None:
            if tensor is not None:
                _fail(op, argument, f"be None for format {name}", "a tensor")
        elif tensor is None:
            _fail(op, argument, f"be a tensor for format {name}", "None")
        else:
            _like(op, argument, tensor, replace(part, dtype=_name(tensor.dtype)) if part.rows == "slot" else part, rows)


def _given(given: dict[str, Tensor | None], name: str) -> Tensor:
    tensor = given[name]
    assert tensor is not None
    return tensor


def _full_dtype(op: str, given: dict[str, Tensor | None], key: Tensor | None) -> None:
    """Rows in full precision of an append are those of the key; of an attend any floats."""
    first = given["key_full"]
    for name in ("key_full", "value_full"):
        full = given[name]
        if full is None or first is None:
            continue
        if key is not None and full.dtype != key.dtype:
            _fail(op, "key", f"be {_name(full.dtype)} like {name}", _name(key.dtype))
        if full.dtype not in FLOATS:
            _fail(op, name, "be float32, bfloat16 or float16", _name(full.dtype))
        if full.dtype != first.dtype:
            _fail(op, name, f"be {_name(first.dtype)} like key_full", _name(full.dtype))


def _no_overlap(op: str, given: dict[str, Tensor | None]) -> None:
    """Nothing that is written may be the same memory twice."""
    for name, part in given.items():
        if part is None or name == "lengths":
            continue
        for size, stride in zip(part.shape, part.stride(), strict=True):
            if stride == 0 and size > 1:
                _fail(op, name, "not overlap itself", f"strides {_shape(part.stride())}")


def _nbytes(part: Tensor) -> int:
    return part.numel() * part.element_size()  # Tensor.nbytes takes no symbolic sizes


def _warn_of_views(op: str, given: dict[str, Tensor | None]) -> None:
    """Of views of one storage torch.compile writes some in place and copies others, by how their memory lies and what
    else the graph does; a tensor of its own it never copies for that."""
    found = [
        f"{name} ({_nbytes(part)} of {part.untyped_storage().nbytes()} bytes)"
        for name, part in given.items()
        if part is not None and statically_known_true(part.untyped_storage().nbytes() > _nbytes(part))
    ]
    if found:
        warnings.warn(
            f"{op}: views of a larger storage: {', '.join(found)}. torch.compile may copy all of it in every step; "
            "keep one tensor for each part and layer, as QuantizedKVCache does",
            stacklevel=2,
        )


def _arguments(*tensors: Tensor | None) -> dict[str, Tensor | None]:
    names = ["key_codes", "key_scales", "value_codes", "value_scales", "lengths"]
    names += ["key_zeros", "value_zeros", "key_full", "value_full"]
    return dict(zip(names, tensors, strict=True))


def append(
    op: str,
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
    """What ``kvq::append`` refuses without reading data."""
    cache = _format(op, format)
    _rows(op, "key", key, {4: "[batch, heads_kv, tokens, head_dim]"})
    _codes_layout(op, key_codes)
    if value.dtype != key.dtype:
        _fail(op, "value", f"be {_name(key.dtype)} like key", _name(value.dtype))
    if value.shape != key.shape:
        _fail(op, "value", f"have shape {_shape(key.shape)} like key", _shape(value.shape))
    if value.device != key.device:
        _fail(op, "value", f"be on {key.device}", value.device)
    given = _arguments(
        key_codes, key_scales, value_codes, value_scales, lengths, key_zeros, value_zeros, key_full, value_full
    )
    _parts(op, cache, format, key, key.shape[1], given)
    _full_dtype(op, given, key)
    _no_overlap(op, given)
    if DEBUG:
        _warn_of_views(op, given)


def attend(
    op: str,
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
) -> None:
    """What ``kvq::attend`` and ``kvq::attend_lse`` refuse without reading data."""
    cache = _format(op, format)
    _rows(op, "query", query, {3: "[batch, heads_q, head_dim]", 4: "[batch, heads_q, tokens, head_dim]"})
    _codes_layout(op, key_codes)
    heads_kv = key_codes.shape[1]
    if heads_kv == 0:
        _fail(op, "key_codes", "have at least 1 head", heads_kv)
    if query.shape[1] % heads_kv != 0:
        got = f"{query.shape[1]} (heads_kv {heads_kv})"
        _fail(op, "query", "have a multiple of the cache's heads_kv heads", got)
    given = _arguments(
        key_codes, key_scales, value_codes, value_scales, lengths, key_zeros, value_zeros, key_full, value_full
    )
    _parts(op, cache, format, query, heads_kv, given)
    _full_dtype(op, given, None)
    if scale is not None and not abs(scale) <= MAX_SCALE:
        _fail(op, "scale", "be finite", "inf" if scale > 0 else "-inf" if scale < 0 else "nan")


def cache_format(bits: int | None, format: str | CacheFormat | None) -> CacheFormat:
    """The format that a cache's constructor asks for: ``format``, else the row format of that many bits (None: 8)."""
    try:
        found = None if format is None else get_format(format)
    except ValueError as error:
        raise ValueError(f"QuantizedKVCache: {error}") from None
    if bits is not None and bits not in (4, 8):
        _refuse("QuantizedKVCache", "bits", "be 4 or 8", repr(bits))
    if found is None:
        return get_format(f"int{bits or 8}")
    if bits is not None and {found.key.bits, found.value.bits} != {bits}:
        _refuse("QuantizedKVCache", "bits", f"be left out with format {found.name}", bits)
    return found


def cache_sizes(batch: int, heads_kv: int, head_dim: int, max_tokens: int, dtype: torch.dtype) -> None:
    """The sizes and the dtype that a cache's constructor takes."""
    sizes = {"batch": batch, "heads_kv": heads_kv, "head_dim": head_dim, "max_tokens": max_tokens}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            _refuse("QuantizedKVCache", name, "be an int", repr(size))
        if name == "head_dim" and not _head_dim_fits(size):
            _refuse("QuantizedKVCache", name, f"be even and from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}", size)
        if size < 1:
            _refuse("QuantizedKVCache", name, "be at least 1", size)
        if name == "max_tokens" and size > MAX_TOKENS:
            _refuse("QuantizedKVCache", name, f"be at most {MAX_TOKENS}", size)
    if dtype not in FLOATS:
        got = _name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        _refuse("QuantizedKVCache", "dtype", "be float32, bfloat16 or float16", got)


def _numbers(method: str, argument: str, numbers: object, dtypes: tuple[torch.dtype, ...], batch: int) -> list[int]:
    """The values of an integer tensor [batch], by a host read."""
    kinds = " or ".join(map(_name, dtypes))
    if not isinstance(numbers, Tensor):
        _refuse(method, argument, f"be a tensor of {kinds}", type(numbers).__name__)
    if numbers.dtype not in dtypes:
        _refuse(method, argument, f"be {kinds}", _name(numbers.dtype))
    if numbers.shape != (batch,):
        _refuse(method, argument, f"have shape {[batch]}", _shape(numbers.shape))
    values: list[int] = numbers.tolist()
    return values


def truncate_lengths(lengths: int | Tensor, held: list[int]) -> list[int]:
    """The new length of each sequence: at most the current one, held."""
    method = "QuantizedKVCache.truncate"
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        if not 0 <= lengths <= max(held):
            _refuse(method, "lengths", f"lie in 0..{max(held)}, the longest sequence's", lengths)
        return [min(lengths, length) for length in held]
    if not isinstance(lengths, Tensor):
        _refuse(method, "lengths", f"be an int or an int32 tensor of shape {[len(held)]}", repr(lengths))
    wanted = _numbers(method, "lengths", lengths, (torch.int32,), len(held))
    for b, (new, length) in enumerate(zip(wanted, held, strict=True)):
        if not 0 <= new <= length:
            _refuse(method, "lengths", f"lie in 0..{length} at {b}, the sequence's own", new)
    return wanted


def saved_lengths(lengths: Tensor, max_tokens: int) -> list[int]:
    """The lengths of a state to save, by a host read."""
    held: list[int] = lengths.tolist()
    for b, length in enumerate(held):
        if length > max_tokens:
            got = f"{length} at {b}, an append that found no room: truncate or reset first"
            _refuse("QuantizedKVCache.save_state", "lengths", f"lie in 0..{max_tokens}, the capacity", got)
    return held


def truncate_exact(format: CacheFormat, length: int, sequence: int, exact: bool) -> None:
    """Whether a sequence can be cut back to ``length``: keys of an unfinished block must still be there."""
    if not exact:
        block, after = format.key.key_block, f" after {format.sinks} sinks" if format.sinks else ""
        requirement = f"cut a sequence back by at most {block} tokens in all, or to a whole number of blocks of {block}"
        _refuse("QuantizedKVCache.truncate", "lengths", requirement + after, f"{length} at {sequence}")


def reorder_index(index: Tensor, batch: int) -> list[int]:
    """The sequence that each sequence is replaced by."""
    method = "QuantizedKVCache.reorder"
    sources = _numbers(method, "index", index, (torch.int64, torch.int32), batch)
    for b, source in enumerate(sources):
        if not 0 <= source < batch:
            _refuse(method, "index", f"lie in 0..{batch - 1}", f"{source} at {b}")
    return sources


def state(
    given: Mapping[str, Any],
    facts: Mapping[str, Any],
    format: CacheFormat,
    parts: Mapping[str, Part],
    max_tokens: int,
) -> list[int]:
    """A saved state against the cache that takes it, its lengths returned.

    ``facts`` are the entries that must be equal; every other entry is a tensor whose shape follows from them and from
    the cache's ``parts``."""
    method = "QuantizedKVCache.load_state"
    batch = facts["batch"]
    if not isinstance(given, Mapping):
        _refuse(method, "state", "be a dict", f"a {type(given).__name__}")
    for name, fact in facts.items():
        if type(given.get(name)) is not type(fact) or given[name] != fact:
            _refuse(method, name, f"be {fact}", given.get(name, "nothing"))
    names = [*facts, "lengths", *parts]
    if set(given) != set(names):
        _refuse(method, "state", f"have the entries {', '.join(sorted(names))}", ", ".join(sorted(map(str, given))))
    lengths = _numbers(method, "lengths", given["lengths"], (torch.int32,), batch)
    for b, length in enumerate(lengths):
        if not 0 <= length <= max_tokens:
            _refuse(method, "lengths", f"lie in 0..{max_tokens}, the capacity", f"{length} at {b}")
    for name, part in parts.items():
        rows = sum(format.rows_in_use(part, length) for length in lengths)
        tensor, shape = given[name], (*part.shape[1 : part.axis], rows, *part.shape[part.axis + 1 :])
        if not isinstance(tensor, Tensor):
            _refuse(method, name, "be a tensor", type(tensor).__name__)
        if tensor.is_meta:
            _refuse(method, name, "hold data", "a tensor on meta")
        if _name(tensor.dtype) != part.dtype:
            _refuse(method, name, f"be {part.dtype}", _name(tensor.dtype))
        if tensor.shape != shape:
            _refuse(method, name, f"have shape {_shape(shape)}", _shape(tensor.shape))
    return lengths
