"""kvq::append: bytes equal to the reference's, nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch
from common import (
    CODINGS,
    DTYPES,
    FORMAT_NAMES,
    IN_BLOCKS,
    Cache,
    append,
    assert_same_bits,
    empty,
    filled,
    same_bits,
)
from torch import Tensor

import kvq_ops
from kvq_ops import get_format, reference

HEAD_DIMS = [8, 10, 16, 64, 80, 96, 100, 128, 256, 512, 1024]
PAD = 1


def guarded(part: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of part inside a larger tensor of noise, which is returned too: what lies around it is then visible."""
    around = part.new_empty([size + 2 * PAD for size in part.shape])
    if part.dim() == 1:
        around.random_(0, 1000)
    else:
        around.view(torch.uint8).random_(0, 256)
    inside = around[tuple(slice(PAD, PAD + size) for size in part.shape)]
    inside.copy_(part)
    return inside, around


def appended(cache: Cache, key: Tensor, value: Tensor, name: str, by=kvq_ops.append) -> Cache:
    """A copy of cache with the rows."""
    cache = cache.clone()
    append(cache, key, value, name, by)
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


def assert_nothing_else_is_touched(cache: Cache, key: Tensor, value: Tensor, name: str) -> None:
    """The parts being views into noise: what append writes equals the reference's, older rows, later rows and
    surroundings stay."""
    want = appended(cache, key, value, name, reference.append)
    guards = {part_name: guarded(part) for part_name, part in cache._asdict().items() if part is not None}
    inside = Cache(**{part_name: view for part_name, (view, _) in guards.items()})
    before = {part_name: part.clone() for part_name, (_, part) in guards.items()}
    append(inside, key, value, name)
    assert_same_bits(inside, want)
    for part_name, (view, around) in guards.items():
        view.copy_(before[part_name][tuple(slice(PAD, PAD + size) for size in view.shape)])
        assert same_bits(around, before[part_name])


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        *(("fp32", head_dim) for head_dim in HEAD_DIMS),
        *((dtype, d) for dtype in ("fp16", "bf16") for d in (10, 64, 100)),
    ],
)
@pytest.mark.parametrize("name", CODINGS)
def test_bytes_equal_the_reference(name, dtype, head_dim):
    """Ragged lengths; where keys are coded in blocks, the first append leaves a block open and the second fills it and
    one more."""
    block = get_format(name).key.key_block
    first, second = (block + 7, 5 + block) if block else (6, 5)
    key, value = rows(2, 3, first + second, head_dim, dtype)
    cache = empty(name, 2, 3, head_dim, first + second, DTYPES[dtype])
    cache.lengths.copy_(torch.tensor([1, 6]) - 1)
    append(cache, key[:, :, : first - 5], value[:, :, : first - 5], name, reference.append)
    assert_nothing_else_is_touched(cache, key[:, :, :second], value[:, :, :second], name)


BORDERS = [0, 1, 3, 4, 5, 35, 36, 37, 67, 68, 69, 100, 131, 132, 133]


@pytest.mark.parametrize("tokens", [1, 3, 33, 64, 130], ids="t{}".format)
@pytest.mark.parametrize("name", CODINGS)
def test_around_sinks_and_borders_of_blocks(name, tokens):
    """Sequences that start before, at and behind every border, each freezing blocks of its own."""
    key, value = rows(len(BORDERS), 2, max(BORDERS) + tokens, 10)
    cache = filled(name, key, value, BORDERS, key.shape[2])
    assert_nothing_else_is_touched(cache, key[:, :, -tokens:], value[:, :, -tokens:], name)


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
@pytest.mark.parametrize("name", CODINGS)
def test_hostile_rows(name, dtype, head_dim):
    """Zeros of both signs, NaN, infinities, the largest numbers, numbers below the normal ones, at the first channel,
    the middle, the last and everywhere."""
    x = hostile_rows(head_dim).to(DTYPES[dtype])
    cache = empty(name, 1, 1, head_dim, x.shape[2], x.dtype)
    got = appended(cache, x, x.flip(2), name)
    assert_same_bits(got, appended(cache, x, x.flip(2), name, reference.append))
    format = get_format(name)
    poisoned = got.key_scales == 255 if format.key.coding("key") == "group" else got.key_scales.isnan()
    assert poisoned.sum() >= (1 if format.key.key_block else 10)


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
    key, value = rows(2, 3, 37, head_dim, dtype)
    for name, start in (("int8/int4", 0), ("int4_hq", 60), ("int8_kivi", 0)):
        cache = empty(name, 2, 3, head_dim, start + 40, DTYPES[dtype])
        append(cache, *rows(2, 3, start, head_dim, dtype), name)
        want = appended(cache, key, value, name)
        strided = STRIDED[layout](key)
        assert torch.equal(strided, key)
        assert strided.stride() != key.stride() or strided.storage_offset() != 0
        assert_same_bits(appended(cache, strided, value, name), want)
        assert_same_bits(appended(cache, key, STRIDED[layout](value), name), want)


