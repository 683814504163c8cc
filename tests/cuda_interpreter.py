"""Kernels of kvq_ops/cuda in Triton's interpreter, over CPU tensors, against the reference: to be run in a process of
its own, since TRITON_INTERPRET counts when kernels are defined. Prints nothing where all is well."""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from common import DTYPES, TOLERANCES, Cache, append, assert_same_bits, empty, filled, judge, relative_error
from data import make
from torch import Tensor

from kvq_ops import checks, get_format, reference
from kvq_ops.cuda import codec, launch, plan
from kvq_ops.format import LEVELS

warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of NaN and infinity
torch.set_num_threads(1)


def cuda_append(*arguments: Any) -> None:
    checks.append("kvq::append", *arguments)
    launch.append(*arguments)


def cuda_attend(
    query: Tensor, cache: Cache, name: str, scale: float | None = None, sms: int = 1
) -> tuple[Tensor, Tensor]:
    """sms: of the device to act as, which decides how sequences are split."""
    arguments = (query, *cache.needed, name, scale, *cache.optional)
    checks.attend("kvq::attend_lse", *arguments)
    launch.multiprocessors = lambda _: sms
    return launch.attend(True, *arguments)


def rows(generator: torch.Generator, *shape: int) -> Tensor:
    """Rows of magnitudes far apart."""
    x = torch.randn(shape, generator=generator) * torch.randn((*shape[:-1], 1), generator=generator).exp()
    return x * 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=generator)


def test_append(name: str, dtype: str, head_dim: int) -> None:
    """Every byte, behind rounds of the ring, of sequences of three lengths; rows that hurt; strided input."""
    generator = torch.Generator().manual_seed(head_dim)
    kind, lengths, tokens = DTYPES[dtype], [133, 0, 62], 68
    block = get_format(name).key.key_block
    if not block:
        lengths, tokens = [5, 0, 2], 3
    want = empty(name, 3, 2, head_dim, 210, kind)
    for b, length in enumerate(lengths):
        if length:
            both = rows(generator, 2, 1, 2, length, head_dim).to(kind)
            append(want.sequence(b), both[0], both[1], name, reference.append)
    got = want.clone()
    for count in (1, tokens):
        key, value = rows(generator, 2, 3, count, 2, head_dim).transpose(2, 3)  # token before head in memory
        key[0, 0, 0], value[1, 1, -1] = 0.0, 0.0
        value[0, 1, 0, 3], key[1, 0, 0, 2], value[2, 0, -1, 1] = math.nan, math.inf, -math.inf
        key[2, 1, 0] *= 1e30
        value[2, 1, 0] *= 1e-41
        key, value = key.to(kind), value.to(kind)
        append(want, key, value, name, reference.append)
        append(got, key, value, name, cuda_append)
        assert_same_bits(got, want)


def test_overflow(name: str) -> None:
    """What fits is written, the rest dropped, nothing past the capacity, and the length tells, once and for all."""
    generator = torch.Generator().manual_seed(0)
    capacity, head_dim = 70, 32
    want, over = empty(name, 2, 2, head_dim, capacity), empty(name, 2, 2, head_dim, capacity)
    both = rows(generator, 2, 2, 2, 75, head_dim)
    for b, fits in enumerate([70, 60]):
        append(want.sequence(b), *both[:, b : b + 1, :, :fits], name, reference.append)
    over.lengths[0] = 0
    for first, last in ((0, 60), (60, 75)):
        key, value = both[:, :, :, first:last]
        parts = over.sequence(0) if first else over
        append(parts, key[: len(parts.lengths)], value[: len(parts.lengths)], name, cuda_append)
    assert over.lengths.tolist() == [capacity + 1, 60]
    assert_same_bits(over[:4] + over[5:], want[:4] + want[5:])
    before = over.clone()
    append(over.sequence(0), both[0, :1, :, :1], both[1, :1, :, :1], name, cuda_append)
    assert_same_bits(over, before)
    query = torch.randn(2, 4, head_dim, generator=generator)
    assert_same_bits(cuda_attend(query, over, name), cuda_attend(query, want, name))


def check_attend(name: str, dtype: str, query: Tensor, cache: Cache, sms: int = 1, scale: float | None = None) -> None:
    query = query.to(DTYPES[dtype])
    out, lse = cuda_attend(query, cache, name, scale, sms)
    want, want_lse = judge(query, cache, name, scale)
    assert out.dtype == query.dtype
    assert out.shape == query.shape
    assert lse.shape == query.shape[:-1]
    assert torch.equal(lse.isinf(), want_lse.isinf())
    error, bound = relative_error(out, want), TOLERANCES[name].attend
    # Where few channels make up a row, rounding the judge's own output may cost more than it does of many.
    rounded = math.hypot(bound["fp32"], relative_error(want.to(out.dtype), want))
    assert error < max(bound[dtype], rounded), f"{error:.2e}"
    assert (lse - want_lse).nan_to_num(0.0).abs().max() < 1e-3


def test_attend(name: str, dtype: str, head_dim: int, heads_q: int, heads_kv: int, kind: str) -> None:
    """Ragged sequences, one empty; whole, and cut into as many splits as there are tiles."""
    lengths = [150, 0, 67] if get_format(name).key.key_block else [133, 0, 3]
    query, key, value = make(kind, 3, heads_q, heads_kv, head_dim, max(lengths))
    cache = filled(name, key.to(DTYPES[dtype]), value.to(DTYPES[dtype]), lengths, 256)
    check_attend(name, dtype, query, cache)
    if dtype == "fp32":
        check_attend(name, dtype, query, cache, sms=1000, scale=0.3)


