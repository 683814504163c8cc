"""What the reference says of each coding: examples by hand, half a step, rows that hurt, and quality over a cache."""

from __future__ import annotations

import math

import pytest
import torch
from common import FORMAT_NAMES, append, assert_same_bits, dequantized, empty, filled, same_bits
from data import make
from torch import Tensor

from kvq_ops import SideFormat, get_format, reference
from kvq_ops.format import LEVELS

HEAD_DIMS = [8, 10, 16, 64, 80, 96, 100, 128, 256, 512, 1024]
AFFINE = [SideFormat(bits, scheme) for scheme in ("kivi", "hq") for bits in (4, 8)]
GROUPED = [SideFormat(4, "g32"), SideFormat(4, "g64"), SideFormat(4, "hq"), SideFormat(8, "hq")]
SMALLEST = 2.0**-149
NAN, INF = math.nan, math.inf


def name_of(side: SideFormat) -> str:
    return side.name


# ------------------------------------------------------------------------------------------------ examples by hand


@pytest.mark.parametrize(
    ("side", "row", "codes", "scale", "zero"),
    [
        # Ties to even of 7.5, 0.5, 1.5, 2.5 and 14.5; nibbles are 0..15 from the least.
        (SideFormat(4, "kivi"), [0, 15, 7.5, 0.5, 1.5, 2.5, 14.5, 3], [0x20, 0x2F, 0xE8, 0x30], 1.0, 0.0),
        (SideFormat(4, "kivi"), [-8, 22, 7, -7, -5, -3, 21, -2], [0x20, 0x2F, 0xE8, 0x30], 2.0, -8.0),
        (SideFormat(4, "kivi"), [5.0] * 8, [0x00] * 4, 1.0, 5.0),
        (SideFormat(8, "kivi"), [-1, 254, 0, 1, 126, 127, 0.5, 1.5], [-128, 127, -127, -126, -1, 0, -126, -126], 1, -1),
        (SideFormat(8, "kivi"), [-0.0] * 8, [-128] * 8, 1.0, 0.0),
        (SideFormat(8, "kivi"), [1.0, NAN] + [0.0] * 6, [-128] * 8, NAN, NAN),
        (SideFormat(4, "kivi"), [-INF] + [0.0] * 7, [0x00] * 4, NAN, NAN),
    ],
)
def test_affine_rows(side, row, codes, scale, zero):
    got, scales, zeros = reference.quantize_affine(torch.tensor(row), side, -1)
    assert got.tolist() == codes
    assert same_bits(scales, torch.tensor(float(scale)))
    assert same_bits(zeros, torch.tensor(float(zero)))


def test_affine_channels():
    """Over tokens; the bf16 scale of hq is rounded up, and codes are counted in it. In fp32 1 / 15 is 0x3d888889, a
    little more than that, so that 0.5 lies below 7.5 steps."""
    x = torch.zeros(4, 8)
    x[:, 0], x[:, 1], x[:, 2] = torch.tensor([[0.0, 3, 6, 15], [100, 100.25, 100.5, 101], [2, 2, 2, 2]])
    codes, scales, zeros = reference.quantize_affine(x, SideFormat(4, "kivi"), 0)
    assert (reference.unpack(codes, 8)[:, :3] + 8).tolist() == [[0, 0, 0], [3, 4, 0], [6, 7, 0], [15, 15, 0]]
    assert scales[:3].tolist() == [1.0, torch.tensor(1 / 15).item(), 1.0]
    assert zeros[:3].tolist() == [0.0, 100.0, 2.0]
    codes, scales, _ = reference.quantize_affine(x, SideFormat(4, "hq"), 0)
    assert scales.dtype == torch.bfloat16
    assert scales[:3].tolist() == [1.0, 0.06689453125, 1.0]
    assert (reference.unpack(codes, 8)[:, 1] + 8).tolist() == [0, 4, 7, 15]  # 3.74, 7.47, 14.95