def test_one_row_for_all():
    """Strides of 0."""
    key, value = torch.randn(2, 1, 1, 1, 64)
    shape = (2, 3, 70, 64)
    for name in ("int4", "int4_hq"):
        cache = empty(name, 2, 3, 64, 70)
        want = appended(cache, key.expand(shape).contiguous(), value.expand(shape).contiguous(), name)
        assert_same_bits(appended(cache, key.expand(shape), value.expand(shape), name), want)


@pytest.mark.parametrize("splits", [[1] * 17, [5, 12], [16, 0, 1]], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_one_by_one_or_together(name, splits):
    key, value = rows(2, 2, 17, 80)
    cache = empty(name, 2, 2, 80, 20)
    together = appended(cache, key, value, name)
    assert together.lengths.tolist() == [17, 17]
    for k, v in zip(key.split(splits, 2), value.split(splits, 2), strict=True):
        append(cache, k, v, name)
    assert_same_bits(cache, together)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_every_split_of_two_blocks(name):
    """Appended in two, cut anywhere, and in random pieces: the bytes of one append."""
    block, sinks = get_format(name).key.key_block, get_format(name).sinks
    tokens = sinks + 2 * block + 3
    key, value = rows(1, 1, tokens, 10)
    cache = empty(name, 1, 1, 10, tokens)
    together = appended(cache, key, value, name)
    splits = [[cut, tokens - cut] for cut in range(tokens + 1)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        cuts = torch.randint(0, tokens + 1, (6,), generator=generator).sort().values.tolist()
        splits.append([b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)])
    for split in splits:
        apart = cache.clone()
        for k, v in zip(key.split(split, 2), value.split(split, 2), strict=True):
            append(apart, k, v, name)
        assert_same_bits(apart, together)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_frozen_blocks_stay(name):
    """Whatever is appended later, one by one over two rounds of the ring: keys coded once stay as they are."""
    block, sinks = get_format(name).key.key_block, get_format(name).sinks
    key, value = rows(1, 2, sinks + 5 * block, 16)
    cache = empty(name, 1, 2, 16, sinks + 5 * block)
    frozen: list[Tensor] = []
    for t in range(key.shape[2]):
        append(cache, key[:, :, t : t + 1], value[:, :, t : t + 1], name)
        blocks = max(0, t + 1 - sinks) // block
        parts = (cache.key_codes[:, :, sinks : sinks + blocks * block], cache.key_scales[:, :, :blocks])
        now = [*parts, cache.key_zeros[:, :, :blocks]]
        if blocks and (t + 1 - sinks) % block == 0:
            frozen = [part.clone() for part in now]
        if blocks:
            assert_same_bits(now, frozen)
    if sinks:
        assert same_bits(cache.key_full[:, :, :sinks], key[:, :, :sinks])
        assert same_bits(cache.value_full, value[:, :, :sinks])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_threads_change_nothing(name):
    """Three threads have work for each; sequences are ragged."""
    key, value = rows(3, 4, 300, 128, "bf16")
    cache = filled(name, key, value, [0, 40, 3], 340)
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
        append(cache, *rows(2, 3, tokens, 64), name)
    assert_same_bits(cache, before)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_last_row_fits(name):
    cache = empty(name, 1, 1, 8, 3)
    append(cache, *rows(1, 1, 3, 8), name)
    assert cache.lengths.tolist() == [3]


def test_empty_batches_and_heads():
    for batch, heads_kv in ((0, 2), (2, 0)):
        cache = empty("int8", batch, heads_kv, 8, 3)
        append(cache, *torch.randn(2, batch, heads_kv, 1, 8), "int8")
        assert cache.lengths.tolist() == [1] * batch
