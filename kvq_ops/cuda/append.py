"""The kernels of ``kvq::append``: one that codes rows and blocks of keys, one that keeps the newest keys and advances
lengths. Where one program holds all new rows of a sequence and keys are coded row by row, it advances the length too,
and there is one launch.

What finds no room is dropped: ``start + tokens`` past the capacity writes the rows that fit, and the length becomes
capacity + 1, by which readers know (they take it for the capacity). No offset is ever formed from a length that was not
held to 0..capacity + 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import codec, quantize

ROW = tl.constexpr(0)
GROUP = tl.constexpr(1)
TOKEN = tl.constexpr(2)
CHANNEL = tl.constexpr(3)


@triton.jit
def held(lengths, b, max_tokens):
    """The length of a sequence before this append, int64, capacity + 1 after one that found no room."""
    length = tl.load(lengths + b).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), max_tokens.to(tl.int64) + 1)


@triton.jit
def advance(lengths, b, start, tokens, max_tokens):
    end = tl.minimum(start + tokens, max_tokens.to(tl.int64) + 1)
    tl.debug_barrier()  # other warps may still have to read the old length
    tl.store(lengths + b, tl.minimum(end, 2147483647).to(tl.int32))


@triton.jit
def load_halves(x, row, stride, valid, byte, HEAD_DIM: tl.constexpr, NIBBLES: tl.constexpr):
    """Both halves of rows, fp32 [rows, columns]; row: offsets of their first element."""
    low, high = codec.halves(byte, HEAD_DIM, NIBBLES)
    low_mask, high_mask = valid[:, None] & (low < HEAD_DIM)[None, :], valid[:, None] & (high < HEAD_DIM)[None, :]
    return (
        codec.load_floats(x + row[:, None] + low[None, :].to(tl.int64) * stride, low_mask),
        codec.load_floats(x + row[:, None] + high[None, :].to(tl.int64) * stride, high_mask),
    )


@triton.jit
def store_groups(
    scales, stride_plane, exponent, low, high, valid, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Exponents and mantissas to scales, the pointers [rows] of the first plane."""
    tl.store(scales, exponent.to(tl.uint8), mask=valid)
    block = tl.arange(0, BLOCKS)
    there = valid[:, None] & (block * 64 < HEAD_DIM)[None, :]
    if GROUP_SIZE == 32:  # both halves of a block share a byte; a last 8-bit block of up to 32 channels is one group
        if BITS == 8:
            high = tl.where((block * 64 + 32 < HEAD_DIM)[None, :], high, 0)
        tl.store(scales[:, None] + (1 + block)[None, :] * stride_plane, (low | high << 4).to(tl.uint8), mask=there)
    else:  # neighbouring blocks do
        low = tl.where((block * 64 < HEAD_DIM)[None, :], low, 0)
        if BLOCKS == 1:
            tl.store(scales[:, None] + (1 + block)[None, :] * stride_plane, low.to(tl.uint8), mask=there)
        else:
            even, odd = tl.split(tl.reshape(low, [ROWS, BLOCKS // 2, 2]))
            pair = tl.arange(0, BLOCKS // 2)
            there = valid[:, None] & (pair * 128 < HEAD_DIM)[None, :]
            tl.store(scales[:, None] + (1 + pair)[None, :] * stride_plane, (even | odd << 4).to(tl.uint8), mask=there)


@triton.jit
def code_groups(
    x, row, stride, scales, stride_plane, codes, valid, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = 127.0 if BITS == 4 else 127.5  # the largest level
    byte = tl.arange(0, 32 * BLOCKS)
    # Groups of 32 are what the nibbles of a byte are; groups of 64 add errors 32 channels apart.
    NIBBLES: tl.constexpr = BITS == 4 and GROUP_SIZE == 32
    low, high = load_halves(x, row, stride, valid, byte, HEAD_DIM, NIBBLES)
    if ROTATED:
        low, high, finite = quantize.usable_rows(low, high, quantize.ROTATED_LIMIT)
        rows = codec.from_halves(low, high, ROWS, HEAD_DIM, BLOCKS, NIBBLES)
        rows = quantize.rotate(rows, ROWS, HEAD_DIM, 64 * BLOCKS)
        low, high = codec.to_halves(rows, ROWS, HEAD_DIM, BLOCKS, NIBBLES)
    else:
        low, high, finite = quantize.usable_rows(low, high, quantize.ABSMAX_LIMIT)
    wanted_low = quantize.group_absmax(low, ROWS, BLOCKS, TOP)
    wanted_high = quantize.group_absmax(high, ROWS, BLOCKS, TOP)
    if GROUP_SIZE == 64:
        wanted_low = tl.maximum(wanted_low, wanted_high)
        wanted_high = wanted_low
    widest = tl.maximum(tl.max(wanted_low, 1), tl.max(wanted_high, 1))
    usable = finite & (widest != 0)
    exponent, inverse = quantize.row_unit(widest)
    low_channel, high_channel = codec.halves(byte, HEAD_DIM, NIBBLES)
    m_low, m_high = quantize.mantissas(
        low, high, low_channel < HEAD_DIM, high_channel < HEAD_DIM, inverse, wanted_low, wanted_high, ROWS, BLOCKS,
        BITS, GROUP_SIZE,
    )  # fmt: skip
    exponent = tl.where(finite, tl.where(widest != 0, exponent, 0), 255)
    nibble_low = tl.where(usable[:, None], m_low - 1.0, 0.0).to(tl.int32)
    nibble_high = tl.where(usable[:, None], m_high - 1.0, 0.0).to(tl.int32)
    store_groups(
        scales, stride_plane, exponent, nibble_low, nibble_high, valid, ROWS, BLOCKS, BITS, GROUP_SIZE, HEAD_DIM
    )
    if GROUP_SIZE == 64 and HEAD_DIM % 64:
        low, high = load_halves(x, row, stride, valid, byte, HEAD_DIM, True)
        low, high, finite = quantize.usable_rows(low, high, quantize.ABSMAX_LIMIT)
    low_code = quantize.group_codes(low, inverse, m_low, usable, ROWS, BLOCKS, BITS)
    high_code = quantize.group_codes(high, inverse, m_high, usable, ROWS, BLOCKS, BITS)
    codec.store_codes(codes, byte, low_code, high_code, valid[:, None], HEAD_DIM, BITS)


@triton.jit
def code_rows(
    x, row, stride, codes, scales, zeros, stride_plane, valid, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, CODING: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """One side of some rows; codes [rows, 1], scales and zeros [rows] are pointers."""
    if CODING == GROUP:
        code_groups(
            x, row, stride, scales, stride_plane, codes, valid, HEAD_DIM, BLOCKS, ROWS, BITS, GROUP_SIZE, ROTATED
        )
    else:
        LIMIT: tl.constexpr = (1 << (BITS - 1)) - 1
        byte = tl.arange(0, 32 * BLOCKS)
        low, high = load_halves(x, row, stride, valid, byte, HEAD_DIM, BITS == 4)
        if CODING == ROW:
            low_code, high_code, scale = quantize.quantize_row(low, high, LIMIT)
        else:
            low_channel, high_channel = codec.halves(byte, HEAD_DIM, BITS == 4)
            low_code, high_code, scale, zero = quantize.quantize_token(
                low, high, (low_channel < HEAD_DIM)[None, :], (high_channel < HEAD_DIM)[None, :], LIMIT
            )
            tl.store(zeros, zero, mask=valid)
        tl.store(scales, scale, mask=valid)
        codec.store_codes(codes, byte, low_code, high_code, valid[:, None], HEAD_DIM, BITS)


@triton.jit
def keep_rows(x, row, stride, full, valid, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows as they are to full [rows], pointers."""
    channel = tl.arange(0, 64 * BLOCKS)
    mask = valid[:, None] & (channel < HEAD_DIM)[None, :]
    codec.copy_floats(full[:, None] + channel[None, :], x + row[:, None] + channel[None, :].to(tl.int64) * stride, mask)


@triton.jit
def freeze(
    key, key_t, key_d, codes, codes_n, scales, scales_n, zeros, zeros_n, full, full_n, start, block, chunk, wanted,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, KEY_BLOCK: tl.constexpr, SINKS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """64 channels of one block of keys; pointers are those of the sequence and head. Old rows come from the ring, which
    nobody writes before the next launch."""
    LIMIT: tl.constexpr = (1 << (BITS - 1)) - 1
    token = SINKS + block * KEY_BLOCK + tl.arange(0, KEY_BLOCK).to(tl.int64)
    old = token < start
    slot = SINKS + (token - SINKS) % (2 * KEY_BLOCK)
    byte = chunk * 32 + tl.arange(0, 32)
    low, high = load_halves(key, (token - start) * key_t, key_d, wanted & ~old, byte, HEAD_DIM, BITS == 4)
    low_old, high_old = load_halves(full, slot * full_n, 1, wanted & old, byte, HEAD_DIM, BITS == 4)
    low, high = tl.where(old[:, None], low_old, low), tl.where(old[:, None], high_old, high)
    low_code, low_scale, low_zero = quantize.quantize_channels(low, LIMIT, NARROW)
    high_code, high_scale, high_zero = quantize.quantize_channels(high, LIMIT, NARROW)
    rows = tl.full([KEY_BLOCK, 1], 1, tl.int1) & wanted
    codec.store_codes(codes + token[:, None] * codes_n, byte, low_code, high_code, rows, HEAD_DIM, BITS)
    low_channel, high_channel = codec.halves(byte, HEAD_DIM, BITS == 4)
    store_channels(scales + block * scales_n, low_channel, low_scale, wanted, HEAD_DIM, NARROW)
    store_channels(scales + block * scales_n, high_channel, high_scale, wanted, HEAD_DIM, NARROW)
    tl.store(zeros + block * zeros_n + low_channel, low_zero, mask=wanted & (low_channel < HEAD_DIM))
    tl.store(zeros + block * zeros_n + high_channel, high_zero, mask=wanted & (high_channel < HEAD_DIM))


@triton.jit
def store_channels(scales, channel, scale, wanted, HEAD_DIM: tl.constexpr, NARROW: tl.constexpr):
    """Narrow scales are bf16 by their upper bits: they were rounded up to them."""
    mask = wanted & (channel < HEAD_DIM)
    if NARROW:
        bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(scales.to(tl.pointer_type(tl.int16)) + channel, bits, mask=mask)
    else:
        tl.store(scales + channel, scale, mask=mask)


# fmt: off
@triton.jit
def append_kernel(
    key, value, key_codes, key_scales, key_zeros, key_full, value_codes, value_scales, value_zeros, value_full, lengths,
    key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    kc_b, kc_h, kc_n, ks_b, ks_h, ks_n, kz_b, kz_h, kz_n, kf_b, kf_h, kf_n,
    vc_b, vc_h, vc_n, vs_b, vs_h, vs_n, vz_b, vz_h, vz_n, vf_b, vf_h, vf_n,
    heads_kv, tokens, max_tokens, row_programs, programs,
    HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
    KEY_CODING: tl.constexpr, KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_BLOCK: tl.constexpr,
    NARROW: tl.constexpr, VALUE_CODING: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr,
    ROTATED: tl.constexpr, ADVANCE: tl.constexpr, VERSION: tl.constexpr,
):
    # fmt: on
    """Programs of a sequence: ``row_programs`` code ROWS rows each, the rest 64 channels of a block of keys."""
    tokens, max_tokens = tl.cast(tokens, tl.int32), tl.cast(max_tokens, tl.int32)
    b, part = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    start = held(lengths, b, max_tokens)
    if part < row_programs:
        i = part * ROWS + tl.arange(0, ROWS)
        h, t = (i // tokens).to(tl.int64), (i % tokens).to(tl.int64)
        token = start + t
        valid = (h < heads_kv) & (token < max_tokens)
        coded = valid & (token >= SINKS)
        # Of the strides that follow, n counts planes where the coding is GROUP.
        key_row, value_row = b * key_b + h * key_h + t * key_t, b * value_b + h * value_h + t * value_t
        if SINKS > 0:
            sink = valid & (token < SINKS)
            keep_rows(key, key_row, key_d, key_full + b * kf_b + h * kf_h + token * kf_n, sink, HEAD_DIM, BLOCKS)
            keep_rows(
                value, value_row, value_d, value_full + b * vf_b + h * vf_h + token * vf_n, sink, HEAD_DIM, BLOCKS
            )
        if KEY_CODING != CHANNEL:
            code_rows(
                key, key_row, key_d, (key_codes + b * kc_b + h * kc_h + token * kc_n)[:, None],
                key_scales + b * ks_b + h * ks_h + token * (1 if KEY_CODING == GROUP else ks_n), key_zeros, ks_n, coded,
                HEAD_DIM, BLOCKS, ROWS, KEY_CODING, KEY_BITS, KEY_GROUP, False,
            )  # fmt: skip
        code_rows(
            value, value_row, value_d, (value_codes + b * vc_b + h * vc_h + token * vc_n)[:, None],
            value_scales + b * vs_b + h * vs_h + token * (1 if VALUE_CODING == GROUP else vs_n),
            value_zeros + b * vz_b + h * vz_h + token * vz_n, vs_n, coded,
            HEAD_DIM, BLOCKS, ROWS, VALUE_CODING, VALUE_BITS, VALUE_GROUP, ROTATED,
        )  # fmt: skip
        if ADVANCE:
            advance(lengths, b, start, tokens, max_tokens)
    elif KEY_CODING == CHANNEL:
        chunks: tl.constexpr = (HEAD_DIM + 63) // 64
        piece = part - row_programs
        chunk, head, block = piece % chunks, (piece // chunks % heads_kv).to(tl.int64), piece // chunks // heads_kv
        end = tl.minimum(start + tokens, max_tokens.to(tl.int64))
        block += tl.maximum(start - SINKS, 0) // KEY_BLOCK
        if (SINKS + (block + 1) * KEY_BLOCK) <= end:
            freeze(
                key + b * key_b + head * key_h, key_t, key_d, key_codes + b * kc_b + head * kc_h, kc_n,
                key_scales + b * ks_b + head * ks_h, ks_n, key_zeros + b * kz_b + head * kz_h, kz_n,
                key_full + b * kf_b + head * kf_h, kf_n, start, block, chunk, True,
                HEAD_DIM, KEY_BITS, KEY_BLOCK, SINKS, NARROW,
            )  # fmt: skip


@triton.jit
def finish_kernel(
    key, key_full, lengths, key_b, key_h, key_t, key_d, kf_b, kf_h, kf_n, heads_kv, tokens, max_tokens,
    HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VERSION: tl.constexpr,
):  # fmt: skip
    """A program a sequence: its newest keys to their slots (KEY_BLOCK > 0), then its length."""
    tokens, max_tokens = tl.cast(tokens, tl.int32), tl.cast(max_tokens, tl.int32)
    b = tl.program_id(0).to(tl.int64)
    start = held(lengths, b, max_tokens)
    if KEY_BLOCK > 0:
        end = tl.minimum(start + tokens, max_tokens.to(tl.int64))
        first = tl.maximum(tl.maximum(start, SINKS), end - 2 * KEY_BLOCK)
        count = tl.maximum(end - first, 0)
        for at in range(0, count * heads_kv, ROWS):
            i = at + tl.arange(0, ROWS)
            valid = i < count * heads_kv
            h, token = i // count, first + i % count
            slot = SINKS + (token - SINKS) % (2 * KEY_BLOCK)
            row = b * key_b + h * key_h + (token - start) * key_t
            keep_rows(key, row, key_d, key_full + b * kf_b + h * kf_h + slot * kf_n, valid, HEAD_DIM, BLOCKS)
    advance(lengths, b, start, tokens, max_tokens)
