"""kvq::attend and kvq::attend_lse against float64 attention over the dequantised cache."""

from __future__ import annotations

import math

import pytest
import torch
from common import (
    CODINGS,
    DTYPES,
    FORMAT_NAMES,
    IN_BLOCKS,
    TOLERANCES,
    Cache,
    append,
    assert_same_bits,
    attend,
    attention,
    empty,
    filled,
    in_full,
    judge,
    relative_error,
    same_bits,
)
from data import KINDS, make
from torch import Tensor

from kvq_ops import get_format, reference
from kvq_ops.format import LEVELS

LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000]
HEADS = [(1, 1), (8, 8), (24, 4), (9, 3), (5, 1), (32, 8)]
HEAD_DIMS = [8, 10, 16, 64, 80, 96, 100, 128, 256, 512, 1024]
BORDERS = [0, 1, 3, 4, 5, 35, 36, 37, 67, 68, 69, 100, 131, 132, 133, 134, 196, 200, 516, 520]

pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")


def assert_close(query: Tensor, cache: Cache, name: str, scale: float | None = None) -> None:
    """Output and lse of both ops are near the reference's. The error of lse grows with the logits: on normal data lse
    stays below 10, where it gets its tolerance as it is."""
    dtype = next(key for key, dtype in DTYPES.items() if dtype == query.dtype)
    want, want_lse = judge(query, cache, name, scale)
    got, lse = attend(query, cache, name, scale, return_lse=True)
    assert (got.dtype, got.shape, got.is_contiguous()) == (query.dtype, query.shape, True)
    assert (lse.dtype, lse.shape, lse.is_contiguous()) == (torch.float32, query.shape[:-1], True)
    assert relative_error(got, want) <= TOLERANCES[name].attend[dtype]
    largest = want_lse[want_lse.isfinite()].abs().max().item()
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=TOLERANCES[name].own_lse * max(1.0, largest / 10))
    assert same_bits(attend(query, cache, name, scale), got)


@pytest.mark.parametrize("length", LENGTHS, ids="len{}".format)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODINGS)
def test_lengths(name, dtype, kind, length):
    """Rows in full precision have the query's dtype."""
    query, key, value = (x.to(DTYPES[dtype]) for x in make(kind, 1, 4, 2, 128, length))
    assert_close(query, filled(name, key, value, max_tokens=length + 3), name)


@pytest.mark.parametrize("head_dim", [10, 64], ids="d{}".format)
@pytest.mark.parametrize("tokens", [1, 4], ids="t{}".format)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_around_sinks_and_borders_of_blocks(name, tokens, head_dim):
    """Sinks alone, blocks just filled, and rounds of the ring; query tokens before and behind what froze."""
    lengths = [length for length in BORDERS if length == 0 or length >= tokens]
    query, key, value = make("normal", len(lengths), 6, 2, head_dim, max(BORDERS))
    query = torch.stack([query.roll(t, 1) for t in range(tokens)], 2)
    assert_close(query, filled(name, key, value, lengths), name)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "q{}kv{}".format(*heads))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CODINGS)
def test_heads(name, kind, heads):
    query, key, value = make(kind, 2, *heads, 64, 150)
    assert_close(query, filled(name, key, value), name)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids="d{}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODINGS)
def test_head_dims(name, dtype, head_dim):
    batch = 1 + 128 // head_dim  # of few numbers the rounding alone may exceed the bound for bf16
    for kind in KINDS if dtype == "fp32" else ["normal"]:
        query, key, value = make(kind, batch, 6, 2, head_dim, 130)
        assert_close(query.to(DTYPES[dtype]), filled(name, key, value), name)


@pytest.mark.parametrize("head_dim", [514, 768, 1022, 1024], ids="d{}".format)
@pytest.mark.parametrize("name", CODINGS)
def test_long_heads_one_row_at_a_time(name, head_dim):
    """Their logits could leave int32; a query is as precise as in short ones all the same."""
    torch.manual_seed(head_dim)
    tokens = get_format(name).sinks + get_format(name).key.key_block + 3
    for _ in range(60 if name in ("int8", "int4") else 10):
        key, value = torch.randn(2, 1, 1, tokens, head_dim)
        query = torch.randn(1, 1, head_dim)
        assert_close(query, filled(name, key, value), name)


