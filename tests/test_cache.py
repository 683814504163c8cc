"""QuantizedKVCache: the module over the ops."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch
from common import (
    DTYPES,
    FORMAT_NAMES,
    IN_BLOCKS,
    KNOWN_FORMATS,
    LONG,
    LONG_TOKENS,
    RAGGED,
    TOLERANCES,
    assert_same_bits,
    attend,
    attention,
    by_rows,
    filled,
    in_use,
    parts,
    ragged,
    relative_error,
    same_bits,
)
from data import make
from torch import Tensor, nn

from kvq_ops import QuantizedKVCache, get_format, reference
from kvq_ops.cache import _moves

# ------------------------------------------------------------------------------------------------------ constructor


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "int8"),
        ({"bits": 8}, "int8"),
        ({"bits": 4}, "int4"),
        ({"format": "int4"}, "int4"),
        ({"bits": 4, "format": "int4_hq"}, "int4_hq"),
        ({"format": get_format("int4/int8")}, "int4/int8"),
        ({"format": "int4_hq"}, "int4_hq"),
        ({"format": "int8_kivi/int4/sinks7"}, "int8_kivi/int4/sinks7"),
    ],
    ids=str,
)
def test_format(arguments, name):
    cache = QuantizedKVCache(2, 3, 10, 5, **arguments)
    assert cache.format == get_format(name)
    expected = get_format(name).parts(2, 3, 10, 5)
    assert {part: (tuple(x.shape), str(x.dtype)) for part, x in cache.named_buffers()} == {
        **{part: (spec.shape, f"torch.{spec.dtype}") for part, spec in expected.items()},
        "lengths": ((2,), "torch.int32"),
    }
    assert cache.nbytes == get_format(name).bytes_needed(2, 3, 10, 5) == sum(x.nbytes for x in cache.buffers())
    assert cache.bytes_per_token == get_format(name).bytes_per_token(3, 10)
    assert cache.lengths.tolist() == [0, 0]
    assert list(cache.parameters()) == []
    assert cache.state_dict() == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": 2.0}, "batch must be an int, got 2.0"),
        ({"batch": True}, "batch must be an int, got True"),
        ({"heads_kv": -1}, "heads_kv must be at least 1, got -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": "9"}, "max_tokens must be an int, got '9'"),
        ({"head_dim": 7}, "head_dim must be even and from 8 to 1024, got 7"),
        ({"head_dim": 6}, "head_dim must be even and from 8 to 1024, got 6"),
        ({"head_dim": 1026}, "head_dim must be even and from 8 to 1024, got 1026"),
        ({"bits": 2}, "bits must be 4 or 8, got 2"),
        ({"bits": "8"}, "bits must be 4 or 8, got '8'"),
        ({"bits": 4, "format": "int8/int4"}, "bits must be left out with format int8/int4, got 4"),
        ({"format": "int2"}, f"format {KNOWN_FORMATS}, got 'int2'"),
        ({"format": 8}, f"format {KNOWN_FORMATS}, got 8"),
        ({"dtype": torch.float64}, "dtype must be float32, bfloat16 or float16, got float64"),
        ({"dtype": "bf16"}, "dtype must be float32, bfloat16 or float16, got 'bf16'"),
    ],
    ids=str,
)
def test_constructor_refuses(arguments, said):
    good = {"batch": 1, "heads_kv": 2, "head_dim": 8, "max_tokens": 4}
    with pytest.raises(ValueError, match=f"^{re.escape('QuantizedKVCache: ' + said)}$"):
        QuantizedKVCache(**(good | arguments))


def test_repr():
    assert repr(QuantizedKVCache(2, 4, 64, 100, 4)) == (
        "QuantizedKVCache(batch=2, heads_kv=4, head_dim=64, max_tokens=100, format=int4, nbytes=57608)"
    )


# --------------------------------------------------------------------------------------------------- append, attend


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_append_and_attend(name, dtype, mode):
    query, key, value = (x.to(DTYPES[dtype]) for x in make("normal", 2, 4, 2, 64, 7))
    cache = QuantizedKVCache(2, 2, 64, 9, format=name, dtype=DTYPES[dtype])
    with mode():
        assert cache.append(key[:, :, :6], value[:, :, :6]) is None
        cache.append(key[:, :, 6], value[:, :, 6])
        assert cache.lengths.tolist() == [7, 7]
        want = filled(name, key, value)
        assert_same_bits(in_use(cache), in_use(want, name))
        out, lse = cache.attend(query, return_lse=True)
        assert_same_bits((out, lse), attend(query, want, name, return_lse=True))
        assert same_bits(cache.attend(query), out)
        assert same_bits(cache.attend(query[:, :, None]), out[:, :, None])
        assert same_bits(cache.attend(query, scale=0.3), attend(query, want, name, 0.3))


def test_ops_refuse_in_their_own_words():
    cache = QuantizedKVCache(1, 2, 8, 4)
    with pytest.raises(RuntimeError, match=r"^kvq::append: key must have an even head_dim from 8 to 1024, got 7$"):
        cache.append(torch.zeros(1, 2, 7), torch.zeros(1, 2, 7))
    with pytest.raises(RuntimeError, match=r"^kvq::attend_lse: query must have a multiple .*, got 3 \(heads_kv 2\)$"):
        cache.attend(torch.zeros(1, 3, 8), return_lse=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_are_refused(return_lse):
    """Forward works, for models whose parameters require gradients; backward says what to do."""
    cache = ragged()
    query = torch.randn(3, 6, 10)
    want = cache.attend(query, return_lse=True)
    query.requires_grad_()
    out = cache.attend(query, return_lse=return_lse)
    out = out if return_lse else (out,)
    assert_same_bits(tuple(x.detach() for x in out), want[: len(out)])
    op = "kvq::attend_lse" if return_lse else "kvq::attend"
    words = f"^{op}: query must not need a gradient, got a backward pass; .* call it under torch.no_grad\\(\\) or "
    for x in out:
        with pytest.raises(RuntimeError, match=words):
            x.sum().backward()
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(out[-1].sum(), query)
    with torch.no_grad():
        assert not cache.attend(query).requires_grad
    rows = torch.randn(3, 3, 10, requires_grad=True)
    cache.truncate(3)
    cache.append(rows, rows)
    assert not any(part.requires_grad for part in cache.buffers())


@pytest.mark.parametrize("op", ["attend", "attend_lse"])
def test_gradients_are_refused_of_the_bare_op(op):
    query = torch.randn(3, 6, 10, requires_grad=True)
    out = getattr(torch.ops.kvq, op)(query, *parts(ragged()).needed, "int8")
    out = out[1] if op == "attend_lse" else out
    with pytest.raises(RuntimeError, match=f"^kvq::{op}: query must not need a gradient"):
        out.sum().backward()


# ------------------------------------------------------------------------------------------------- reset, truncate


def test_reset():
    cache = ragged()
    before = cache.lengths.data_ptr()
    cache.reset()
    assert cache.lengths.tolist() == [0, 0, 0]
    assert cache.lengths.data_ptr() == before
    assert cache.attend(torch.randn(3, 3, 10)).abs().max() == 0


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [(9, [9, 4, 0]), (4, [4, 4, 0]), (3, [3, 3, 0]), (0, [0, 0, 0]), ([9, 4, 0], [9, 4, 0]), ([2, 0, 0], [2, 0, 0])],
    ids=str,
)
def test_truncate(lengths, kept):
    cache = ragged()
    codes = [part.clone() for part in parts(cache)[:4]]
    cache.truncate(torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths)
    assert cache.lengths.tolist() == kept
    assert_same_bits(parts(cache)[:4], tuple(codes))


def test_truncated_rows_are_as_if_never_appended():
    query, key, value = make("normal", 3, 3, 3, 10, 9)
    cache, never = ragged(lengths=[9, 9, 9]), ragged(lengths=[5, 5, 5])
    cache.truncate(5)
    for x in (cache, never):
        x.append(key[:, :, 0], value[:, :, 0])
    assert_same_bits(in_use(cache), in_use(never))
    assert same_bits(cache.attend(query), never.attend(query))


def test_truncate_to_its_own_lengths():
    cache = ragged()
    cache.truncate(cache.lengths)
    assert cache.lengths.tolist() == RAGGED


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (10, "lie in 0..9, the longest sequence's, got 10"),
        (-1, "lie in 0..9, the longest sequence's, got -1"),
        (torch.tensor([9, 5, 0], dtype=torch.int32), "lie in 0..4 at 1, the sequence's own, got 5"),
        (torch.tensor([-1, 0, 0], dtype=torch.int32), "lie in 0..9 at 0, the sequence's own, got -1"),
        (torch.tensor([1, 1, 0]), "be int32, got int64"),
        (torch.tensor([1, 1], dtype=torch.int32), "have shape [3], got [2]"),
        (torch.tensor(1, dtype=torch.int32), "have shape [3], got []"),
        ([1, 1, 0], "be an int or an int32 tensor of shape [3], got [1, 1, 0]"),
        (True, "be an int or an int32 tensor of shape [3], got True"),
        (1.0, "be an int or an int32 tensor of shape [3], got 1.0"),
    ],
    ids=str,
)
def test_truncate_refuses(lengths, said):
    cache = ragged()
    with pytest.raises(ValueError, match=f"^{re.escape('QuantizedKVCache.truncate: lengths must ' + said)}$"):
        cache.truncate(lengths)
    assert cache.lengths.tolist() == RAGGED


# --------------------------------------------------------------------------------------------------------- reorder


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_moves(count):
    """Every reordering of up to five rows is right and writes each row that changes once, no other."""
    for sources in itertools.product(range(count), repeat=count):
        rows, saved, written = list(range(count)), None, []
        for to, source in _moves(list(sources)):
            row = saved if source == -1 else rows[source]
            if to == -1:
                saved = row
            else:
                rows[to] = row
                written.append(to)
        assert tuple(rows) == sources
        assert sorted(written) == [to for to, source in enumerate(sources) if to != source]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "index", [[0, 1, 2], [1, 2, 0], [1, 0, 2], [0, 0, 0], [2, 2, 1], [1, 1, 0], [2, 0, 1]], ids=str
)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_reorder(name, index, dtype):
    cache, old = (ragged(name, LONG, LONG_TOKENS) for _ in range(2))
    addresses = [part.data_ptr() for part in cache.buffers()]
    cache.reorder(torch.tensor(index, dtype=dtype))
    assert cache.lengths.tolist() == [LONG[b] for b in index]
    block, sinks = get_format(name).key.key_block, get_format(name).sinks
    for b, source in enumerate(index):
        olds = by_rows(parts(old), name)
        for part_name, part in by_rows(parts(cache), name).items():
            before, held = olds[part_name], LONG[source]
            if part_name.endswith("_full"):
                held = part.shape[2] if source != b else 0
            elif block and part_name in ("key_scales", "key_zeros"):
                held = max(0, held - sinks) // block
            assert same_bits(part[b, :, :held], before[source, :, :held])
            assert same_bits(part[b, :, held:], before[b, :, held:])
    assert [part.data_ptr() for part in cache.buffers()] == addresses


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_beams(name):
    """A beam search's appends and reorders give what a cache of each beam's own history gives."""
    torch.manual_seed(0)
    steps, beams = 80 if name in IN_BLOCKS else 12, 4
    cache = QuantizedKVCache(beams, 2, 64, steps, format=name, dtype=torch.float32)
    histories: list[list[Tensor]] = [[] for _ in range(beams)]
    for step in range(steps):
        rows = torch.randn(2, beams, 2, 64)
        cache.append(*rows)
        histories = [[*history, rows[:, b]] for b, history in enumerate(histories)]
        if step % 3:
            index = torch.randint(0, beams, (beams,))
            cache.reorder(index)
            histories = [histories[b] for b in index]
    key, value = torch.stack([torch.stack(history, 2) for history in histories], 1)
    own = QuantizedKVCache(beams, 2, 64, steps, format=name, dtype=torch.float32)
    own.append(key, value)
    assert_same_bits(parts(cache), parts(own))
    query = torch.randn(beams, 4, 64)
    assert same_bits(cache.attend(query), own.attend(query))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (torch.tensor([0, 3, 0]), "lie in 0..2, got 3 at 1"),
        (torch.tensor([-1, 0, 0]), "lie in 0..2, got -1 at 0"),
        (torch.tensor([0, 1]), "have shape [3], got [2]"),
        (torch.tensor([0.0, 1.0, 2.0]), "be int64 or int32, got float32"),
        ([0, 1, 2], "be a tensor of int64 or int32, got list"),
    ],
    ids=str,
)
def test_reorder_refuses(index, said):
    cache = ragged()
    with pytest.raises(ValueError, match=f"^{re.escape('QuantizedKVCache.reorder: index must ' + said)}$"):
        cache.reorder(index)
    assert_same_bits(parts(cache), parts(ragged()))


# ------------------------------------------------------------------------------------------------------ dequantize


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_dequantize(name):
    """What attend attends to: zeros past each length."""
    cache, query = ragged(name, LONG, LONG_TOKENS), torch.randn(3, 6, 10)
    sides = cache.dequantize()
    for side in sides:
        assert (side.dtype, side.shape) == (torch.float32, (3, 3, max(LONG), 10))
        assert all(side[b, :, length:].abs().sum() == 0 for b, length in enumerate(LONG))
    want = attention(query[:, :, None], *sides, LONG)[0][:, :, 0]
    assert relative_error(cache.attend(query), want) <= TOLERANCES[name].attend["fp32"]


@pytest.mark.parametrize("name", ["int8", "int4", "int8/int4"])
def test_dequantize_rows(name):
    cache = ragged(name)
    for got, codes, scales, side in zip(
        cache.dequantize(), parts(cache)[0:4:2], parts(cache)[1:4:2], ("key", "value"), strict=True
    ):
        assert (got.dtype, got.shape) == (torch.float32, (3, 3, 9, 10))
        want = reference.dequantize(codes, scales, getattr(get_format(name), side), 10)
        for b, length in enumerate(RAGGED):
            assert same_bits(got[b, :, :length], want[b, :, :length])
            assert same_bits(got[b, :, length:], torch.zeros(3, 9 - length, 10))


def test_dequantize_nothing():
    key, value = QuantizedKVCache(2, 3, 8, 4).dequantize()
    assert key.shape == value.shape == (2, 3, 0, 8)


# ---------------------------------------------------------------------------------------------------- copies, moves


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_deepcopy(name):
    cache = ragged(name)
    twin = copy.deepcopy(cache)
    assert_same_bits(parts(twin), parts(cache))
    twin.truncate(1)
    twin.append(torch.ones(3, 3, 10), torch.ones(3, 3, 10))
    assert_same_bits(parts(cache), parts(ragged(name)))
    assert twin.format == cache.format


CONVERSIONS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to-dtype": lambda module: module.to(torch.float16),
    "to-device-and-dtype": lambda module: module.to("cpu", torch.bfloat16),
    "to-memory-format": lambda module: module.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_conversions_leave_the_parts(name, conversion):
    cache = ragged(name)
    model = nn.ModuleDict({"projection": nn.Linear(2, 2), "cache": cache})
    before = {part: x.data_ptr() for part, x in cache.named_buffers()}
    CONVERSIONS[conversion](model)
    assert_same_bits(parts(cache), parts(ragged(name)))
    assert {part: x.data_ptr() for part, x in cache.named_buffers()} == before
    assert all(part.is_contiguous() for part in cache.buffers())
    if conversion != "to-memory-format":
        assert model["projection"].weight.dtype != torch.float32


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_to_device_moves(name):
    cache = ragged(name)
    dtypes = [part.dtype for part in cache.buffers()]
    cache.to("meta", torch.float16)
    assert {part.device.type for part in cache.buffers()} == {"meta"}
    assert [part.dtype for part in cache.buffers()] == dtypes
    assert cache.attend(torch.empty(3, 3, 10, device="meta")).shape == (3, 3, 10)
    made_there = QuantizedKVCache(1, 1, 8, 4, device="meta")
    assert {part.device.type for part in made_there.buffers()} == {"meta"}
