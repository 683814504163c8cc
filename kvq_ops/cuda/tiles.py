"""One tile of attend: query rows against some tokens of a KV head, keys to logits, logits to weights, weights to sums.

Query, codes and accumulators come as planes (see ``codec.py``), up to four; those that a format does not have are
copies of the first that nothing uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import codec, quantize

GROUP = tl.constexpr(1)
TOKEN = tl.constexpr(2)
CHANNEL = tl.constexpr(3)


@triton.jit
def power_of_two(bits):
    """Of a magnitude's bits the power of two below it and its inverse, both normal numbers."""
    exponent = tl.minimum(tl.maximum(bits >> 23, 2), 252)
    return quantize.floats(exponent << 23), quantize.floats((254 - exponent) << 23)


@triton.jit
def load_plane(query, mask, stride, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
               HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The query's channels that a plane of key columns has, fp32 [rows, columns]; query: pointers [rows]."""
    channel = codec.channels(PLANE, BITS, WORDS, HEAD_DIM, COLUMNS)
    there = mask[:, None] & (channel < HEAD_DIM)[None, :]
    return codec.load_floats(query[:, None] + channel[None, :].to(tl.int64) * stride, there)


@triton.jit
def load_query(q, q_d, mask, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
               CODING: tl.constexpr):  # fmt: skip
    """The query by planes, fp32 [rows, columns], and its unit [rows]: unless scales are to go into it, rows are divided
    by the power of two below their largest."""
    PLANES: tl.constexpr = 8 // BITS * (2 if WORDS else 1)
    q0 = load_plane(q, mask, q_d, 0, BITS, WORDS, HEAD_DIM, COLUMNS)
    q1, q2, q3 = q0, q0, q0
    most = tl.max(quantize.abs_bits(q0), 1)
    if PLANES > 1:
        q1 = load_plane(q, mask, q_d, 1, BITS, WORDS, HEAD_DIM, COLUMNS)
        most = tl.maximum(most, tl.max(quantize.abs_bits(q1), 1))
    if PLANES > 2:
        q2 = load_plane(q, mask, q_d, 2, BITS, WORDS, HEAD_DIM, COLUMNS)
        q3 = load_plane(q, mask, q_d, 3, BITS, WORDS, HEAD_DIM, COLUMNS)
        most = tl.maximum(most, tl.maximum(tl.max(quantize.abs_bits(q2), 1), tl.max(quantize.abs_bits(q3), 1)))
    unit, inverse = power_of_two(most)
    if CODING != CHANNEL:
        inverse = inverse[:, None]
        q0, q1, q2, q3 = q0 * inverse, q1 * inverse, q2 * inverse, q3 * inverse
    return q0, q1, q2, q3, unit


@triton.jit
def load_columns(codes, stride, first, lane, seen, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Columns of a tile of rows from token ``first`` on, [tokens, columns]; stride counts columns."""
    pointers = codec.column_pointers(codes, stride, lane, WORDS, COLUMNS) + first.to(tl.int64) * stride
    WIDTH: tl.constexpr = HEAD_DIM * BITS // (16 if WORDS else 8)
    mask = tl.broadcast_to(seen[:, None], [lane.shape[0], COLUMNS])
    if WIDTH != COLUMNS:
        mask = mask & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def product(s, q, k, SPLIT: tl.constexpr):
    """s + q @ k.T for fp32 q of fp16's range; with SPLIT to 22 bits of q."""
    high = q.to(tl.float16)
    s = tl.dot(high, tl.trans(k), s)
    if SPLIT:
        s = tl.dot((q - high.to(tl.float32)).to(tl.float16), tl.trans(k), s)
    return s


@triton.jit
def key_plane(words, m_low, m_high, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, CODING: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    """Codes of a plane, in groups their levels times mantissas, fp16 [tokens, columns]."""
    if CODING == GROUP:
        x = codec.levels(words, PLANE, BITS, WORDS)
        if BITS == 4 and PLANE % 2 == 1:
            x = codec.scale_groups(x, m_high, COLUMNS)
        else:
            x = codec.scale_groups(x, m_low, COLUMNS)
    else:
        x = codec.decode(words, PLANE, BITS, WORDS)
    return x


@triton.jit
def all_mantissas(scales, stride_plane, token, seen, CODING: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
                  BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """Those of low and of high halves; the same where planes have no halves."""
    low = 0.0
    high = 0.0
    if CODING == GROUP:
        low = codec.load_mantissas(scales, stride_plane, token, seen, 0, BITS, GROUP_SIZE, BLOCKS, HEAD_DIM)
        high = low
        if BITS == 4 and GROUP_SIZE == 32:
            high = codec.load_mantissas(scales, stride_plane, token, seen, 1, BITS, GROUP_SIZE, BLOCKS, HEAD_DIM)
    return low, high


@triton.jit
def fold_scales(q, scales, zeros, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """A plane of the query times a block's scales, and its product with the block's middles (offset and half of all
    codes), fp32 [rows, columns] and [rows]."""
    channel = codec.channels(PLANE, BITS, WORDS, HEAD_DIM, COLUMNS)
    scale = codec.load_floats(scales + channel, channel < HEAD_DIM)
    zero = codec.load_floats(zeros + channel, channel < HEAD_DIM)
    middle = zero + scale * (1 << (BITS - 1))
    # What is no channel has q 0 and scale 0, so no NaN arises there.
    return q * scale[None, :], tl.sum(q * middle[None, :], 1)


@triton.jit
def channel_logits(
    q0, q1, q2, q3, words, scales, zeros, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of one block of keys coded per channel, fp32 [rows, tokens]."""
    PLANES: tl.constexpr = 8 // BITS * (2 if WORDS else 1)
    x0, base = fold_scales(q0, scales, zeros, 0, BITS, WORDS, HEAD_DIM, COLUMNS)
    most = tl.max(quantize.abs_bits(x0), 1)
    x1, x2, x3 = x0, x0, x0
    if PLANES > 1:
        x1, more = fold_scales(q1, scales, zeros, 1, BITS, WORDS, HEAD_DIM, COLUMNS)
        base, most = base + more, tl.maximum(most, tl.max(quantize.abs_bits(x1), 1))
    if PLANES > 2:
        x2, more = fold_scales(q2, scales, zeros, 2, BITS, WORDS, HEAD_DIM, COLUMNS)
        base, most = base + more, tl.maximum(most, tl.max(quantize.abs_bits(x2), 1))
        x3, more = fold_scales(q3, scales, zeros, 3, BITS, WORDS, HEAD_DIM, COLUMNS)
        base, most = base + more, tl.maximum(most, tl.max(quantize.abs_bits(x3), 1))
    unit, inverse = power_of_two(most)
    s = tl.zeros([q0.shape[0], TOKENS], tl.float32)
    inverse = inverse[:, None]
    s = product(s, x0 * inverse, codec.decode(words, 0, BITS, WORDS), SPLIT)
    if PLANES > 1:
        s = product(s, x1 * inverse, codec.decode(words, 1, BITS, WORDS), SPLIT)
    if PLANES > 2:
        s = product(s, x2 * inverse, codec.decode(words, 2, BITS, WORDS), SPLIT)
        s = product(s, x3 * inverse, codec.decode(words, 3, BITS, WORDS), SPLIT)
    return s * unit[:, None] + base[:, None]


@triton.jit
def row_logits(
    q0, q1, q2, q3, words, m_low, m_high, CODING: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys with a scale or a unit a row, without it and without the query's power of two."""
    PLANES: tl.constexpr = 8 // BITS * (2 if WORDS else 1)
    s = tl.zeros([q0.shape[0], TOKENS], tl.float32)
    s = product(s, q0, key_plane(words, m_low, m_high, 0, BITS, WORDS, CODING, COLUMNS), SPLIT)
    if PLANES > 1:
        s = product(s, q1, key_plane(words, m_low, m_high, 1, BITS, WORDS, CODING, COLUMNS), SPLIT)
    if PLANES > 2:
        s = product(s, q2, key_plane(words, m_low, m_high, 2, BITS, WORDS, CODING, COLUMNS), SPLIT)
        s = product(s, q3, key_plane(words, m_low, m_high, 3, BITS, WORDS, CODING, COLUMNS), SPLIT)
    return s


@triton.jit
def scaled_logits(
    q0, q1, q2, q3, factor, words, scales, scales_n, first, lane, seen, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr,
    CODING: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys with a scale or a unit a row; factor [rows] is the query's."""
    if CODING == GROUP:
        scale = codec.load_units(scales + first.to(tl.int64), lane, seen)
    else:
        scale = tl.load(scales + (first.to(tl.int64) + lane) * scales_n, mask=seen, other=0.0)
    m_low, m_high = all_mantissas(
        scales + first.to(tl.int64), scales_n, lane, seen, CODING, BITS, GROUP_SIZE, BLOCKS, HEAD_DIM
    )
    s = row_logits(q0, q1, q2, q3, words, m_low, m_high, CODING, BITS, WORDS, COLUMNS, TOKENS, SPLIT)
    return s * factor[:, None] * scale[None, :]


@triton.jit
def full_logits(query, query_mask, query_d, full, slot, slot_mask, stride, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr):
    """Of keys in full precision, fp32 [rows, slots]; query [rows]: pointers. Products of 16-bit floats are exact in
    tf32, fp32 takes three."""
    EXACT: tl.constexpr = full.dtype.element_ty != tl.float32 and not SPLIT
    s = tl.zeros([query_mask.shape[0], slot.shape[0]], tl.float32)
    for first in range(0, HEAD_DIM, 32):
        channel = first + tl.arange(0, 32)
        there = (channel < HEAD_DIM)[None, :]
        q = codec.load_floats(query[:, None] + channel[None, :].to(tl.int64) * query_d, query_mask[:, None] & there)
        k = codec.load_floats(full + slot[:, None] * stride + channel[None, :], slot_mask[:, None] & there)
        if EXACT:
            s = tl.dot(q, tl.trans(k), s, input_precision="tf32")
        else:
            s = tl.dot(q, tl.trans(k), s, input_precision="tf32x3")
    return s


@triton.jit
def softmax(logits, visible, most, total):
    """Weights of a tile, the new largest logit and sum of each row, and what older sums are to be multiplied by; logits
    count in powers of two."""
    logits = tl.where(visible, logits, float("-inf"))
    new = tl.maximum(most, tl.max(logits, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: weights must be 0, not NaN
    weights = tl.exp2(logits - base[:, None])
    correction = tl.exp2(most - base)
    return weights, new, total * correction + tl.sum(weights, 1), correction


@triton.jit
def add_plane(acc, w, left, x, SPLIT: tl.constexpr):
    acc = tl.dot(w, x, acc)
    if SPLIT:
        acc = tl.dot(left, x, acc)
    return acc


@triton.jit
def add_values(
    a0, a1, a2, a3, largest, unit, weights, correction, words, m_low, m_high, CODING: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Accumulators plus a tile's weights (scales in them) times its codes. Accumulators count in ``unit`` [rows], the
    power of two below the largest weight so far, ``largest``, as it counts now."""
    PLANES: tl.constexpr = 8 // BITS * (2 if WORDS else 1)
    largest = tl.maximum(largest * correction, quantize.floats(tl.max(weights.to(tl.int32, bitcast=True), 1)))
    new_unit, inverse = power_of_two(largest.to(tl.int32, bitcast=True))
    c = (unit * correction * inverse)[:, None]
    scaled = weights * inverse[:, None]
    w = scaled.to(tl.float16)
    left = w
    if SPLIT:
        left = (scaled - w.to(tl.float32)).to(tl.float16)
    a0 = add_plane(a0 * c, w, left, key_plane(words, m_low, m_high, 0, BITS, WORDS, CODING, COLUMNS), SPLIT)
    if PLANES > 1:
        a1 = add_plane(a1 * c, w, left, key_plane(words, m_low, m_high, 1, BITS, WORDS, CODING, COLUMNS), SPLIT)
    if PLANES > 2:
        a2 = add_plane(a2 * c, w, left, key_plane(words, m_low, m_high, 2, BITS, WORDS, CODING, COLUMNS), SPLIT)
        a3 = add_plane(a3 * c, w, left, key_plane(words, m_low, m_high, 3, BITS, WORDS, CODING, COLUMNS), SPLIT)
    return a0, a1, a2, a3, largest, new_unit


@triton.jit
def value_scales_of(scales, stride, zeros, zeros_n, first, lane, seen, CODING: tl.constexpr, BITS: tl.constexpr):
    """Scale or unit, and middle (offset and half of all codes), of a tile of rows, fp32 [tokens]."""
    middle = 0.0
    if CODING == GROUP:
        scale = codec.load_units(scales + first.to(tl.int64), lane, seen)
    else:
        at = first.to(tl.int64) + lane
        scale = tl.load(scales + at * stride, mask=seen, other=0.0)
        if CODING == TOKEN:
            middle = tl.load(zeros + at * zeros_n, mask=seen, other=0.0) + scale * (1 << (BITS - 1))
    return scale, middle


@triton.jit
def value_tile(
    a0, a1, a2, a3, largest, unit, bias, most, total, logits, visible, first, lane, seen,
    codes, codes_n, scales, scales_n, zeros, zeros_n, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr,
    CODING: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The softmax of a tile and its values: everything that the loop carries, one tile later."""
    words = load_columns(codes, codes_n, first, lane, seen, BITS, WORDS, HEAD_DIM, COLUMNS)
    scale, middle = value_scales_of(scales, scales_n, zeros, zeros_n, first, lane, seen, CODING, BITS)
    m_low, m_high = all_mantissas(
        scales + first.to(tl.int64), scales_n, lane, seen, CODING, BITS, GROUP_SIZE, BLOCKS, HEAD_DIM
    )
    weights, most, total, correction = softmax(logits, visible, most, total)
    if CODING == TOKEN:
        bias = bias * correction + tl.sum(tl.where(visible, weights * middle[None, :], 0.0), 1)
    weights = tl.where(visible, weights * scale[None, :], 0.0)  # 0 times the NaN of a token not seen
    a0, a1, a2, a3, largest, unit = add_values(
        a0, a1, a2, a3, largest, unit, weights, correction, words, m_low, m_high, CODING, BITS, WORDS, COLUMNS, SPLIT
    )
    return a0, a1, a2, a3, largest, unit, bias, most, total
