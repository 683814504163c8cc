"""kvq::append: bytes equal to the reference's, nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch
from common import DTYPES, FORMAT_NAMES, Cache, assert_same_bits, empty, same_bits
from torch import Tensor

from kvq_ops import append, reference

HEAD_DIMS = [8, 10, 16, 64, 80, 96, 100, 128, 256, 512, 1024]
PAD = 3


def guarded(part: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of part inside a larger tensor of noise, which is returned too: what lies around it is then visible."""
    lengths = part.dim() == 1
    around = part.new_empty([size + 2 * PAD for size in part.shape])
    if lengths:
        around.random_(0, 1000)
    else:
        around.view(torch.uint8).random_(0, 256)
    inside = around[tuple(slice(PAD, PAD + size) for size in part.shape)]
    inside.copy_(part)
    return inside, around


def appended(cache: Cache, key: Tensor, value: Tensor, name: str, by=append) -> Cache:
    """A copy of cache with the rows."""
    cache = cache.clone()
    by(*cache, key, value, name)
    return cache


def rows(batch: int, heads_kv: int, tokens: int, head_dim: int, dtype: str = "fp32") -> tuple[Tensor, Tensor]:
    """Rows of magnitudes from 1e-4 to 1e4, every fourth of them full of ties."""
    torch.manual_seed(head_dim)
    both = torch.randn(2, batch, heads_kv, tokens, head_dim) * 10.0 ** torch.randint(-4, 5, (tokens, 1))
    ties = torch.randint(-14, 15, both.shape) / 2
    ties[..., 0] = 7.0
    both[..., ::4, :] = ties[..., ::4, :]
    key, value = both.to(DTYPES[dtype])
    return key, value


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids="d{}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_bytes_equal_the_reference(name, dtype, head_dim):
    """Ragged lengths, the parts being views into noise: older rows, later rows and surroundings stay."""
    key, value = rows(2, 3, 5, head_dim, dtype)
    cache = empty(name, 2, 3, head_dim, 11)
    cache.lengths.copy_(torch.tensor([1, 6]))
    want = appended(cache, key, value, name, reference.append)
    inside, around = zip(*(guarded(part) for part in cache), strict=True)
    before = [part.clone() for part in around]
    append(*inside, key, value, name)
    assert_same_bits(inside, want)
    for view, part, old in zip(inside, around, before, strict=True):
        view.copy_(old[tuple(slice(PAD, PAD + size) for size in view.shape)])
        assert same_bits(part, old)


@pytest.mark.parametrize("head_dim", [64, 100], ids="d{}".format)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_many_rows(name, head_dim):
    """Enough divisions for a product with a reciprocal, or another rounding, to show."""
    key, value = torch.randn(2, 1, 2, 5000, head_dim)
    cache = empty(name, 1, 2, head_dim, 5000)
    assert_same_bits(appended(cache, key, value, name), appended(cache, key, value, name, reference.append))


