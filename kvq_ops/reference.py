"""What the bytes of a cache mean, in plain torch: the judge of every backend, never a fallback.

Shapes: batch B, KV heads Hkv, query heads Hq, head_dim D, capacity N (``max_tokens``), new or query tokens T.
A row is one token of one head, the last dimension. Bytes and dequantised floats of a backend equal these bit for
bit; attention is judged by each format's tolerance. Clarity goes before speed here. Arithmetic is fp32, each operation
rounded by itself (no fused multiply-add), divisions are true divisions, rounding is to nearest, ties to even.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .format import LEVELS, NIBBLE_BLOCK, CacheFormat, SideFormat, get_format

__all__ = [
    "ABSMAX_LIMIT",
    "ROTATED_LIMIT",
    "append",
    "attend",
    "dequantize",
    "dequantize_affine",
    "dequantize_cache",
    "dequantize_groups",
    "pack",
    "quantize",
    "quantize_affine",
    "quantize_groups",
    "rotate",
    "unpack",
]

ABSMAX_LIMIT = 1.6e38
"""A row's largest magnitude counts as at most this, so that no finite row dequantises to infinity; what lies beyond
saturates."""
ROTATED_LIMIT = 1e37
"""The same for rows that are rotated, whose channels sum."""
MANTISSAS = 16
"""Group scales are 1 to 16 times the power of two of their row."""


def _nibble_order(head_dim: int) -> tuple[list[int], list[int]]:
    """Which code each byte of a 4-bit row holds: one list for low nibbles, one for high ones."""
    low: list[int] = []
    high: list[int] = []
    for start in range(0, head_dim, NIBBLE_BLOCK):
        half = min(NIBBLE_BLOCK, head_dim - start) // 2
        low += range(start, start + half)
        high += range(start + half, start + 2 * half)
    return low, high


def pack(codes: Tensor) -> Tensor:
    """int8 codes [..., D] in -8..7 to the bytes of 4-bit rows, uint8 [..., D / 2]."""
    low, high = _nibble_order(codes.shape[-1])
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[..., low] | nibbles[..., high] << 4


def unpack(packed: Tensor, head_dim: int) -> Tensor:
    """The inverse of :func:`pack`: int8 [..., head_dim]."""
    low, high = _nibble_order(head_dim)
    codes = packed.new_empty((*packed.shape[:-1], head_dim), dtype=torch.int8)
    codes[..., low] = (packed & 15).to(torch.int8) - 8
    codes[..., high] = (packed >> 4).to(torch.int8) - 8
    return codes


def _stored(codes: Tensor, side: SideFormat) -> Tensor:
    codes = codes.to(torch.int8)
    return pack(codes) if side.bits == 4 else codes


def _numbers(codes: Tensor, side: SideFormat, head_dim: int) -> Tensor:
    return (unpack(codes, head_dim) if side.bits == 4 else codes).float()


def _divide(x: Tensor, number: float) -> Tensor:
    # By a tensor: division by a Python number may be done as a product with its reciprocal, which rounds otherwise.
    return x / torch.full_like(x, number)


def quantize(x: Tensor, side: SideFormat) -> tuple[Tensor, Tensor]:
    """Coding ``row``: rows x [..., D] (fp32, bf16, fp16) to codes, int8 [..., D] or uint8 [..., D / 2], and fp32
    scales [...] (kv-quant-attn, cpu-attn).

    ``scale = min(absmax, 1.6e38) / limit`` and ``code = clamp(rint(x / scale), -limit, limit)``. A zero row, or one so
    small that its scale underflows, has scale 0 and codes 0. A row with a NaN or an infinity has scale NaN and codes 0.
    """
    x = x.float()
    absmax = x.abs().amax(-1)
    finite = absmax.isfinite()
    scales = _divide(absmax.clamp(max=ABSMAX_LIMIT), side.limit)
    codes = (x / scales[..., None]).round().clamp(-side.limit, side.limit)
    codes = codes.where((finite & (scales > 0))[..., None], 0)
    return _stored(codes, side), scales.where(finite, torch.nan)


def dequantize(codes: Tensor, scales: Tensor, side: SideFormat, head_dim: int) -> Tensor:
    """fp32 rows [..., head_dim] from codes and fp32 scales [...]: ``code * scale``, so NaN scales give NaN rows."""
    return _numbers(codes, side, head_dim) * scales[..., None]


def quantize_affine(x: Tensor, side: SideFormat, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codings ``channel`` and ``token``: x [..., D] to codes [..., D or D / 2], scales and offsets (zeros) shaped like
    x without ``dim``, over which they are shared (KIVI, ICML 2024; tract's quantize_kv_storage).

    ``lo`` and ``hi`` are the least and the largest of x, clamped to +-1.6e38; ``scale = (hi - lo) / (2^bits - 1)``, 1
    where that is 0, rounded up to bf16 for scheme ``hq`` keys; ``code = clamp(rint((x - lo) / scale), 0, 2^bits - 1)``,
    stored less 2^(bits - 1). Where x is not finite, scale and lo are NaN and the codes 0 before that.
    """
    x = x.float()
    finite = x.isfinite().all(dim)
    x = x.clamp(-ABSMAX_LIMIT, ABSMAX_LIMIT)
    lo = x.amin(dim) + 0.0  # no -0
    scales = _divide(x.amax(dim) - lo, 2 * side.limit + 1)
    narrow = side.scheme == "hq"
    if narrow:
        scales = ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scales = scales.where(scales != 0, 1.0)
    codes = ((x - lo.unsqueeze(dim)) / scales.unsqueeze(dim)).round().clamp(0, 2 * side.limit + 1)
    codes = codes.where(finite.unsqueeze(dim), 0) - (side.limit + 1)
    scales, lo = scales.where(finite, torch.nan), lo.where(finite, torch.nan)
    if narrow:  # by its bits: what a conversion makes of NaN depends on the processor
        scales = (scales.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return _stored(codes, side), scales, lo


def dequantize_affine(
    codes: Tensor, scales: Tensor, zeros: Tensor, side: SideFormat, head_dim: int, dim: int
) -> Tensor:
    """fp32 rows: ``lo + code * scale``, the inverse of :func:`quantize_affine`."""
    numbers = _numbers(codes, side, head_dim) + (side.limit + 1)
    return zeros.unsqueeze(dim) + numbers * scales.float().unsqueeze(dim)


def rotate(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of fp32 rows x [..., D] in blocks of the largest power of two, n, that divides
    D: every channel times fp32(1 / sqrt(n)), then sums and differences at distances 1, 2, 4 ... Its own inverse."""
    head_dim = x.shape[-1]
    block = head_dim & -head_dim
    y = x * torch.tensor(1 / math.sqrt(block), dtype=torch.float32)
    distance = 1
    while distance < block:
        first, second = y.view(*x.shape[:-1], head_dim // (2 * distance), 2, distance).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        distance *= 2
    return y


def quantize_groups(x: Tensor, side: SideFormat, rotated: bool) -> tuple[Tensor, Tensor]:
    """Coding ``group``: rows x [..., D] to codes, int8 [..., D] or uint8 [..., D / 2], and scales, uint8
    [..., 1 + groups / 2] (in a cache the last two dimensions of the scales change places).

    The first byte of the scales, E, says the row's unit, ``2^(E - 127)``; 0 a zero row, 255 one that is not finite.
    Then comes a nibble for each group, low nibbles first: its mantissa m - 1. A code c stands for ``level(c) * m *
    unit``: level is ``LEVELS[c + 8]`` for 4 bits and ``c + 0.5`` for 8. The unit is the least power of two for which no
    group needs more than 16 times it; m is the least that reaches the group's absmax or, where that comes nearer to the
    group in the sum of squares, one or two less (a few codes saturate then). The code is that of the nearest level: for
    4 bits the number of middles between levels that ``x / unit / m`` reaches, less 8; for 8 bits ``clamp(rint(x / unit
    / m - 0.5), -128, 127)``. Sums of squares add halves: 16 channels to the other 16, 8 to 8, and so on.
    """
    x = x.float()
    finite = x.isfinite().all(-1)
    limit = ROTATED_LIMIT if rotated else ABSMAX_LIMIT
    x = x.nan_to_num(0.0).clamp(-limit, limit)
    x = rotate(x) if rotated else x
    spans, top = side.groups(x.shape[-1]), LEVELS[-1] if side.bits == 4 else side.limit + 0.5
    wanted = torch.stack([_divide(x[..., start:end].abs().amax(-1), top) for start, end in spans], -1)
    bits = _divide(wanted.amax(-1), MANTISSAS).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(min=1)
    unit = (exponent << 23).view(torch.float32)
    zero = wanted.amax(-1) == 0
    codes, mantissas = torch.empty_like(x), []
    for group, (start, end) in enumerate(spans):
        z = x[..., start:end] / unit[..., None]
        most = (wanted[..., group] / unit).ceil().clamp(1, MANTISSAS)
        best = torch.full_like(most, math.inf)
        chosen, chosen_codes = most, torch.zeros_like(z)
        for less in range(3):
            m = (most - less).clamp(min=1)
            code = _nearest(z / m[..., None], side)
            error = _sum_of_halves((_levels(code, side) * m[..., None] - z).square(), side.group)
            better = error < best
            best, chosen = best.where(~better, error), chosen.where(~better, m)
            chosen_codes = chosen_codes.where(~better[..., None], code)
        usable = finite & ~zero
        codes[..., start:end] = chosen_codes.where(usable[..., None], 0)
        mantissas.append((chosen - 1).where(usable, 0).to(torch.uint8))
    exponent = exponent.where(~zero, 0).where(finite, 255).to(torch.uint8)
    if len(mantissas) % 2:
        mantissas.append(torch.zeros_like(mantissas[0]))
    pairs = [low | high << 4 for low, high in zip(mantissas[::2], mantissas[1::2], strict=True)]
    return _stored(codes, side), torch.stack([exponent, *pairs], -1)


def _nearest(x: Tensor, side: SideFormat) -> Tensor:
    if side.bits == 8:
        return (x - 0.5).round().clamp(-side.limit - 1, side.limit)
    middles = [(low + high) / 2 for low, high in pairwise(LEVELS)]
    return torch.stack([x >= middle for middle in middles]).sum(0).float() - 8


def _levels(codes: Tensor, side: SideFormat) -> Tensor:
    if side.bits == 8:
        return codes + 0.5
    return torch.tensor(LEVELS, dtype=torch.float32)[(codes + 8).long()]


def _sum_of_halves(x: Tensor, width: int) -> Tensor:
    x = pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def dequantize_groups(codes: Tensor, scales: Tensor, side: SideFormat, head_dim: int, rotated: bool) -> Tensor:
    """fp32 rows [..., head_dim], the inverse of :func:`quantize_groups`."""
    exponent = scales[..., 0].to(torch.int32)
    unit = (exponent << 23).view(torch.float32).where(exponent < 255, torch.nan)
    x = _levels(_numbers(codes, side, head_dim), side)
    for group, (start, end) in enumerate(side.groups(head_dim)):
        nibbles = scales[..., 1 + group // 2] >> 4 if group % 2 else scales[..., 1 + group // 2] & 15
        x[..., start:end] *= (nibbles + 1).float()[..., None]
    x = x * unit[..., None]
    return rotate(x) if rotated else x


def _ring(format: CacheFormat, tokens: Tensor) -> Tensor:
    """Where ``key_full`` keeps the tokens after the sinks."""
    return format.sinks + (tokens - format.sinks) % (2 * format.key.key_block)


def _append_keys(format: CacheFormat, parts: dict[str, Tensor], start: int, new: Tensor) -> None:
    """Keys of one sequence, coded per channel: new [Hkv, T, D], tokens ``start`` on."""
    block, end = format.key.key_block, start + new.shape[1]
    base = max(format.frozen(start), format.sinks)  # the first token of the unfinished block
    rows = new[:, max(0, base - start) :]
    held = torch.arange(base, max(base, start))
    if len(held):
        rows = torch.cat([parts["key_full"][:, _ring(format, held)], rows], 1)
    blocks = rows.shape[1] // block
    if blocks:
        whole = rows[:, : blocks * block].reshape(len(rows), blocks, block, rows.shape[-1])
        codes, scales, zeros = quantize_affine(whole, format.key, 2)
        first = (base - format.sinks) // block
        parts["key_codes"][:, base : base + blocks * block] = codes.flatten(1, 2)
        parts["key_scales"][:, first : first + blocks] = scales
        parts["key_zeros"][:, first : first + blocks] = zeros
    kept = torch.arange(min(end, max(start, format.sinks, end - 2 * block)), end)
    parts["key_full"][:, _ring(format, kept)] = new[:, kept - start]


def append(
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    format: str | CacheFormat,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
) -> None:
    """Write key and value [B, Hkv, T, D] at each sequence's own length and advance lengths, int32 [B], by T.

    Parts as ``format.parts`` says, written in place. Keys coded per channel stay in ``key_full`` until their block of
    tokens is whole; the newest two blocks are kept there. The first ``sinks`` tokens stay in full precision for good.
    """
    cache = get_format(format)
    given: dict[str, Tensor | None] = {
        "key_codes": key_codes,
        "key_scales": key_scales,
        "value_codes": value_codes,
        "value_scales": value_scales,
    }
    given |= {"key_zeros": key_zeros, "value_zeros": value_zeros, "key_full": key_full, "value_full": value_full}
    for b, start in enumerate(lengths.tolist()):
        parts = {name: part[b] for name, part in given.items() if part is not None}
        kept = max(0, min(cache.sinks - start, key.shape[2]))
        if kept:
            parts["key_full"][:, start : start + kept] = key[b, :, :kept]
            parts["value_full"][:, start : start + kept] = value[b, :, :kept]
        for name, rows, side in ("key", key[b, :, kept:], cache.key), ("value", value[b, :, kept:], cache.value):
            coding = side.coding(name)
            if coding == "channel":
                _append_keys(cache, parts, start, key[b])
                continue
            if coding == "row":
                new: tuple[Tensor, ...] = quantize(rows, side)
            elif coding == "group":
                codes, scales = quantize_groups(rows, side, side.rotated(name))
                new = codes, scales.transpose(1, 2)
            else:
                new = quantize_affine(rows, side, -1)
            for suffix, part in zip(("codes", "scales", "zeros"), new, strict=False):
                axis = 2 if coding == "group" and suffix == "scales" else 1
                parts[f"{name}_{suffix}"].narrow(axis, start + kept, rows.shape[1]).copy_(part)
    lengths += key.shape[2]


def dequantize_cache(
    format: str | CacheFormat, parts: dict[str, Tensor], head_dim: int, length: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence as attend reads them, fp32 [Hkv, length, head_dim]: parts by name, without the
    batch dimension."""
    cache = get_format(format)
    sinks, frozen = min(cache.sinks, length), cache.frozen(length)
    sides = []
    for name, side, end in ("key", cache.key, frozen), ("value", cache.value, length):
        codes = parts[f"{name}_codes"][:, sinks:end]
        scales, coding = parts[f"{name}_scales"], side.coding(name)
        if coding == "channel":
            blocks = (end - sinks) // side.key_block
            codes = codes.reshape(len(codes), blocks, side.key_block, codes.shape[-1])
            zeros = parts["key_zeros"][:, :blocks]
            rows = dequantize_affine(codes, scales[:, :blocks], zeros, side, head_dim, 2).flatten(1, 2)
        elif coding == "group":
            scales = scales[:, :, sinks:end].transpose(1, 2)
            rows = dequantize_groups(codes, scales, side, head_dim, side.rotated(name))
        elif coding == "token":
            zeros = parts[f"{name}_zeros"][:, sinks:end]
            rows = dequantize_affine(codes, scales[:, sinks:end], zeros, side, head_dim, -1)
        else:
            rows = dequantize(codes, scales[:, sinks:end], side, head_dim)
        pieces = [rows]
        if sinks:
            pieces.insert(0, parts[f"{name}_full"][:, :sinks].float())
        if end < length:
            pieces.append(parts["key_full"][:, _ring(cache, torch.arange(end, length))].float())
        sides.append(torch.cat(pieces, 1))
    return sides[0], sides[1]


def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str | CacheFormat,
    scale: float | None = None,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of query [B, Hq, D] or [B, Hq, T, D] over the dequantised cache; scale None is 1 / sqrt(D).

    The T query tokens are the newest positions of their sequence, causal among themselves; query head h reads KV head
    ``h // (Hq / Hkv)``. Returns fp32 out, shaped like query, and fp32 lse without the last dimension. A sequence of
    length 0 gives zeros and -inf. Computed in float64, so that the judge's own rounding does not count.
    """
    given: dict[str, Tensor | None] = {
        "key_codes": key_codes,
        "key_scales": key_scales,
        "value_codes": value_codes,
        "value_scales": value_scales,
    }
    given |= {"key_zeros": key_zeros, "value_zeros": value_zeros, "key_full": key_full, "value_full": value_full}
    head_dim = query.shape[-1]
    rows = query if query.dim() == 4 else query[:, :, None]
    heads_q, tokens, heads_kv = rows.shape[1], rows.shape[2], key_codes.shape[1]
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(rows.shape, dtype=torch.float64, device=query.device)
    lse = torch.full(rows.shape[:-1], -math.inf, dtype=torch.float64, device=query.device)
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        parts = {name: part[b] for name, part in given.items() if part is not None}
        key, value = (side.double() for side in dequantize_cache(format, parts, head_dim, length))
        groups = rows[b].double().view(heads_kv, heads_q // heads_kv, tokens, head_dim)
        for t in range(tokens):
            # Sliced, not masked: zero times a NaN row would let a later token poison an earlier one.
            visible = length - tokens + 1 + t
            logits = groups[:, :, t] @ key[:, :visible].transpose(1, 2) * factor
            out[b, :, t] = (logits.softmax(-1) @ value[:, :visible]).view(heads_q, head_dim)
            lse[b, :, t] = logits.logsumexp(-1).view(heads_q)
    return out.float().view(query.shape), lse.float().view(query.shape[:-1])
