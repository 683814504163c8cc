"""Which bits of a row are which channel: the only GPU code that knows.

Attend reads codes in columns, 16-bit words where rows lie on even addresses, else bytes. A column holds one code of
each of several planes: a word four of 4 bits or two of 8 bits, a byte two or one. A plane is a tile [tokens, columns]
of fp16 codes, ready for a dot, and :func:`channels` says which channels its columns are; nothing is joined or
interleaved in a loop. Append and group scales see a row as halves instead, which are what the nibbles of its bytes are:
32 columns a block of 64 channels.

Columns are padded to a power of two of blocks; channels that are none count as ``head_dim``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_floats(pointers, mask):
    """fp32 of fp32, fp16 or bf16. bf16 by its bits: exact, no conversion, and Triton's interpreter can do it."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = tl.load(pointers.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def store_floats(pointers, x, mask):
    """fp32 to the pointers' dtype, to nearest, ties to even; bf16 by its bits, as in :func:`load_floats`."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        tl.store(pointers.to(tl.pointer_type(tl.int16)), rounded.to(tl.int16), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def copy_floats(to, source, mask):
    """Bits as they are: NaN keeps its payload."""
    if to.dtype.element_ty == tl.float32:
        bits = tl.load(source.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        tl.store(to.to(tl.pointer_type(tl.int32)), bits, mask=mask)
    else:
        bits = tl.load(source.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
        tl.store(to.to(tl.pointer_type(tl.int16)), bits, mask=mask)


@triton.jit
def halves(byte, HEAD_DIM: tl.constexpr, NIBBLES: tl.constexpr):
    """Channels of the low and the high half at some columns. With NIBBLES those of a byte's two nibbles: what is left
    over after blocks of 64 is cut in the middle. Else always 32 and the rest."""
    block = byte // 32
    low = 64 * block + byte % 32
    if NIBBLES:
        there = byte < HEAD_DIM // 2
        high = tl.where(there, low + tl.minimum(HEAD_DIM - 64 * block, 64) // 2, HEAD_DIM)
        low = tl.where(there, low, HEAD_DIM)
    else:
        high = tl.minimum(low + 32, HEAD_DIM)
        low = tl.minimum(low, HEAD_DIM)
    return low, high


@triton.jit
def store_codes(codes, byte, low, high, mask, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    """Signed codes of both halves, int32 [rows, columns], to rows whose first bytes are ``codes`` [rows, 1]."""
    low_channel, high_channel = halves(byte, HEAD_DIM, BITS == 4)
    if BITS == 4:
        both = (low + 8) | ((high + 8) << 4)
        tl.store(codes + byte[None, :], both.to(tl.uint8), mask=mask & (byte < HEAD_DIM // 2)[None, :])
    else:
        tl.store(codes + low_channel[None, :], low.to(tl.int8), mask=mask & (low_channel < HEAD_DIM)[None, :])
        tl.store(codes + high_channel[None, :], high.to(tl.int8), mask=mask & (high_channel < HEAD_DIM)[None, :])


@triton.jit
def channels(
    PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """The channel of each column of a plane, int32 [columns]."""
    column = tl.arange(0, COLUMNS)
    if BITS == 8:
        channel = tl.minimum(2 * column + PLANE if WORDS else column, HEAD_DIM)
    else:
        low, high = halves(2 * column + PLANE // 2 if WORDS else column, HEAD_DIM, True)
        channel = high if PLANE % 2 else low
    return channel


@triton.jit
def column_pointers(codes, stride, rows, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of columns [rows, columns] of rows whose distance is ``stride`` columns. ``codes`` may be int8 or uint8."""
    if WORDS:
        first = codes.to(tl.pointer_type(tl.uint16))
    else:
        first = codes.to(tl.pointer_type(tl.uint8))
    return first + rows[:, None].to(tl.int64) * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def decode(x, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """A plane of columns, uint16 or uint8, as fp16: signed codes, exact. The bits of a code become the last bits of
    1024 (0x6400), which costs a logical operation and a sum where a conversion would run at a sixteenth of the rate."""
    word = x.to(tl.uint16)
    if WORDS and PLANE * BITS >= 8:
        word = word >> 8
    if BITS == 8:
        code = ((word & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    elif PLANE % 2 == 0:
        code = ((word & 0x0F) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        code = ((word & 0xF0) | 0x6400).to(tl.float16, bitcast=True) * 0.0625 - 72.0
    return code


@triton.jit
def levels(x, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """What the codes of a plane stand for where the coding is in groups, fp16, exact. ``format.LEVELS`` has no formula,
    but an odd polynomial comes within 0.33 of each level, fused or not, and a sum with 1536 rounds it: six operations
    on two codes at once, where a table would be read code by code."""
    if BITS == 8:
        level = decode(x, PLANE, BITS, WORDS) + 0.5
    else:
        u = decode(x, PLANE, BITS, WORDS) + 0.5
        t = u * u
        level = (((0.0007128715515136719 * t + 0.044769287109375) * t + 12.1171875) * u + 1536.0) - 1536.0
    return level


@triton.jit
def load_units(scales, token, seen):
    """Units of rows in groups, fp32 [tokens]: a power of two, 0 for a zero row, NaN for one that is not finite."""
    exponent = tl.load(scales + token, mask=seen, other=0).to(tl.int32)
    return tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_mantissas(
    scales, stride_plane, token, seen, HALF: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Mantissas [tokens, groups], fp16: of 4-bit codes those of one half of each block of 64; of 8-bit ones all."""
    block = tl.arange(0, BLOCKS)
    byte = block // 2 if GROUP == 64 else block
    mask = seen[:, None] & (block * 64 < HEAD_DIM)[None, :]
    pairs = tl.load(scales + (1 + byte)[None, :] * stride_plane + token[:, None], mask=mask, other=0).to(tl.uint16)
    if GROUP == 64:
        nibble = tl.where((block % 2 == 1)[None, :], pairs >> 4, pairs & 15)
    elif BITS == 8:
        nibble = tl.reshape(tl.join(pairs & 15, pairs >> 4), [token.shape[0], 2 * BLOCKS])
    elif HALF == 1:
        nibble = pairs >> 4
    else:
        nibble = pairs & 15
    return (nibble | 0x6400).to(tl.float16, bitcast=True) - 1023.0


@triton.jit
def scale_groups(x, mantissas, COLUMNS: tl.constexpr):
    """Levels [tokens, columns] times their group's mantissa [tokens, groups], fp16: exact for 4 bits, up to 2032."""
    rows: tl.constexpr = x.shape[0]
    groups: tl.constexpr = mantissas.shape[1]
    m = tl.broadcast_to(mantissas[:, :, None], [rows, groups, COLUMNS // groups])
    m = tl.reshape(m, [rows, COLUMNS])
    return x * m


@triton.jit
def assemble(
    p0, p1, p2, p3, ROWS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Planes [rows, columns] to rows in the order of channels, [rows, 64 * BLOCKS]."""
    rows = p0
    if BITS == 4:
        low, high = p0, p1
        if WORDS:
            low = tl.reshape(tl.join(p0, p2), [ROWS, 32 * BLOCKS])
            high = tl.reshape(tl.join(p1, p3), [ROWS, 32 * BLOCKS])
        rows = from_halves(low, high, ROWS, HEAD_DIM, BLOCKS, True)
    elif WORDS:
        rows = tl.reshape(tl.join(p0, p1), [ROWS, 64 * BLOCKS])
    return rows


@triton.jit
def from_halves(low, high, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, NIBBLES: tl.constexpr):
    """Halves [rows, 32 * BLOCKS] to rows in the order of channels, [rows, 64 * BLOCKS]."""
    both = tl.join(tl.reshape(low, [ROWS, BLOCKS, 32]), tl.reshape(high, [ROWS, BLOCKS, 32]))
    rows = tl.reshape(tl.permute(both, 0, 1, 3, 2), [ROWS, 64 * BLOCKS])
    if NIBBLES and HEAD_DIM % 64:  # the last block's halves are not 32 apart
        channel = tl.arange(0, 64 * BLOCKS)
        rest: tl.constexpr = HEAD_DIM % 64
        within = channel - HEAD_DIM // 64 * 64
        moved = tl.where(within >= rest // 2, channel - rest // 2 + 32, channel)
        moved = tl.where(within >= rest, 64 * BLOCKS - 1, moved)  # no channel there
        rows = tl.gather(rows, tl.broadcast_to(moved[None, :], [ROWS, 64 * BLOCKS]), 1)
    return rows


@triton.jit
def to_halves(rows, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, NIBBLES: tl.constexpr):
    """The inverse of :func:`from_halves`; what is no channel is 0 where rows are 0 past ``head_dim``."""
    if NIBBLES and HEAD_DIM % 64:
        position = tl.arange(0, 64 * BLOCKS)
        rest: tl.constexpr = HEAD_DIM % 64
        within = position - HEAD_DIM // 64 * 64
        high = tl.where(within < 32 + rest // 2, position - 32 + rest // 2, 64 * BLOCKS - 1)
        low = tl.where(within < rest // 2, position, 64 * BLOCKS - 1)
        source = tl.where(within < 0, position, tl.where(within >= 32, high, low))
        rows = tl.gather(rows, tl.broadcast_to(source[None, :], [ROWS, 64 * BLOCKS]), 1)
    both = tl.permute(tl.reshape(rows, [ROWS, BLOCKS, 2, 32]), 0, 1, 3, 2)
    low, high = tl.split(both)
    return tl.reshape(low, [ROWS, 32 * BLOCKS]), tl.reshape(high, [ROWS, 32 * BLOCKS])
