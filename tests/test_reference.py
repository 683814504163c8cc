"""The reference against float64, and what it says of rows that hurt."""

from __future__ import annotations

import math

import pytest
import torch
from common import FORMAT_NAMES, TOLERANCES, append, attention, dequantized, filled, judge, relative_error, same_bits
from data import KINDS, make

from kvq_ops import get_format, reference

SIDES = {name: get_format(name).key for name in ("int8", "int4")}
HEAD_DIMS = [8, 10, 16, 64, 80, 96, 100, 128, 256, 512, 1024]
LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


def round_trip(x: torch.Tensor, name: str) -> torch.Tensor:
    codes, scales = reference.quantize(x, SIDES[name])
    return reference.dequantize(codes, scales, SIDES[name], x.shape[-1])


@pytest.mark.parametrize("name", [name for name, tolerance in TOLERANCES.items() if tolerance.published])
def test_published_errors(name):
    """On N(0, 1) at D = 256 against attention over the unquantised data."""
    query, key, value = make("normal", 1, 32, 8, 256, 2048)
    cache = filled(name, key, value)
    got = judge(query, cache, name)[0]
    want = attention(query[:, :, None], key, value)[0][:, :, 0]
    error, cosine = TOLERANCES[name].published
    assert relative_error(got, want) == pytest.approx(error, rel=0.05)
    assert torch.cosine_similarity(got.double().flatten(), want.flatten(), 0).item() == pytest.approx(cosine, abs=5e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_attend_is_attention_over_dequantised_rows(name, kind):
    """Against a masked float64 computation that shares no code with it: ragged, T = 3 query tokens, grouped heads."""
    query, key, value = make(kind, 3, 6, 2, 80, 150)
    lengths = [150, 3, 70]
    cache = filled(name, key, value, lengths)
    query = query[:, :, None] * torch.tensor([1.0, -0.5, 0.25])[:, None]
    got, lse = judge(query, cache, name, scale=0.2)
    sides = torch.zeros(2, 3, 2, 150, 80)
    for b, rows in enumerate(dequantized(cache, name, 80)):
        sides[:, b, :, : lengths[b]] = torch.stack(rows)
    want, want_lse = attention(query, *sides, lengths, scale=0.2)
    assert relative_error(got, want) < 1e-7
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_default_scale_and_three_dimensions():
    query, key, value = make("normal", 1, 2, 2, 64, 9)
    cache = filled("int8", key, value)
    out, lse = judge(query, cache, "int8")
    four = judge(query[:, :, None], cache, "int8", scale=0.125)
    assert same_bits(out, four[0][:, :, 0])
    assert same_bits(lse, four[1][:, :, 0])


def test_attend_of_nothing():
    query, key, value = make("normal", 2, 4, 2, 8, 5)
    cache = filled("int8", key, value, [0, 5])
    out, lse = judge(query[:, :, None].expand(2, 4, 3, 8), cache, "int8")
    assert out[0].abs().max() == 0
    assert (lse[0] == -math.inf).all()
    assert out[1].isfinite().all()
    assert judge(query[:, :, None, :][:, :, :0], cache, "int8")[0].shape == (2, 4, 0, 8)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unpack_undoes_pack(head_dim):
    codes = torch.randint(-8, 8, (5, 3, head_dim), dtype=torch.int8)
    packed = reference.pack(codes)
    assert packed.shape == (5, 3, head_dim // 2)
    assert torch.equal(reference.unpack(packed, head_dim), codes)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", SIDES)
def test_half_a_step(name, head_dim):
    x = torch.randn(64, head_dim) * torch.logspace(-3, 3, 64)[:, None]
    scales = reference.quantize(x, SIDES[name])[1]
    error = (round_trip(x, name) - x).abs().amax(-1)
    assert (error <= scales * (0.5 + 1e-5)).all()
    assert (error > scales * 0.2).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SIDES)
def test_narrow_floats_count_as_fp32(name, dtype):
    x = torch.randn(32, 64).to(dtype)
    for narrow, wide in zip(
        reference.quantize(x, SIDES[name]), reference.quantize(x.float(), SIDES[name]), strict=True
    ):
        assert same_bits(narrow, wide)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SIDES)
def test_a_row_that_is_not_finite(name, bad):
    x = torch.ones(3, 8)
    x[1, 5] = bad
    codes, scales = reference.quantize(x, SIDES[name])
    assert scales.isnan().tolist() == [False, True, False]
    zero = reference.quantize(torch.zeros(8), SIDES[name])[0]
    assert torch.equal(codes[1], zero)
    assert round_trip(x, name).isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", SIDES)
def test_any_finite_row_dequantises_to_finite(name):
    """Near up to 1.6e38; beyond, codes saturate."""
    limit, largest = SIDES[name].limit, torch.tensor(1.6e38)
    x = torch.tensor([[1.6e38, -0.8e38] + [0.0] * 6, [LARGEST, -0.8e38] + [0.0] * 6])
    codes, scales = reference.quantize(x, SIDES[name])
    assert torch.equal(scales, (largest / limit).expand(2))
    back = round_trip(x, name)
    assert back.isfinite().all()
    torch.testing.assert_close(back[:, 0], largest.expand(2), rtol=1e-6, atol=0)
    assert (back[:, 1] + 0.8e38).abs().max() <= scales[0] / 2 * 1.001
    assert torch.equal(codes[0], codes[1])


def test_rows_below_the_normal_numbers():
    """The scale is a multiple of 2^-149 or 0, codes are clamped."""
    x = torch.zeros(4, 8)
    x[:, 0] = torch.tensor([1.0, 60.0, 100.0, 190.0]) * SMALLEST
    codes, scales = reference.quantize(x, SIDES["int8"])
    assert (scales.double() / SMALLEST).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert codes[:, 0].tolist() == [0, 0, 100, 127]


def test_append_advances_each_sequence():
    _, key, value = make("normal", 2, 1, 1, 10, 4)
    cache = filled("int4", key, value, [1, 3], max_tokens=6)
    before = cache.clone()
    append(cache, key[:, :, :2], value[:, :, :2], "int4", reference.append)
    assert cache.lengths.tolist() == [3, 5]
    whole = filled("int4", key, value)
    for part, old, new in zip(cache[:4], before[:4], whole[:4], strict=True):
        for b, (start, end) in enumerate([(1, 3), (3, 5)]):
            assert same_bits(part[b, :, :start], old[b, :, :start])
            assert same_bits(part[b, :, start:end], new[b, :, :2])
            assert same_bits(part[b, :, end:], old[b, :, end:])