@pytest.mark.parametrize("head_dim", [64, 512, 514, 1024], ids="d{}".format)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_codes_that_append_never_writes(name, head_dim):
    """-128 and -8: a cache may hold any bytes."""
    key, value, query = torch.randn(1, 1, 70, head_dim), torch.randn(1, 1, 70, head_dim), torch.ones(1, 1, head_dim)
    cache = filled(name, key, value)
    for codes in (cache.key_codes, cache.value_codes):
        lowest = -128 if codes.dtype == torch.int8 else 0
        codes[:, :, ::3] = lowest
    assert_close(query * 1e-2, cache, name)


def test_no_logit_overflows():
    """The largest codes that there are, all of one sign, over the longest head."""
    ones = torch.ones(1, 1, 2, 1024)
    for name in FORMAT_NAMES:
        cache = filled(name, ones, ones * torch.tensor([1.0, 0.5])[:, None])
        assert_close(ones[:, :, 0] * 0.01, cache, name)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 16, 17], ids="t{}".format)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 3)], ids=lambda heads: "q{}kv{}".format(*heads))
@pytest.mark.parametrize("name", CODINGS)
def test_ragged_batches_and_several_tokens(name, heads, tokens):
    """Query tokens are the newest positions, causal among themselves; a sequence may hold them and no more."""
    query, key, value = make("outlier", 5, *heads, 64, 130)
    query = torch.stack([query.roll(t, 1) * (1 - t / 40) for t in range(tokens)], 2)
    cache = filled(name, key, value, [130, tokens, 0, 64 + tokens, 70])
    assert_close(query, cache, name)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3], ids="{:g}".format)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODINGS)
def test_magnitudes(name, dtype, kind, magnitude):
    """Of query, key and value, each for itself. The logits stay what they are, by the softmax scale: where two keys'
    logits differ by thousands of which the query's own 16 bits move several, no code answers for the output."""
    query, key, value = make(kind, 1, 4, 2, 128, 200)
    scale = 1 / math.sqrt(128) / magnitude
    cases = [(magnitude, 1.0, 1.0, scale), (1.0, magnitude, 1.0, scale), (1.0, 1.0, magnitude, None)]
    for q, k, v, softmax_scale in cases:
        assert_close((query * q).to(DTYPES[dtype]), filled(name, key * k, value * v), name, softmax_scale)


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("scale", [0.0, -0.1, 0.5, 1e-30])
def test_softmax_scale(name, scale):
    query, key, value = make("normal", 2, 4, 2, 64, 100)
    assert_close(query, filled(name, key, value), name, scale)


