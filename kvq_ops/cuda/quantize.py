"""Rows to codes, each operation rounded as in ``kvq_ops/reference.py``: bytes are equal or wrong.

Divisions are ``div_rn``, since Triton's ``/`` is approximate; rounding adds and takes away 1.5 * 2^23, which is ties to
even below 2^22. A product that is not exact never meets a sum in the open, where ptxas would fuse the two: ``opaque``
stands between.

A row is seen as two halves, [rows, 32 * blocks] each, zeros where there is no channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import format, reference

LEVELS = tl.constexpr(format.LEVELS)
ABSMAX_LIMIT = tl.constexpr(reference.ABSMAX_LIMIT)
ROTATED_LIMIT = tl.constexpr(reference.ROTATED_LIMIT)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def opaque(x):
    """x, which is below 3e38, but no longer a product to a compiler."""
    return tl.minimum(x, 3e38)


@triton.jit
def round_even(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def abs_bits(x):
    """Bits of the magnitude: order of floats, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def floats(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def clamp(x, least, most):
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def quantize_row(low, high, LIMIT: tl.constexpr):
    """Coding ``row``: codes of both halves, int32, and fp32 scales [rows]."""
    most = tl.maximum(tl.max(abs_bits(low), 1), tl.max(abs_bits(high), 1))
    finite = most < INFINITY_BITS
    scale = tl.div_rn(tl.minimum(floats(most), ABSMAX_LIMIT), LIMIT * 1.0)
    usable = (finite & (scale > 0))[:, None]
    divisor = tl.where(usable, scale[:, None], 1.0)
    low = clamp(round_even(tl.div_rn(tl.where(usable, low, 0.0), divisor)), -LIMIT * 1.0, LIMIT * 1.0)
    high = clamp(round_even(tl.div_rn(tl.where(usable, high, 0.0), divisor)), -LIMIT * 1.0, LIMIT * 1.0)
    return low.to(tl.int32), high.to(tl.int32), floats(tl.where(finite, abs_bits(scale), NAN_BITS))


@triton.jit
def affine_scale(least, most, LIMIT: tl.constexpr, NARROW: tl.constexpr):
    scale = tl.div_rn(most - least, 2.0 * LIMIT + 1.0)
    if NARROW:
        scale = floats((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000)
    return tl.where(scale != 0, scale, 1.0)


@triton.jit
def affine_codes(x, zero, scale, finite, LIMIT: tl.constexpr):
    x = clamp(x, -ABSMAX_LIMIT, ABSMAX_LIMIT)
    code = clamp(round_even(tl.div_rn(x - zero, scale)), 0.0, 2.0 * LIMIT + 1.0)
    return tl.where(finite, code, 0.0).to(tl.int32) - (LIMIT + 1)


@triton.jit
def quantize_token(low, high, there_low, there_high, LIMIT: tl.constexpr):
    """Coding ``token``: codes of both halves, scales and offsets [rows]; ``there`` says where a channel is."""
    most_bits = tl.maximum(tl.max(abs_bits(low), 1), tl.max(abs_bits(high), 1))
    finite = most_bits < INFINITY_BITS
    low = tl.where(finite[:, None], low, 0.0)
    high = tl.where(finite[:, None], high, 0.0)
    least = tl.minimum(
        tl.min(tl.where(there_low, low, float("inf")), 1), tl.min(tl.where(there_high, high, float("inf")), 1)
    )
    most = tl.maximum(
        tl.max(tl.where(there_low, low, float("-inf")), 1), tl.max(tl.where(there_high, high, float("-inf")), 1)
    )
    zero = clamp(least, -ABSMAX_LIMIT, ABSMAX_LIMIT) + 0.0
    scale = affine_scale(zero, clamp(most, -ABSMAX_LIMIT, ABSMAX_LIMIT), LIMIT, False)
    low_code = affine_codes(low, zero[:, None], scale[:, None], finite[:, None], LIMIT)
    high_code = affine_codes(high, zero[:, None], scale[:, None], finite[:, None], LIMIT)
    nan = floats(tl.full(finite.shape, NAN_BITS, tl.int32))
    return low_code, high_code, tl.where(finite, scale, nan), tl.where(finite, zero, nan)


@triton.jit
def quantize_channels(x, LIMIT: tl.constexpr, NARROW: tl.constexpr):
    """Coding ``channel``: a block of keys [tokens, columns] to codes, and scales and offsets [columns]."""
    finite = tl.max(abs_bits(x), 0) < INFINITY_BITS
    x = tl.where(finite[None, :], x, 0.0)
    zero = clamp(tl.min(x, 0), -ABSMAX_LIMIT, ABSMAX_LIMIT) + 0.0
    scale = affine_scale(zero, clamp(tl.max(x, 0), -ABSMAX_LIMIT, ABSMAX_LIMIT), LIMIT, NARROW)
    code = affine_codes(x, zero[None, :], scale[None, :], finite[None, :], LIMIT)
    nan = floats(tl.full(finite.shape, NAN_BITS, tl.int32))
    return code, tl.where(finite, scale, nan), tl.where(finite, zero, nan)


@triton.jit
def rotate(x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The orthonormal Hadamard transform of rows [rows, WIDTH], zeros past ``head_dim``."""
    block: tl.constexpr = HEAD_DIM & -HEAD_DIM
    norm: tl.constexpr = block**-0.5
    x = opaque(x * norm)
    for step in tl.static_range(10):
        if (1 << step) < block:
            pairs = tl.reshape(x, [ROWS, WIDTH // (2 << step), 2, 1 << step])
            first, second = tl.split(tl.permute(pairs, 0, 1, 3, 2))
            both = tl.permute(tl.join(first + second, first - second), 0, 1, 3, 2)
            x = tl.reshape(both, [ROWS, WIDTH])
    return x


@triton.jit
def usable_rows(low, high, LIMIT: tl.constexpr):
    """Rows without what is not finite, clamped, and which are finite [rows]."""
    finite = tl.maximum(tl.max(abs_bits(low), 1), tl.max(abs_bits(high), 1)) < INFINITY_BITS
    low = clamp(tl.where(finite[:, None], low, 0.0), -LIMIT, LIMIT)
    return low, clamp(tl.where(finite[:, None], high, 0.0), -LIMIT, LIMIT), finite


@triton.jit
def group_absmax(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    bits = tl.max(tl.reshape(abs_bits(x), [ROWS, BLOCKS, 32]), 2)
    return tl.div_rn(floats(bits), HALF)


@triton.jit
def row_unit(widest):
    """Exponent byte, and one over the unit, of rows whose widest group wants so much, fp32 [rows]. A product with a
    power of two is the quotient by its inverse, bit for bit."""
    bits = (widest * 0.0625).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 1)
    return exponent, floats((254 - exponent) << 23)


@triton.jit
def nearest(z, m, BITS: tl.constexpr):
    """Codes whose levels come nearest to z / m, and those levels, fp32."""
    x = tl.div_rn(z, m)
    if BITS == 8:
        code = clamp(round_even(x - 0.5), -128.0, 127.0)
        level = code + 0.5
    else:
        code = x * 0.0 - 8.0
        level = x * 0.0 + LEVELS[0]
        for k in tl.static_range(15):
            reached = x >= (LEVELS[k] + LEVELS[k + 1]) * 0.5
            code = tl.where(reached, k - 7.0, code)
            level = tl.where(reached, LEVELS[k + 1] * 1.0, level)
    return code, level


@triton.jit
def squares(z, m, there, BITS: tl.constexpr):
    """Of errors [rows, blocks, 32] with mantissas [rows, blocks], where there is a channel; level * m is exact, so that
    fusing it with the difference changes nothing."""
    _, level = nearest(z, m[:, :, None], BITS)
    e = level * m[:, :, None] - z
    return tl.where(there, opaque(e * e), 0.0)


@triton.jit
def sum_of_halves(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Of the last dimension, 32: 16 to the other 16, 8 to 8, and so on."""
    lane = tl.arange(0, 32)[None, None, :]
    for step in tl.static_range(5):
        x += tl.gather(x, tl.broadcast_to(lane ^ (16 >> step), [ROWS, BLOCKS, 32]), 2)
    return tl.max(x, 2)  # all alike


@triton.jit
def mantissas(
    low, high, there_low, there_high, inverse, wanted_low, wanted_high, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of each group, fp32 [rows, blocks] for both halves: groups of 64 are both halves of a block."""
    there_low = tl.reshape(there_low, [1, BLOCKS, 32])
    there_high = tl.reshape(there_high, [1, BLOCKS, 32])
    z_low = tl.reshape(opaque(low * inverse[:, None]), [ROWS, BLOCKS, 32])
    z_high = tl.reshape(opaque(high * inverse[:, None]), [ROWS, BLOCKS, 32])
    most_low = clamp(tl.ceil(wanted_low * inverse[:, None]), 1.0, 16.0)
    most_high = clamp(tl.ceil(wanted_high * inverse[:, None]), 1.0, 16.0)
    chosen_low, chosen_high = most_low, most_high
    best_low = tl.full([ROWS, BLOCKS], float("inf"), tl.float32)
    best_high = best_low
    for less in tl.static_range(3):
        m_low, m_high = tl.maximum(most_low - less, 1.0), tl.maximum(most_high - less, 1.0)
        e_low, e_high = squares(z_low, m_low, there_low, BITS), squares(z_high, m_high, there_high, BITS)
        if GROUP == 64:
            e_low = e_low + e_high
        error_low = sum_of_halves(e_low, ROWS, BLOCKS)
        chosen_low = tl.where(error_low < best_low, m_low, chosen_low)
        best_low = tl.minimum(error_low, best_low)
        if GROUP == 32:
            error_high = sum_of_halves(e_high, ROWS, BLOCKS)
            chosen_high = tl.where(error_high < best_high, m_high, chosen_high)
            best_high = tl.minimum(error_high, best_high)
    if GROUP == 64:
        chosen_high = chosen_low
    return chosen_low, chosen_high


@triton.jit
def group_codes(x, inverse, m, usable, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """Codes of one half, int32 [rows, 32 * blocks]."""
    z = tl.reshape(opaque(x * inverse[:, None]), [ROWS, BLOCKS, 32])
    code, _ = nearest(z, m[:, :, None], BITS)
    code = tl.reshape(code, [ROWS, 32 * BLOCKS])
    return tl.where(usable[:, None], code, 0.0).to(tl.int32)
