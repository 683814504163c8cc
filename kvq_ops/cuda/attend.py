"""The kernels of ``kvq::attend``: one program reads a run of tokens of one KV head once for all query rows that share
it (flash decoding), a second kernel combines the runs of each row in a fixed order where there is more than one.

Both products run on the tensor cores in fp16 with fp32 sums. Codes are exact in fp16, and so are 4-bit midpoints times
their mantissas. What scales a row of the cache stays outside of the products: a key row's scale multiplies its logit, a
value row's its weight; scales of keys coded per channel go into the query, once a block, their offsets into one number
to add. Query rows and weights are brought to the range of fp16 by powers of two, so bf16 magnitudes survive. What fp16
leaves over takes a second product (SPLIT): of fp32 queries and their weights, and of fp16 queries times scales.

Which tokens a program reads follows from the length that it finds on the device, so that a short sequence in a large
cache is spread over as many programs as in a small one; programs without tokens leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_ops.cuda import codec, quantize

GROUP = tl.constexpr(1)
TOKEN = tl.constexpr(2)
CHANNEL = tl.constexpr(3)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MIN_TILES = tl.constexpr(2)


@triton.jit
def held(lengths, b, max_tokens):
    """The tokens of a sequence: a length past the capacity says that an append found no room."""
    return tl.minimum(tl.maximum(tl.load(lengths + b), 0), max_tokens)


@triton.jit
def tiles_of(length, splits, TOKENS: tl.constexpr, SINKS: tl.constexpr):
    """Tiles of coded tokens of a sequence, and how many of them each of its splits takes."""
    tiles = (tl.maximum(length - SINKS, 0) + (TOKENS - 1)) // TOKENS
    return tiles, tl.maximum((tiles + splits - 1) // splits, MIN_TILES)


@triton.jit
def power_of_two(bits):
    """Of a magnitude's bits the power of two below it and its inverse, both normal numbers."""
    exponent = tl.minimum(tl.maximum(bits >> 23, 2), 252)
    return quantize.floats(exponent << 23), quantize.floats((254 - exponent) << 23)