def test_groups():
    """Levels times mantissa and unit. The first group needs 1 = 16 units of 2^-4 and is exact; the second 2.3 units:
    with 3 of them it misses 288 and 96 units by 9 and 3, with 2 it misses 288 by 34."""
    row = torch.tensor([127.0, -127, 6, -6, 18, -18, 6, -6])
    codes, scales = reference.quantize_groups(row, SideFormat(4, "g32"), False)
    assert (reference.unpack(codes, 8)).tolist() == [7, -8, 0, -1, 6, -7, 2, -3]
    assert codes.tolist() == [0xEF, 0x10, 0xA8, 0x57]
    assert scales.tolist() == [127 - 4, 15 | 2 << 4]
    back = reference.dequantize_groups(codes, scales, SideFormat(4, "g32"), 8, False)
    assert back.tolist() == [127, -127, 6, -6, 297 / 16, -297 / 16, 93 / 16, -93 / 16]


def test_levels():
    """By hand; where two are as near, the upper one."""
    assert LEVELS == (-127, -99, -78, -60, -45, -31, -18, -6, 6, 18, 31, 45, 60, 78, 99, 127)
    row = torch.tensor([127.0, 113, 112.75, 12, 11.75, 0, -12, -12.25] + [99.0, 127] * 28)  # most of them exact
    codes = reference.unpack(reference.quantize_groups(row, SideFormat(4, "g64"), False)[0], 64)
    assert codes[:8].tolist() == [7, 7, 6, 1, 0, 0, -1, -2]


def test_groups_of_eight_bits():
    """One group of 8: absmax 127.5 takes 16 units of 2^-4; the nibble that pairs it is 0."""
    row = torch.tensor([127.5, -127.5, 0.5, -0.5, 1.5, -1.5, 63.5, 0.0])
    codes, scales = reference.quantize_groups(row, SideFormat(8, "hq"), False)
    assert codes.tolist() == [127, -128, 0, -1, 1, -2, 63, 0]  # 0 lies between -1 and 0: to even
    assert scales.tolist() == [127 - 4, 15]


def test_rows_of_groups_that_say_nothing():
    for side in GROUPED:
        codes, scales = reference.quantize_groups(torch.tensor([[0.0] * 8, [NAN] * 8, [INF] + [0.0] * 7]), side, False)
        zero = [0x88] * 4 if side.bits == 4 else [0] * 8
        assert codes.tolist() == [zero] * 3
        assert scales.tolist() == [[0, 0], [255, 0], [255, 0]]
        back = reference.dequantize_groups(codes, scales, side, 8, False)
        assert same_bits(back[0], torch.zeros(8))
        assert back[1:].isnan().all()


@pytest.mark.parametrize(
    ("head_dim", "row", "rotated"),
    [
        (8, [1, 0, 0, 0, 0, 0, 0, 0], [8**-0.5] * 8),
        (8, [1, 1, 1, 1, 1, 1, 1, 1], [8**0.5] + [0] * 7),
        (10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [2**-0.5 * x for x in (3, -1, 7, -1, 11, -1, 15, -1, 19, -1)]),
        (12, [1, 2, 3, 4, 0, 0, 0, 0, 1, 0, 1, 0], [5, -1, -2, 0, 0, 0, 0, 0, 1, 1, 0, 0]),
    ],
)
def test_rotate(head_dim, row, rotated):
    """Blocks of the largest power of two that divides head_dim: 8, 2 and 4."""
    assert len(row) == head_dim
    torch.testing.assert_close(reference.rotate(torch.tensor(row).float()), torch.tensor(rotated).float())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotate_is_orthonormal_and_its_own_inverse(head_dim):
    matrix = reference.rotate(torch.eye(head_dim))
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), rtol=0, atol=1e-6)
    x = torch.randn(20, head_dim)
    torch.testing.assert_close(reference.rotate(reference.rotate(x)), x, rtol=0, atol=1e-5)
    assert (matrix[0] != 0).sum() == head_dim & -head_dim


