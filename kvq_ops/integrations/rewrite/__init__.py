"""Rewrites an exported decode step to quantized caches, as tract's ``quantize_kv_storage`` does for its graphs.

``program`` reads the exported program, ``layout`` follows axes back to a buffer, ``match`` finds the writes and the
other readers, ``position`` proves mask and row, ``surgery`` makes the new program, ``report`` says what was done.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ... import checks
from ...format import CacheFormat, get_format
from .match import Cache, Match, find_cache, match_attention
from .position import Prover
from .program import Program, SkipError, arguments, shape
from .report import AttentionReport, RewriteReport
from .surgery import Surgeon, format_parts

__all__ = ["AttentionReport", "RewriteReport", "quantize_kv_storage"]

NAME = "quantize_kv_storage"


def quantize_kv_storage(
    exported_program: ExportedProgram,
    format: str | CacheFormat = "int8",
    *,
    allow_none: bool = False,
    strict: bool = False,
) -> tuple[ExportedProgram, RewriteReport]:
    """A decode step of ``torch.export.export`` with its plain key-value caches quantized, and what was done.

    Every ``scaled_dot_product_attention`` of one query token [batch, heads_q, 1, head_dim] is followed back to the
    buffers that its key and value are read from (or constants, as transformers exports its static cache), [batch,
    heads_kv, max_tokens, head_dim] or with heads and tokens swapped, float32, bfloat16 or float16; heads may be
    repeated by ``enable_gqa``, ``repeat_interleave`` or ``expand`` and ``reshape``. Where each buffer is written once a
    step, at one position (``index_copy_``, ``index_put_``, slice assignment, ``narrow`` and ``copy_``, or their
    functional forms), where nothing else reads it, and where the mask shows rows 0..position and no other,
    ``kvq::append`` and ``kvq::attend`` take its place and the buffer goes. Row and mask are proved by computing them at
    every position from 0 to max_tokens - 1.

    The new program keeps no lengths of its own: at each step the cache's lengths are the position, so that it means at
    any position what the plain one meant, and starts anew at position 0 with nothing to reset. Formats that quantise
    tokens in blocks want positions one after another. A position that is a counter buffer stays one; AOTInductor
    freezes such a buffer of one element, in the plain program too, so give it the position as an input. What the plain
    buffers hold (up to the last row that is not zero) is quantised into the new ones, which lie in the key buffer's
    module as ``kvq_key_codes`` and so on. Parameters are shared with ``exported_program``, which stays as it was; state
    that a step changes is copied.

    The method is that of tract's transform of the same name (sonos/tract, pull request 2458); the
    per-token figures of the report are those of its ``cost``.

    Args:
        exported_program: of a decode step, not decomposed (``run_decompositions({})`` keeps attention whole and is
            read too).
        format: of the new caches, a name or a :class:`CacheFormat`.
        allow_none: return a program without a rewrite where none is possible; else that is an error.
        strict: any attention that is skipped is an error.

    Returns:
        The new program and the :class:`RewriteReport`.

    Raises:
        ValueError: for another argument, an unknown format, or what ``allow_none`` and ``strict`` say.
    """
    if not isinstance(exported_program, ExportedProgram):
        _refuse("exported_program", "be a torch.export.ExportedProgram", type(exported_program).__name__)
    try:
        coding = get_format(format)
    except ValueError as error:
        raise ValueError(f"{NAME}: {error}") from None
    program = Program(exported_program)
    surgeon, prover = Surgeon(program, coding), Prover(program)
    reports = [_rewrite(program, attention, coding, prover, surgeon) for attention in program.attentions()]
    reports += [_hidden(attention) for attention in program.hidden_attentions()]
    report = RewriteReport(coding.name, tuple(reports))
    reasons = "; ".join(f"{skipped.node}: {skipped.reason}" for skipped in report.skipped)
    if not report.rewritten and not allow_none:
        none = "no scaled_dot_product_attention (is the program decomposed?)"
        _refuse("exported_program", "have an attention that can be rewritten", reasons or none)
    if report.skipped and strict:
        _refuse("exported_program", "be rewritten whole under strict=True", reasons)
    return surgeon.finish(), report


def _refuse(argument: str, requirement: str, got: str) -> NoReturn:
    raise ValueError(f"{NAME}: {argument} must {requirement}, got {got}")


def _rewrite(
    program: Program, attention: Node, format: CacheFormat, prover: Prover, surgeon: Surgeon
) -> AttentionReport:
    """Rewrite one attention, or say why not."""
    caches: list[Cache] = []
    try:
        given = arguments(attention)
        caches.append(find_cache(program, given["key"], "key"))
        caches.append(find_cache(program, given["value"], "value"))
        match = match_attention(program, attention, *caches)
        _check_sizes(match, format)
        prover.prove(match)
    except SkipError as skip:
        before = sum(cache.tensor.nbytes for cache in {cache.name: cache for cache in caches}.values())
        return AttentionReport(
            attention.name,
            _module(attention),
            str(skip),
            caches=tuple(cache.name for cache in caches),
            bytes_before=before,
            bytes_after=before,
        )
    parts = surgeon.swap(match)
    return _report(match, format, parts)


def _check_sizes(match: Match, format: CacheFormat) -> None:
    """What a quantized cache asks of sizes and dtypes."""
    (batch, heads_kv, max_tokens, head_dim), dtype = match.key.sizes, match.key.tensor.dtype
    try:
        checks.cache_sizes(batch, heads_kv, head_dim, max_tokens, dtype)
        format_parts(format, match.key.sizes, dtype)
    except ValueError as error:
        raise SkipError(f"a quantized cache cannot take its place: {str(error).partition(': ')[2]}") from None
    if match.query.meta["val"].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise SkipError(f"its query is {match.query.meta['val'].dtype}, not float32, bfloat16 or float16")


def _report(match: Match, format: CacheFormat, parts: tuple[str, ...]) -> AttentionReport:
    batch, heads_kv, max_tokens, head_dim = match.key.sizes
    values = 2 * heads_kv * head_dim
    described = format_parts(format, match.key.sizes, match.key.tensor.dtype)
    return AttentionReport(
        match.attention.name,
        _module(match.attention),
        caches=(match.key.name, match.value.name),
        parts=parts,
        batch=batch,
        heads_q=shape(match.query)[1],
        heads_kv=heads_kv,
        head_dim=head_dim,
        max_tokens=max_tokens,
        bytes_before=match.key.tensor.nbytes + match.value.tensor.nbytes,
        bytes_after=sum(part.nbytes for part in described.values()),
        values_per_token=values,
        bytes_per_token_before=values * match.key.tensor.dtype.itemsize,
        bytes_per_token_after=format.bytes_per_token(heads_kv, head_dim),
    )


def _hidden(attention: Node) -> AttentionReport:
    return AttentionReport(attention.name, _module(attention), "it stands in a subgraph")


def _module(node: Node) -> str:
    """The innermost module's path in the model."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((str(path) for path, _ in reversed(list(stack.values()))), "")