@triton.jit
def load_plane(query, mask, stride, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """The query's channels that a plane of key columns has, fp32 [rows, columns]; query: pointers [rows]."""
    channel = codec.channels(PLANE, BITS, WORDS, HEAD_DIM, COLUMNS)
    there = mask[:, None] & (channel < HEAD_DIM)[None, :]
    return codec.load_floats(query[:, None] + channel[None, :].to(tl.int64) * stride, there)


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
    """Codes of a plane, in groups times their mantissas, fp16 [tokens, columns]."""
    x = codec.decode(words, PLANE, BITS, WORDS)
    if CODING == GROUP:
        if BITS == 4 and PLANE % 2 == 1:
            x = codec.scale_groups(x, m_high, COLUMNS)
        else:
            x = codec.scale_groups(x, m_low, COLUMNS)
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
def load_columns(codes, stride, first, lane, seen, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Columns of a tile of rows from token ``first`` on, [tokens, columns]; stride counts columns."""
    pointers = codec.column_pointers(codes, stride, lane, BITS, WORDS, COLUMNS) + first.to(tl.int64) * stride
    WIDTH: tl.constexpr = HEAD_DIM * BITS // (16 if WORDS else 8)
    mask = tl.broadcast_to(seen[:, None], [lane.shape[0], COLUMNS])
    if WIDTH != COLUMNS:
        mask = mask & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    return tl.load(pointers, mask=mask, other=0)


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
    codes, codes_n, scales, scales_n, zeros, zeros_n, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, CODING: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
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


@triton.jit
def add_sinks(
    acc, most, total, logits, limit, length, full, full_n, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SINKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The first tokens of a sequence, kept in full precision, to rows that are sums in the order of channels."""
    slot = tl.arange(0, SLOTS)
    visible = (slot[None, :] < limit[:, None]) & (slot < SINKS)[None, :]
    weights, most, total, correction = softmax(logits, visible, most, total)
    acc = acc * correction[:, None]
    channel = tl.arange(0, WIDTH)
    for s in range(0, SINKS):
        value = codec.load_floats(full + s * full_n + channel, channel < tl.where(length > s, HEAD_DIM, 0))
        weight = tl.sum(tl.where((slot == s)[None, :], weights, 0.0), 1)
        acc += tl.where((limit > s)[:, None], weight[:, None] * value[None, :], 0.0)
    return acc, most, total


@triton.jit
def row_values(
    a0, a1, a2, a3, unit, bias, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Accumulators to sums of values in the order of channels, [rows, 64 * BLOCKS]."""
    acc = codec.assemble(a0, a1, a2, a3, ROWS, BITS, WORDS, HEAD_DIM, BLOCKS)
    acc = acc * unit[:, None] + bias[:, None]
    if ROTATED:
        there = (tl.arange(0, 64 * BLOCKS) < HEAD_DIM)[None, :]
        acc = quantize.rotate(tl.where(there, acc, 0.0), ROWS, HEAD_DIM, 64 * BLOCKS)
    return acc


@triton.jit
def write(out, lse, stats, acc, most, total, row, mask, split, splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
          ALONE: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Rows (of all of them) to out, or, where others follow, sums to out and largest logits and sums to stats."""
    channel = tl.arange(0, WIDTH)
    there = mask[:, None] & (channel < HEAD_DIM)[None, :]
    if ALONE:
        some = total != 0
        x = tl.div_rn(acc, tl.where(some, total, 1.0)[:, None])
        codec.store_floats(out + row[:, None] * HEAD_DIM + channel[None, :], tl.where(some[:, None], x, 0.0), there)
        if LSE:
            tl.store(lse + row, tl.where(some, most * LN2 + tl.log(total), float("-inf")), mask=mask)
    else:
        at = row * splits + split
        tl.store(out + at[:, None] * HEAD_DIM + channel[None, :], acc, mask=there)
        tl.store(stats + 2 * at, most, mask=mask)
        tl.store(stats + 2 * at + 1, total, mask=mask)


# fmt: off
@triton.jit
def attend_kernel(
    query, key_codes, key_scales, key_zeros, key_full, value_codes, value_scales, value_zeros, value_full, lengths,
    out, lse, stats, scale, q_b, q_h, q_t, q_d,
    kc_b, kc_h, kc_n, ks_b, ks_h, ks_n, kz_b, kz_h, kz_n, kf_b, kf_h, kf_n,
    vc_b, vc_h, vc_n, vs_b, vs_h, vs_n, vz_b, vz_h, vz_n, vf_b, vf_h, vf_n,
    heads_kv, group, tokens, max_tokens, row_tiles, splits,
    HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr,
    SLOTS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    KEY_CODING: tl.constexpr, KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_WORDS: tl.constexpr,
    VALUE_CODING: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_WORDS: tl.constexpr,
    ROTATED: tl.constexpr, KEY_SPLIT: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr, LSE: tl.constexpr, VERSION: tl.constexpr,
):
    # fmt: on
    """A program for each split of each tile of query rows of each KV head."""
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits % row_tiles
    bh = (tl.program_id(0) // (splits * row_tiles)).to(tl.int64)
    b, h = bh // heads_kv, bh % heads_kv
    length = held(lengths, b, max_tokens)
    tiles, per = tiles_of(length, splits, TOKENS, SINKS)
    first, last = split * per, tl.minimum(split * per + per, tiles)
    if (first >= tiles) & (split > 0):
        return
    factor = tl.cast(scale, tl.float32) * LOG2E
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = row < group * tokens
    limit = tl.where(mask, length - tokens + 1 + row % tokens, 0)  # tokens that a row sees
    q = query + b * q_b + (h * group + row // tokens).to(tl.int64) * q_h + (row % tokens).to(tl.int64) * q_t
    key_full += b * kf_b + h * kf_h
    state = attend_coded(
        q, q_d, mask, limit, factor, length, first, last,
        key_codes + b * kc_b + h * kc_h, kc_n, key_scales + b * ks_b + h * ks_h, ks_n,
        key_zeros + b * kz_b + h * kz_h, kz_n, key_full, kf_n,
        value_codes + b * vc_b + h * vc_h, vc_n, value_scales + b * vs_b + h * vs_h, vs_n,
        value_zeros + b * vz_b + h * vz_h, vz_n, HEAD_DIM, BLOCKS, ROWS, TOKENS, SINKS, KEY_BLOCK,
        KEY_CODING, KEY_BITS, KEY_GROUP, KEY_WORDS, VALUE_CODING, VALUE_BITS, VALUE_GROUP, VALUE_WORDS, KEY_SPLIT,
        SPLIT,
    )  # fmt: skip
    a0, a1, a2, a3, unit, bias, most, total = state
    acc = row_values(a0, a1, a2, a3, unit, bias, ROWS, HEAD_DIM, BLOCKS, VALUE_BITS, VALUE_WORDS, ROTATED)
    if SINKS > 0:
        if split == 0:
            slot = tl.arange(0, SLOTS)
            seen = slot < tl.minimum(length, SINKS)
            logits = full_logits(q, mask, q_d, key_full, slot.to(tl.int64), seen, kf_n, HEAD_DIM, SPLIT) * factor
            acc, most, total = add_sinks(
                acc, most, total, logits, limit, length, value_full + b * vf_b + h * vf_h, vf_n, HEAD_DIM, 64 * BLOCKS,
                SINKS, SLOTS,
            )  # fmt: skip
    at = bh * (group * tokens) + row
    write(out, lse, stats, acc, most, total, at, mask, split, splits, HEAD_DIM, 64 * BLOCKS, ALONE, LSE)


@triton.jit
def attend_coded(
    q, q_d, mask, limit, factor, length, first, last,
    kc, kc_n, ks, ks_n, kz, kz_n, key_full, kf_n, vc, vc_n, vs, vs_n, vz, vz_n,
    HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr,
    KEY_BLOCK: tl.constexpr, KEY_CODING: tl.constexpr, KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    KEY_WORDS: tl.constexpr, VALUE_CODING: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr,
    VALUE_WORDS: tl.constexpr, KEY_SPLIT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Tiles first..last: accumulators with their unit and bias, largest logits, sums. Pointers are the head's own."""
    KEY_COLUMNS: tl.constexpr = BLOCKS * KEY_BITS * (4 if KEY_WORDS else 8)
    VALUE_COLUMNS: tl.constexpr = BLOCKS * VALUE_BITS * (4 if VALUE_WORDS else 8)
    q0, q1, q2, q3, q_unit = load_query(q, q_d, mask, KEY_BITS, KEY_WORDS, HEAD_DIM, KEY_COLUMNS, KEY_CODING)
    lane = tl.arange(0, TOKENS)
    a0 = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    a1, a2, a3 = a0, a0, a0
    largest = tl.zeros([ROWS], tl.float32)
    unit, bias, total, most = largest + 1.0, largest, largest, largest + float("-inf")
    coded = last
    if KEY_CODING == CHANNEL:
        coded = tl.minimum(last, tl.maximum(length - SINKS, 0) // KEY_BLOCK * (KEY_BLOCK // TOKENS))
    for i in range(first, coded):
        at = SINKS + i * TOKENS
        seen = lane < length - at
        words = load_columns(kc, kc_n, at, lane, seen, KEY_BITS, KEY_WORDS, HEAD_DIM, KEY_COLUMNS)
        if KEY_CODING == CHANNEL:
            block = tl.cast(i // (KEY_BLOCK // TOKENS), tl.int64)
            logits = channel_logits(
                q0, q1, q2, q3, words, ks + block * ks_n, kz + block * kz_n, HEAD_DIM, KEY_BITS, KEY_WORDS, KEY_COLUMNS,
                TOKENS, KEY_SPLIT,
            )  # fmt: skip
            logits *= factor
        else:
            logits = scaled_logits(
                q0, q1, q2, q3, q_unit * factor, words, ks, ks_n, at, lane, seen, HEAD_DIM, BLOCKS, KEY_CODING, KEY_BITS,
                KEY_GROUP, KEY_WORDS, KEY_COLUMNS, TOKENS, KEY_SPLIT,
            )  # fmt: skip
        a0, a1, a2, a3, largest, unit, bias, most, total = value_tile(
            a0, a1, a2, a3, largest, unit, bias, most, total, logits, lane[None, :] < (limit - at)[:, None], at, lane,
            seen, vc, vc_n, vs, vs_n, vz, vz_n, HEAD_DIM, BLOCKS, VALUE_CODING, VALUE_BITS, VALUE_GROUP, VALUE_WORDS,
            VALUE_COLUMNS, SPLIT,
        )  # fmt: skip
    if KEY_CODING == CHANNEL:
        for i in range(tl.maximum(first, coded), last):
            at = SINKS + i * TOKENS
            seen = lane < length - at
            slot = (SINKS + (i * TOKENS + lane) % (2 * KEY_BLOCK)).to(tl.int64)
            logits = full_logits(q, mask, q_d, key_full, slot, seen, kf_n, HEAD_DIM, SPLIT) * factor
            a0, a1, a2, a3, largest, unit, bias, most, total = value_tile(
                a0, a1, a2, a3, largest, unit, bias, most, total, logits, lane[None, :] < (limit - at)[:, None], at,
                lane, seen, vc, vc_n, vs, vs_n, vz, vz_n, HEAD_DIM, BLOCKS, VALUE_CODING, VALUE_BITS, VALUE_GROUP,
                VALUE_WORDS, VALUE_COLUMNS, SPLIT,
            )  # fmt: skip
    return a0, a1, a2, a3, unit, bias, most, total


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
def combine_kernel(
    partial, stats, lengths, out, lse, rows, max_tokens, splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, SINKS: tl.constexpr, ALL: tl.constexpr, STEP: tl.constexpr, LSE: tl.constexpr,
    VERSION: tl.constexpr,
):  # fmt: skip
    """A program a query row, ``rows`` of them a sequence: its splits in their order, STEP at a time."""
    row = tl.program_id(0).to(tl.int64)
    tiles, per = tiles_of(held(lengths, row // rows, max_tokens), splits, TOKENS, SINKS)
    live = tl.maximum((tiles + per - 1) // per, 1)
    split = tl.arange(0, ALL)
    at = stats + 2 * (row * splits + split)
    each = tl.load(at, mask=split < live, other=float("-inf"))
    most = tl.max(each, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp2(each - base) * tl.load(at + 1, mask=split < live, other=0.0), 0)
    channel = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(0, live, STEP):
        some = start + tl.arange(0, STEP)
        those = row * splits + some
        weight = tl.exp2(tl.load(stats + 2 * those, mask=some < live, other=float("-inf")) - base)
        there = (some < live)[:, None] & (channel < HEAD_DIM)[None, :]
        x = tl.load(partial + those[:, None] * HEAD_DIM + channel[None, :], mask=there, other=0.0)
        acc += tl.sum(weight[:, None] * x, 0)
    seen = total != 0
    acc = tl.where(seen, tl.div_rn(acc, tl.where(seen, total, 1.0)), 0.0)
    codec.store_floats(out + row * HEAD_DIM + channel, acc, channel < HEAD_DIM)
    if LSE:
        tl.store(lse + row, tl.where(seen, most * LN2 + tl.log(total), float("-inf")))