STRIDED = {
    "tokens-before-heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every-second-channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "part-of-a-fused-projection": lambda x: torch.cat([x, x + 1, x - 1], -1)[..., : x.shape[-1]],
    "heads-expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_query(layout, dtype):
    query, key, value = make("normal", 2, 4, 2, 100, 50)
    caches = {name: filled(name, key, value) for name in ("int8/int4", "int8_kivi", "int4_g32")}
    query = STRIDED[layout](torch.stack([query, query + 1, -query], 2).to(DTYPES[dtype]))
    contiguous = query.clone(memory_format=torch.contiguous_format)
    assert not query.is_contiguous()
    for name, cache in caches.items():
        got, want = (attend(x, cache, name, return_lse=True) for x in (query, contiguous))
        assert_same_bits(got, want)
        assert got[0].is_contiguous()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_strided_cache(name):
    """Parts whose last dimension alone is contiguous."""
    query, key, value = make("normal", 2, 4, 2, 100, 50)
    cache = filled(name, key, value)
    strided = cache.each(lambda part: torch.stack([part, part.flip(0)], 2).movedim(2, 0)[0] if part.dim() > 1 else part)
    assert all(not part.is_contiguous() for part in strided.named().values())
    assert same_bits(attend(query, strided, name), attend(query, cache, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [None, 0, 1, 5])
@pytest.mark.parametrize("name", CODINGS)
def test_nothing_to_attend_to(name, tokens, dtype):
    """Length 0: zeros and -inf for any number of query tokens. No query tokens: empty."""
    query, key, value = make("normal", 2, 4, 2, 64, 9)
    query = query if tokens is None else query[:, :, None].expand(2, 4, tokens, 64)
    cache = filled(name, key, value, [0, 9])
    out, lse = attend(query.to(DTYPES[dtype]), cache, name, return_lse=True)
    assert (out.shape, lse.shape) == (query.shape, query.shape[:-1])
    assert same_bits(out[0], torch.zeros_like(out[0]))
    assert (lse[0] == -math.inf).all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_lse_of_unquantised_data(name):
    query, key, value = make("normal", 2, 8, 2, 256, 1000)
    lse = attend(query, filled(name, key, value), name, return_lse=True)[1]
    want = attention(query[:, :, None], key, value)[1][:, :, 0]
    assert (lse - want).square().mean().sqrt() <= TOLERANCES[name].lse


@pytest.mark.parametrize("name", [name for name, tolerance in TOLERANCES.items() if tolerance.published])
def test_published_errors(name):
    """On N(0, 1) at D = 256 against attention over the unquantised data."""
    query, key, value = make("normal", 1, 32, 8, 256, 2048)
    got = attend(query, filled(name, key, value), name)
    want = attention(query[:, :, None], key, value)[0][:, :, 0]
    error, cosine = TOLERANCES[name].published
    assert relative_error(got, want) == pytest.approx(error, rel=0.05)
    assert torch.cosine_similarity(got.double().flatten(), want.flatten(), 0).item() == pytest.approx(cosine, abs=5e-4)


def exact_row(name: str) -> Tensor:
    """Rows [2, 2, 1, 100] that their coding keeps as they are, its scales being powers of two."""
    side = get_format(name).value
    coding, limit = side.coding("value"), side.limit
    row = torch.randint(-7, 8, (2, 2, 1, 100)).float()
    if coding == "row":
        row[..., 3] = limit
    elif coding == "token":
        row[..., 3], row[..., 5] = -limit, limit + 1
    elif side.bits == 8:
        row += 0.5
        for start, _ in side.groups(100):
            row[..., start + 1] = limit + 0.5
    else:
        row = torch.tensor(LEVELS)[row.long() + 8].float()
        for start, _ in side.groups(100):
            row[..., start + 1] = LEVELS[-1]
    return reference.rotate(row) if side.rotated("value") else row  # blocks of 4: sums of halves, times a half


@pytest.mark.parametrize("count", [1, 2, 64, 256, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODINGS)
def test_uniform_logits_are_exact(name, dtype, count):
    """A zero query over a power-of-two number of equal value rows, whose scale is a power of two, gives the value."""
    _, key, _ = make("normal", 2, 4, 2, 100, count)
    torch.manual_seed(count)
    value = (exact_row(name) / 4).expand(2, 2, count, 100)
    query = torch.zeros(2, 4, 100, dtype=DTYPES[dtype])
    out, lse = attend(query, filled(name, key, value), name, return_lse=True)
    want = value[:, :, :1].expand(2, 2, 2, 100).reshape(2, 4, 100).to(DTYPES[dtype])
    assert torch.equal(out, want)
    torch.testing.assert_close(lse, torch.full((2, 4), math.log(count)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("token", [0, 40, 69])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", CODINGS)
def test_a_poisoned_row_stays_in_its_sequence_and_head(name, side, token, bad):
    query, key, value = make("normal", 2, 6, 3, 64, 70)
    clean = attend(query, filled(name, key, value), name, return_lse=True)
    poisoned = (key if side == "key" else value).clone()
    poisoned[1, 1, token, 5] = bad
    cache = filled(name, poisoned, value) if side == "key" else filled(name, key, poisoned)
    out, lse = attend(query, cache, name, return_lse=True)
    hit = torch.zeros(2, 6, dtype=torch.bool)
    hit[1, 2:4] = True
    if not in_full(name, side, token, 70):
        assert torch.equal(out.isnan(), hit[..., None].expand_as(out))
        assert torch.equal(lse.isnan(), hit if side == "key" else torch.zeros_like(hit))
    elif math.isnan(bad):
        assert out[hit][:, 5].isnan().all()
        assert torch.equal(lse.isnan(), hit if side == "key" else torch.zeros_like(hit))
    assert same_bits(out[~hit], clean[0][~hit])
    assert same_bits(lse[~hit], clean[1][~hit])


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_poisoned_row_is_unseen_by_earlier_query_tokens(name, side):
    query, key, value = make("normal", 1, 4, 2, 64, 66)
    query = query[:, :, None].repeat(1, 1, 4, 1)
    clean = attend(query, filled(name, key, value), name)
    poisoned = (key if side == "key" else value).clone()
    poisoned[..., 64, :] = math.nan
    cache = filled(name, poisoned, value) if side == "key" else filled(name, key, poisoned)
    out = attend(query, cache, name)
    assert same_bits(out[:, :, :2], clean[:, :, :2])
    assert out[:, :, 2:].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_poisoned_query_stays_in_its_row(name, bad):
    query, key, value = make("normal", 2, 6, 3, 64, 70)
    cache = filled(name, key, value)
    query = query[:, :, None].repeat(1, 1, 3, 1)
    clean = attend(query, cache, name)
    query[1, 2, 1, 7] = bad
    out = attend(query, cache, name)
    hit = torch.zeros(2, 6, 3, dtype=torch.bool)
    hit[1, 2, 1] = True
    assert out[hit].isnan().all()
    assert same_bits(out[~hit], clean[~hit])


@pytest.mark.parametrize("magnitude", [1e30, 1e38])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_huge_values(name, magnitude):
    """Weights are divided by their sum last, so offsets, which have one sign, must not overflow as often as there are
    tokens; nor may sums of channels."""
    if get_format(name).value.scheme:
        magnitude /= 100
    query, key, value = make("normal", 1, 4, 2, 64, 100)
    value = value / value.abs().max() * magnitude
    cache = filled(name, key, value)
    assert attend(query, cache, name).isfinite().all()
    assert_close(query, cache, name)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", CODINGS)
def test_invariance(name, tokens):
    """A row's bits depend on its own sequence and query alone: not on the number of threads, the capacity, the other
    sequences, nor on how the rows were appended."""
    query, key, value = make("outlier", 3, 12, 4, 96, 700)
    query = torch.stack([query * (t + 1) for t in range(tokens)], 2)
    lengths = [700, 333, 64]
    cache, larger = filled(name, key, value, lengths), filled(name, key, value, lengths, 2000)
    want = attend(query, cache, name, return_lse=True)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        assert_same_bits(attend(query, cache, name, return_lse=True), want)
        assert_same_bits(attend(query, larger, name, return_lse=True), want)
        for b in range(3):
            alone = attend(query[b : b + 1], cache.sequence(b), name, return_lse=True)
            assert_same_bits(alone, tuple(x[b : b + 1] for x in want))
        for h in (0, 3):
            heads = cache.each(lambda part, h=h: part[:, h : h + 1] if part.dim() > 1 else part)
            alone = attend(query[:, 3 * h : 3 * h + 3], heads, name, return_lse=True)
            assert_same_bits(alone, tuple(x[:, 3 * h : 3 * h + 3] for x in want))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_decoding_step_by_step(name):
    """Rows appended one by one, each attended to when it is the newest, and all of them in one prefill: the same where
    no key is coded later."""
    tokens = 150 if name in IN_BLOCKS else 70
    query, key, value = make("normal", 2, 4, 2, 64, tokens)
    queries = torch.stack([query.roll(t, -1) for t in range(tokens)], 2)
    stepwise, together = (empty(name, 2, 2, 64, tokens + 10) for _ in range(2))
    outs = []
    for t in range(tokens):
        append(stepwise, key[:, :, t : t + 1], value[:, :, t : t + 1], name)
        outs.append(attend(queries[:, :, t], stepwise, name))
    append(together, key, value, name)
    assert_same_bits(together, stepwise)
    assert same_bits(attend(queries[:, :, -1], together, name), outs[-1])
    if name not in IN_BLOCKS:
        got = attend(queries, together, name)
        assert relative_error(got, torch.stack(outs, 2)) <= TOLERANCES[name].attend["fp32"]


def test_empty_batches_and_queries():
    for batch, heads_q in ((0, 4), (2, 0)):
        out, lse = attend(torch.empty(batch, heads_q, 8), empty("int8", batch, 2, 8, 3), "int8", return_lse=True)
        assert (out.shape, lse.shape) == ((batch, heads_q, 8), (batch, heads_q))