def test_tokens(name: str) -> None:
    """Several query tokens, causal; zeros and -inf for those before the first; a NaN that none of them sees."""
    _, key, value = make("normal", 2, 4, 2, 64, 90)
    cache = filled(name, key, value, [90, 2], 128)
    query = torch.randn(2, 6, 5, 64, generator=torch.Generator().manual_seed(0))
    check_attend(name, "fp32", query[:1], cache.sequence(0))
    out, lse = cuda_attend(query, cache, name)
    assert torch.equal(out[1, :, :3], torch.zeros(6, 3, 64))
    assert (lse[1, :, :3] == -math.inf).all()
    value[:, :, -1], key[:, :, -1] = math.nan, math.nan
    poisoned = filled(name, key, value, [90, 2], 128)
    got, _ = cuda_attend(query, poisoned, name)
    assert_same_bits([got[0, :, :-1]], [out[0, :, :-1]])
    assert got[0, :, -1].isnan().all()


def test_alone(name: str) -> None:
    """A sequence's result is its own, bit for bit, whatever lies beside it or past its length; twice is the same."""
    query, key, value = make("normal", 2, 4, 2, 64, 140)
    cache = filled(name, key, value, [140, 71], 192)
    first = cuda_attend(query, cache, name, sms=1000)
    assert_same_bits(first, cuda_attend(query, cache, name, sms=1000))
    key[0], value[0] = 100.0, math.nan
    other = filled(name, key, value, [130, 71], 192)
    again = cuda_attend(query, other, name, sms=1000)
    assert_same_bits([x[1] for x in again], [x[1] for x in first])


def test_strides(name: str) -> None:
    """Parts and queries of any strides, rows on odd addresses included."""
    query, key, value = make("normal", 2, 4, 2, 36, 40)
    cache = filled(name, key, value, [40, 9], 64)
    want = cuda_attend(query, cache, name)

    def spread(part: Tensor) -> Tensor:
        if part.dim() < 3:
            return part
        if part.dim() == 3:
            return part.repeat_interleave(2, -1)[..., ::2]
        wide = part.new_zeros((*part.shape[:3], part.shape[3] + 1))
        wide[..., 1:] = part
        return wide[..., 1:]

    moved = cache.each(spread)
    assert not launch._words(moved.key_codes)
    assert launch._words(cache.key_codes)
    rows_last = query.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = cuda_attend(rows_last, moved, name)
    assert relative_error(out, want[0]) < 1e-5
    assert (lse - want[1]).abs().max() < 1e-5


def test_exact(name: str) -> None:
    """A zero query over equal rows, a power of two of them, whose scale is a power of two, gives the row."""
    value = (torch.arange(64) % 15 - 7.0).expand(1, 2, 32, 64) if "4" in name else torch.full((1, 2, 32, 64), 127.0)
    cache = filled(name, torch.randn(1, 2, 32, 64), value, max_tokens=128)
    out, lse = cuda_attend(torch.zeros(1, 4, 64), cache, name)
    assert torch.equal(out, value[:, :1, 0].expand(1, 4, 64))
    assert torch.allclose(lse, torch.tensor(math.log(32)))


def test_empty() -> None:
    """Nothing of something: no tokens to append, no query heads, no sequences."""
    cache = empty("int8", 2, 2, 8, 4)
    before = cache.clone()
    append(cache, torch.zeros(2, 2, 0, 8), torch.zeros(2, 2, 0, 8), "int8", cuda_append)
    assert_same_bits(cache, before)
    assert cuda_attend(torch.zeros(2, 0, 8), cache, "int8")[0].shape == (2, 0, 8)
    assert cuda_attend(torch.zeros(2, 2, 0, 8), cache, "int8")[1].shape == (2, 2, 0)
    out, lse = cuda_attend(torch.ones(2, 2, 8), cache, "int8")
    assert torch.equal(out, torch.zeros(2, 2, 8))
    assert (lse == -math.inf).all()


@triton.jit
def levels_kernel(words, out, PLANE: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out + at, codec.levels(tl.load(words + at), PLANE, 4, True).to(tl.float32))


def test_levels() -> None:
    """Each nibble of a word becomes its level; and would, whichever products and sums of the polynomial are fused."""
    want = torch.tensor(LEVELS, dtype=torch.float32)
    words = torch.arange(16).to(torch.int16) * 0x1111
    for plane in range(4):
        out = torch.empty(16)
        levels_kernel[(1,)](words.view(torch.uint16), out, plane)
        assert torch.equal(out, want)
    a, b, c = 0.0007128715515136719, 0.044769287109375, 12.1171875
    u = torch.arange(16, dtype=torch.float64) - 7.5

    def add(product: Tensor, number: float, fused: bool) -> Tensor:
        return ((product if fused else product.half().double()) + number).half().double()

    for fused in range(8):
        x = add(add(u * u * a, b, bool(fused & 1)) * u * u, c, bool(fused & 2)) * u
        assert torch.equal((add(x, 1536.0, bool(fused & 4)) - 1536).float(), want)


def test_plans() -> None:
    """Cuts depend on capacity and device alone, short contexts are not cut, and no cut is empty by plan."""
    assert plan.splits(4, 128, 64, 132) == 1
    assert plan.splits(4, 1024, 64, 132) == 8
    assert plan.splits(4, 262144, 64, 132) == 66
    assert plan.splits(1024, 262144, 64, 132) == 1


if __name__ == "__main__":
    for case in sys.argv[1:]:
        function, *given = case.split(":")
        try:
            globals()[function](*(int(each) if each.isdigit() else each for each in given))
        except Exception as error:
            raise AssertionError(case) from error