def hostile_rows(head_dim: int) -> Tensor:
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    torch.manual_seed(0)
    heads = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e38, 1.6e38, -1.7e38, largest, -largest, 1.0]
    heads += [smallest, 60 * smallest, 100 * smallest, 190 * smallest, 1e-40, 2.0**-126, 2.0**-126 - smallest]
    x = torch.zeros(4 * len(heads), head_dim)
    for i, head in enumerate(heads):
        x[4 * i, 0] = head
        x[4 * i + 1, head_dim // 2] = head
        x[4 * i + 2, -1] = head
        x[4 * i + 3] = torch.rand(head_dim) * (head if math.isfinite(head) else 1.0)
        x[4 * i + 3, 1] = head
    return x.view(1, 1, -1, head_dim)


@pytest.mark.parametrize("head_dim", [8, 64, 100], ids="d{}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_hostile_rows(name, dtype, head_dim):
    """Zeros of both signs, NaN, infinities, the largest numbers, numbers below the normal ones, at the first channel,
    the middle, the last and everywhere."""
    x = hostile_rows(head_dim).to(DTYPES[dtype])
    cache = empty(name, 1, 1, head_dim, x.shape[2])
    got = appended(cache, x, x.flip(2), name)
    assert_same_bits(got, appended(cache, x, x.flip(2), name, reference.append))
    assert got.key_scales.isnan().sum() > 10


STRIDED = {
    "tokens-before-heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every-second-channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "part-of-a-fused-projection": lambda x: torch.cat([x, x + 1, x - 1], -1)[..., : x.shape[-1]],
    "channels-before-tokens": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "odd-storage-offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("head_dim", [10, 128], ids="d{}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_rows(layout, dtype, head_dim):
    key, value = rows(2, 3, 4, head_dim, dtype)
    cache = empty("int8/int4", 2, 3, head_dim, 4)
    want = appended(cache, key, value, "int8/int4")
    strided = STRIDED[layout](key)
    assert torch.equal(strided, key)
    assert strided.stride() != key.stride() or strided.storage_offset() != 0
    assert_same_bits(appended(cache, strided, value, "int8/int4"), want)
    assert_same_bits(appended(cache, key, STRIDED[layout](value), "int8/int4"), want)


def test_one_row_for_all():
    """Strides of 0."""
    key, value = torch.randn(2, 1, 1, 1, 64)
    cache = empty("int4", 2, 3, 64, 5)
    shape = (2, 3, 5, 64)
    want = appended(cache, key.expand(shape).contiguous(), value.expand(shape).contiguous(), "int4")
    assert_same_bits(appended(cache, key.expand(shape), value.expand(shape), "int4"), want)


@pytest.mark.parametrize("splits", [[1] * 17, [5, 12], [16, 0, 1]], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_one_by_one_or_together(name, splits):
    key, value = rows(2, 2, 17, 80)
    cache = empty(name, 2, 2, 80, 20)
    together = appended(cache, key, value, name)
    assert together.lengths.tolist() == [17, 17]
    for k, v in zip(key.split(splits, 2), value.split(splits, 2), strict=True):
        append(*cache, k, v, name)
    assert_same_bits(cache, together)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_threads_change_nothing(name):
    key, value = rows(3, 4, 300, 128, "bf16")
    cache = empty(name, 3, 4, 128, 300)
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(appended(cache, key, value, name))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_no_rows_change_nothing(name):
    key, value = rows(2, 2, 3, 64)
    cache = appended(empty(name, 2, 2, 64, 3), key, value, name)
    assert_same_bits(appended(cache, key[:, :, :0], value[:, :, :0], name), cache)


@pytest.mark.parametrize(
    ("lengths", "tokens", "said"),
    [
        ([3, 4], 2, "leave room for 2 more tokens in max_tokens 5, got 4 at 1"),
        ([5, 0], 1, "leave room for 1 more tokens in max_tokens 5, got 5 at 0"),
        ([0, 0], 6, "leave room for 6 more tokens in max_tokens 5, got 0 at 0"),
        ([0, 6], 0, "lie in 0..5, got 6 at 1"),
        ([-1, 0], 1, "lie in 0..5, got -1 at 0"),
        ([2**31 - 1, 0], 1, f"lie in 0..5, got {2**31 - 1} at 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_past_the_capacity(name, lengths, tokens, said):
    """Refused with nothing written, not even to the sequences that had room."""
    cache = empty(name, 2, 3, 64, 5)
    cache.lengths.copy_(torch.tensor(lengths))
    before = cache.clone()
    with pytest.raises(RuntimeError, match=f"^kvq::append: lengths must {said}$"):
        append(*cache, *rows(2, 3, tokens, 64), name)
    assert_same_bits(cache, before)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_last_row_fits(name):
    cache = empty(name, 1, 1, 8, 3)
    append(*cache, *rows(1, 1, 3, 8), name)
    assert cache.lengths.tolist() == [3]


def test_empty_batches_and_heads():
    for batch, heads_kv in ((0, 2), (2, 0)):
        cache = empty("int8", batch, heads_kv, 8, 3)
        append(*cache, *torch.randn(2, batch, heads_kv, 1, 8), "int8")
        assert cache.lengths.tolist() == [1] * batch
