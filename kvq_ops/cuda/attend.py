"""The kernels of ``kvq::attend``: one program reads a run of tokens of one KV head once for all query rows that share
it (flash decoding), a second kernel combines the runs of each row in a fixed order where there is more than one.

Both products run on the tensor cores in fp16 with fp32 sums. Codes are exact in fp16, and so are the levels of 4-bit
codes times their mantissas. What scales a row of the cache stays outside of the products: a key row's scale multiplies
its logit, a value row's its weight; scales of keys coded per channel go into the query, once a block, and their offsets
into one number to add. Query rows and weights are brought to the range of fp16 by powers of two; bf16 magnitudes
survive so. What fp16 leaves over takes a second product (SPLIT): of fp32 queries and their weights, and of fp16 queries
times scales.

Which tokens a program reads follows from the length that it finds on the device, so that a short sequence in a large
cache is spread over as many programs as in a small one; programs without tokens leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import codec, quantize, tiles

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
    count = (tl.maximum(length - SINKS, 0) + (TOKENS - 1)) // TOKENS
    return count, tl.maximum((count + splits - 1) // splits, MIN_TILES)


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
    q0, q1, q2, q3, q_unit = tiles.load_query(q, q_d, mask, KEY_BITS, KEY_WORDS, HEAD_DIM, KEY_COLUMNS, KEY_CODING)
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
        words = tiles.load_columns(kc, kc_n, at, lane, seen, KEY_BITS, KEY_WORDS, HEAD_DIM, KEY_COLUMNS)
        if KEY_CODING == CHANNEL:
            block = tl.cast(i // (KEY_BLOCK // TOKENS), tl.int64)
            logits = tiles.channel_logits(
                q0, q1, q2, q3, words, ks + block * ks_n, kz + block * kz_n, HEAD_DIM, KEY_BITS, KEY_WORDS, KEY_COLUMNS,
                TOKENS, KEY_SPLIT,
            )  # fmt: skip
            logits *= factor
        else:
            logits = tiles.scaled_logits(
                q0, q1, q2, q3, q_unit * factor, words, ks, ks_n, at, lane, seen, HEAD_DIM, BLOCKS, KEY_CODING,
                KEY_BITS, KEY_GROUP, KEY_WORDS, KEY_COLUMNS, TOKENS, KEY_SPLIT,
            )  # fmt: skip
        a0, a1, a2, a3, largest, unit, bias, most, total = tiles.value_tile(
            a0, a1, a2, a3, largest, unit, bias, most, total, logits, lane[None, :] < (limit - at)[:, None], at, lane,
            seen, vc, vc_n, vs, vs_n, vz, vz_n, HEAD_DIM, BLOCKS, VALUE_CODING, VALUE_BITS, VALUE_GROUP, VALUE_WORDS,
            VALUE_COLUMNS, SPLIT,
        )  # fmt: skip
    if KEY_CODING == CHANNEL:
        for i in range(tl.maximum(first, coded), last):
            at = SINKS + i * TOKENS
            seen = lane < length - at
            slot = (SINKS + (i * TOKENS + lane) % (2 * KEY_BLOCK)).to(tl.int64)
            logits = tiles.full_logits(q, mask, q_d, key_full, slot, seen, kf_n, HEAD_DIM, SPLIT) * factor
            a0, a1, a2, a3, largest, unit, bias, most, total = tiles.value_tile(
                a0, a1, a2, a3, largest, unit, bias, most, total, logits, lane[None, :] < (limit - at)[:, None], at,
                lane, seen, vc, vc_n, vs, vs_n, vz, vz_n, HEAD_DIM, BLOCKS, VALUE_CODING, VALUE_BITS, VALUE_GROUP,
                VALUE_WORDS, VALUE_COLUMNS, SPLIT,
            )  # fmt: skip
    return a0, a1, a2, a3, unit, bias, most, total


@triton.jit
def add_sinks(
    acc, most, total, logits, limit, length, full, full_n, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SINKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The first tokens of a sequence, kept in full precision, to rows that are sums in the order of channels."""
    slot = tl.arange(0, SLOTS)
    visible = (slot[None, :] < limit[:, None]) & (slot < SINKS)[None, :]
    weights, most, total, correction = tiles.softmax(logits, visible, most, total)
    acc = acc * correction[:, None]
    channel = tl.arange(0, WIDTH)
    for s in range(SINKS):
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
    KEY_ALIGN: tl.constexpr,
    VALUE_CODING: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_WORDS: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    ROTATED: tl.constexpr, KEY_SPLIT: tl.constexpr, SPLIT: tl.constexpr,
    ALONE: tl.constexpr, LSE: tl.constexpr, VERSION: tl.constexpr,
):
    # fmt: on
    """A program for each split of each tile of query rows of each KV head."""
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits % row_tiles
    bh = (tl.program_id(0) // (splits * row_tiles)).to(tl.int64)
    b, h = bh // heads_kv, bh % heads_kv
    length = held(lengths, b, max_tokens)
    count, per = tiles_of(length, splits, TOKENS, SINKS)
    first, last = split * per, tl.minimum(split * per + per, count)
    if (first >= count) & (split > 0):
        return
    kc_n, vc_n = tl.multiple_of(kc_n, KEY_ALIGN), tl.multiple_of(vc_n, VALUE_ALIGN)
    KEY_BYTES: tl.constexpr = KEY_ALIGN * (2 if KEY_WORDS else 1)
    VALUE_BYTES: tl.constexpr = VALUE_ALIGN * (2 if VALUE_WORDS else 1)
    kc_b, kc_h = tl.multiple_of(kc_b, KEY_BYTES), tl.multiple_of(kc_h, KEY_BYTES)
    vc_b, vc_h = tl.multiple_of(vc_b, VALUE_BYTES), tl.multiple_of(vc_h, VALUE_BYTES)
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
            logits = tiles.full_logits(q, mask, q_d, key_full, slot.to(tl.int64), seen, kf_n, HEAD_DIM, SPLIT) * factor
            acc, most, total = add_sinks(
                acc, most, total, logits, limit, length, value_full + b * vf_b + h * vf_h, vf_n, HEAD_DIM, 64 * BLOCKS,
                SINKS, SLOTS,
            )  # fmt: skip
    at = bh * (group * tokens) + row
    write(out, lse, stats, acc, most, total, at, mask, split, splits, HEAD_DIM, 64 * BLOCKS, ALONE, LSE)


@triton.jit
def combine_kernel(
    partial, stats, lengths, out, lse, rows, max_tokens, splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, SINKS: tl.constexpr, ALL: tl.constexpr, STEP: tl.constexpr, LSE: tl.constexpr,
    VERSION: tl.constexpr,
):  # fmt: skip
    """A program a query row, ``rows`` of them a sequence: its splits in their order, STEP at a time."""
    row = tl.program_id(0).to(tl.int64)
    count, per = tiles_of(held(lengths, row // rows, max_tokens), splits, TOKENS, SINKS)
    live = tl.maximum((count + per - 1) // per, 1)
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
