"""What the bytes of a cache mean, in plain torch: the judge of every backend, never a fallback.

Shapes: batch B, KV heads Hkv, query heads Hq, head_dim D, capacity N (``max_tokens``), new or query tokens T.
A row is one token of one head, the last dimension. Bytes and dequantised floats of a backend equal these bit for
bit; attention is judged by each format's tolerance. Clarity goes before speed here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvq_ops.format import NIBBLE_BLOCK, CacheFormat, SideFormat, get_format

__all__ = ["ABSMAX_LIMIT", "append", "attend", "dequantize", "pack", "quantize", "unpack"]

ABSMAX_LIMIT = 1.6e38
"""A row's largest magnitude counts as at most this, so that no finite row dequantises to infinity; what lies beyond
saturates."""


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


def quantize(x: Tensor, side: SideFormat) -> tuple[Tensor, Tensor]:
    """Rows x [..., D] (fp32, bf16, fp16) to codes, int8 [..., D] or uint8 [..., D / 2], and fp32 scales [...].

    ``scale = min(absmax, 1.6e38) / limit`` and ``code = clamp(rint(x / scale), -limit, limit)``, both true fp32
    divisions, ties to even. A zero row, or one so small that its scale underflows, has scale 0 and codes 0. A row
    with a NaN or an infinity has scale NaN and codes 0.
    """
    x = x.float()
    absmax = x.abs().amax(-1)
    finite = absmax.isfinite()
    # By a tensor: division by a Python number may be done as a product with its reciprocal, which rounds otherwise.
    scales = absmax.clamp(max=ABSMAX_LIMIT) / torch.full_like(absmax, side.limit)
    codes = (x / scales[..., None]).round().clamp(-side.limit, side.limit)
    codes = codes.where((finite & (scales > 0))[..., None], 0).to(torch.int8)
    return (pack(codes) if side.bits == 4 else codes), scales.where(finite, torch.nan)


def dequantize(codes: Tensor, scales: Tensor, side: SideFormat, head_dim: int) -> Tensor:
    """fp32 rows [..., head_dim] from codes and fp32 scales [...]: ``code * scale``, so NaN scales give NaN rows."""
    numbers = unpack(codes, head_dim) if side.bits == 4 else codes
    return numbers.float() * scales[..., None]


def append(
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    format: str | CacheFormat,
) -> None:
    """Write key and value [B, Hkv, T, D] at each sequence's own length and advance lengths, int32 [B], by T.

    Codes [B, Hkv, N, row bytes], scales fp32 [B, Hkv, N]; all in place.
    """
    cache = get_format(format)
    tokens = key.shape[2]
    sides = (key_codes, key_scales, key, cache.key), (value_codes, value_scales, value, cache.value)
    for codes, scales, rows, side in sides:
        new_codes, new_scales = quantize(rows, side)
        for b, start in enumerate(lengths.tolist()):
            codes[b, :, start : start + tokens] = new_codes[b]
            scales[b, :, start : start + tokens] = new_scales[b]
    lengths += tokens


def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str | CacheFormat,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of query [B, Hq, D] or [B, Hq, T, D] over the dequantised cache; scale None is 1 / sqrt(D).

    The T query tokens are the newest positions of their sequence, causal among themselves; query head h reads KV head
    ``h // (Hq / Hkv)``. Returns fp32 out, shaped like query, and fp32 lse without the last dimension. A sequence of
    length 0 gives zeros and -inf. Computed in float64, so that the judge's own rounding does not count.
    """
    cache = get_format(format)
    head_dim = query.shape[-1]
    rows = query if query.dim() == 4 else query[:, :, None]
    heads_q, tokens, heads_kv = rows.shape[1], rows.shape[2], key_codes.shape[1]
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(rows.shape, dtype=torch.float64, device=query.device)
    lse = torch.full(rows.shape[:-1], -math.inf, dtype=torch.float64, device=query.device)
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        key = dequantize(key_codes[b, :, :length], key_scales[b, :, :length], cache.key, head_dim).double()
        value = dequantize(value_codes[b, :, :length], value_scales[b, :, :length], cache.value, head_dim).double()
        groups = rows[b].double().view(heads_kv, heads_q // heads_kv, tokens, head_dim)
        for t in range(tokens):
            # Sliced, not masked: zero times a NaN row would let a later token poison an earlier one.
            visible = length - tokens + 1 + t
            logits = groups[:, :, t] @ key[:, :visible].transpose(1, 2) * factor
            out[b, :, t] = (logits.softmax(-1) @ value[:, :visible]).view(heads_q, head_dim)
            lse[b, :, t] = logits.logsumexp(-1).view(heads_q)
    return out.float().view(query.shape), lse.float().view(query.shape[:-1])