# ------------------------------------------------------------------------------------------------------- half a step


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("side", AFFINE, ids=name_of)
def test_half_a_step_of_affine_codings(side, head_dim):
    """By token and, for keys, by channel."""
    x = torch.randn(64, head_dim) * torch.logspace(-3, 3, 64)[:, None] + torch.logspace(2, -3, 64)[:, None]
    for dim in (-1, 0):
        codes, scales, zeros = reference.quantize_affine(x, side, dim)
        back = reference.dequantize_affine(codes, scales, zeros, side, head_dim, dim)
        # Beside the rounding of lo + code * scale itself.
        most = scales.float() * (0.5 + 1e-5) + x.abs().amax(dim) * 2e-7
        assert ((back - x).abs() <= most.unsqueeze(dim)).all()
        assert ((back - x).abs().amax(dim) > scales.float() * 0.2).float().mean() > 0.9


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("side", GROUPED, ids=name_of)
def test_half_a_step_of_groups(side, head_dim):
    """In the mean square: a scale that lets codes saturate is chosen where that errs less."""
    x = torch.randn(64, head_dim) * torch.logspace(-3, 3, 64)[:, None]
    codes, scales = reference.quantize_groups(x, side, False)
    error = reference.dequantize_groups(codes, scales, side, head_dim, False) - x
    unit = torch.exp2(scales[:, 0].float() - 127)
    spans, levels = side.groups(head_dim), levels_of(side)
    most = torch.stack([x[:, start:end].abs().amax(1) for start, end in spans], 1) / levels[-1]
    assert (most.amax(1) <= 16 * unit).all()
    assert (most.amax(1) > 8 * unit).all()
    for group, (start, end) in enumerate(spans):
        step = levels.diff().max() * unit * (most[:, group] / unit).ceil().clamp(min=1)
        assert (error[:, start:end].square().mean(1).sqrt() <= 0.5 * step).all()


def levels_of(side: SideFormat) -> Tensor:
    """What the codes of coding ``group`` stand for, from the least on."""
    return torch.tensor(LEVELS, dtype=torch.float32) if side.bits == 4 else torch.arange(-128, 128) + 0.5


@pytest.mark.parametrize("side", GROUPED, ids=name_of)
def test_the_best_of_three_mantissas(side):
    x = torch.randn(50, 128)
    codes, scales = reference.quantize_groups(x, side, False)
    best = (reference.dequantize_groups(codes, scales, side, 128, False) - x).double().square()
    unit = torch.exp2(scales[:, :1].float() - 127)
    levels = levels_of(side)
    for start, end in side.groups(128):
        z = x[:, start:end]
        most = (z.abs().amax(1, keepdim=True) / levels[-1] / unit).ceil().clamp(1, 16)
        for less in range(3):
            step = (most - less).clamp(min=1) * unit
            nearest = (z[..., None] / step[..., None] - levels).abs().argmin(-1)
            error = (levels[nearest] * step - z).double().square().sum(1)
            assert (best[:, start:end].sum(1) <= error * (1 + 1e-5)).all()


# ---------------------------------------------------------------------------------------------------- rows that hurt


def cache_of(name: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [tokens, D] of one head, dequantised."""
    cache = filled(name, key[None, None], value[None, None])
    ((keys, values),) = dequantized(cache, name, key.shape[-1])
    return keys[0], values[0]


@pytest.mark.parametrize("head_dim", [10, 64], ids="d{}".format)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_any_finite_rows_dequantise_to_finite(name, head_dim):
    """And near up to 1.6e38, 1e37 where a rotation sums; beyond, codes saturate."""
    torch.manual_seed(0)
    rows = torch.randn(150, head_dim).clamp(-3, 3) / 3
    for magnitude in (1e-45, 1e-40, 1e-30, 1.0, 1e30, 1e37, 1.6e38, 3.4e38):
        for x in (rows * magnitude, rows.abs() * magnitude, rows.sign() * magnitude):
            key, value = cache_of(name, x, x)
            assert key.isfinite().all()
            assert value.isfinite().all()
            for back, side, most in ((key, get_format(name).key, 1.6e38), (value, get_format(name).value, 1e37)):
                if magnitude > (most if side.rotated("value") else 1.6e38) or magnitude < 1e-36:
                    continue
                # A step at most, of rows or channels that span twice the magnitude, and more where groups rotate.
                step = magnitude * 2 / (2 * side.limit + 1) * (2 if side.rotated("value") else 1)
                assert (back.double() - x).square().mean().sqrt() <= step


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_numbers_below_the_normal_ones(name):
    """Never further off than what they are, or the least level of groups, which is 6 times 2^-126, and 4 times as much
    where 16 channels rotate."""
    rows = torch.tensor([1.0, 60, 100, 190, -3, 0, -0.0, 7]).repeat(150, 2) * SMALLEST
    for back in cache_of(name, rows, rows):
        assert (back - rows).abs().max() <= 24 * 2.0**-126


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_is_not_finite_poisons_its_own(name, bad):
    """A row of its head, or its channel over the block of tokens that froze with it; rows in full precision keep it."""
    format, block = get_format(name), get_format(name).key.key_block
    _, key, value = make("normal", 2, 2, 2, 64, 150)
    clean = [rows for pair in dequantized(filled(name, key, value), name, 64) for rows in pair]
    for token in (1, 70, 149):
        poisoned = [key.clone(), value.clone()]
        for x in poisoned:
            x[1, 0, token, 5] = bad
        got = [rows for pair in dequantized(filled(name, *poisoned), name, 64) for rows in pair]
        assert_same_bits(got[:2], clean[:2])
        hit_key, hit_value = torch.zeros(2, 2, 150, 64, dtype=torch.bool)
        if token < format.sinks or (block and token >= format.frozen(150)):
            hit_key[0, token, 5] = True
        elif block:
            start = format.sinks + (token - format.sinks) // block * block
            hit_key[0, start : start + block, 5] = True
        else:
            hit_key[0, token] = True
        hit_value[0, token, 5 if token < format.sinks else slice(None)] = True
        for rows, before, hit, full in zip(
            got[2:], clean[2:], (hit_key, hit_value), (hit_key.sum() == 1, token < format.sinks), strict=True
        ):
            assert same_bits(rows[~hit], before[~hit])
            assert (~rows[hit].isfinite()).all() if full else rows[hit].isnan().all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_is_kept_in_full_precision(name):
    """Sinks for good, keys until their block is whole; bit for bit, in the dtype of the rows."""
    format = get_format(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _, key, value = (x.to(dtype) for x in make("outlier", 1, 2, 2, 10, 140))
        cache = filled(name, key, value)
        ((keys, values),) = dequantized(cache, name, 10)
        sinks, frozen = format.sinks, format.frozen(140)
        assert same_bits(keys[:, :sinks], key[0, :, :sinks].float())
        assert same_bits(values[:, :sinks], value[0, :, :sinks].float())
        assert same_bits(keys[:, frozen:], key[0, :, frozen:].float())
        if frozen > sinks:
            assert not torch.equal(keys[:, sinks:frozen], key[0, :, sinks:frozen].float())


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_append_in_pieces(name):
    """The reference itself: pieces of any size give the bytes of one append."""
    _, key, value = make("normal", 2, 2, 2, 10, 150)
    together = filled(name, key, value)
    apart = empty(name, 2, 2, 10, 150)
    for k, v in zip(key.split([1, 3, 40, 0, 1, 100, 5], 2), value.split([1, 3, 40, 0, 1, 100, 5], 2), strict=True):
        append(apart, k, v, name, reference.append)
    assert_same_bits(apart, together)
