"""Saving and loading what a QuantizedKVCache holds."""

from __future__ import annotations

import math
import re

import pytest
import torch
from common import (
    FORMAT_NAMES,
    LONG,
    LONG_TOKENS,
    assert_same_bits,
    in_use,
    parts,
    ragged,
    run_python,
    same_bits,
)
from torch import Tensor

from kvq_ops import QuantizedKVCache, get_format


def saved(cache: QuantizedKVCache, path):
    torch.save(cache.save_state(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("max_tokens", [197, 200, 500], ids="n{}".format)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_state(name, max_tokens, tmp_path):
    """Through a file, bit for bit, into a cache of another capacity too, in place."""
    cache = ragged(name, LONG, LONG_TOKENS)
    state = saved(cache, tmp_path / "state.pt")
    other = QuantizedKVCache(3, 3, 10, max_tokens, format=name, dtype=torch.float32)
    other.append(torch.ones(3, 3, 2, 10), torch.ones(3, 3, 2, 10))
    addresses = [part.data_ptr() for part in other.buffers()]
    other.load_state(state)
    assert_same_bits(in_use(other), in_use(cache))
    assert [part.data_ptr() for part in other.buffers()] == addresses
    query = torch.randn(3, 6, 10)
    assert same_bits(other.attend(query), cache.attend(query))
    rows = torch.randn(2, 3, 3, 2, 10)
    for each in (cache, other):
        each.truncate(190)
        each.append(*rows)
    assert_same_bits(in_use(other), in_use(cache))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_state_holds_the_tokens_in_use_alone(name):
    state = ragged(name, LONG, 5000).save_state()
    tensors = [x for x in state.values() if isinstance(x, Tensor)]
    format = get_format(name)
    block, nbytes = format.key.key_block, 4 * 3
    for part in format.parts(1, 3, 10, 5000, "float32").values():
        rows = {
            "token": sum(LONG),
            "slot": 3 * part.shape[part.axis],
            "block": sum(max(0, length - format.sinks) // block for length in LONG) if block else 0,
        }
        nbytes += part.nbytes // part.shape[part.axis] * rows[part.rows]
    assert sum(x.untyped_storage().nbytes() for x in tensors) == nbytes
    assert all(isinstance(x, (Tensor, int, str)) for x in state.values())


def test_state_is_a_copy():
    cache = ragged()
    state = cache.save_state()
    cache.reset()
    cache.append(torch.ones(3, 3, 2, 10), torch.ones(3, 3, 2, 10))
    cache.load_state(state)
    assert_same_bits(in_use(cache), in_use(ragged()))


def test_state_of_an_empty_cache(tmp_path):
    cache = ragged()
    cache.load_state(saved(QuantizedKVCache(3, 3, 10, 4), tmp_path / "state.pt"))
    assert cache.lengths.tolist() == [0, 0, 0]


WRITE_STATE = """
import sys, torch
from common import ragged
torch.save(ragged(sys.argv[1]).save_state(), sys.argv[2])
"""
READ_STATE = """
import sys, torch
from kvq_ops import QuantizedKVCache
from common import parts
cache = QuantizedKVCache(3, 3, 10, 20, format=sys.argv[1])
cache.load_state(torch.load(sys.argv[2], weights_only=True))
torch.save([cache.attend(torch.ones(3, 3, 10)), *cache.dequantize()], sys.argv[3])
"""


def test_state_from_process_to_process(tmp_path):
    state, result = str(tmp_path / "state.pt"), str(tmp_path / "result.pt")
    for source, arguments in ((WRITE_STATE, [state]), (READ_STATE, [state, result])):
        run = run_python(source, "int8/int4", *arguments)
        assert run.returncode == 0, run.stderr
    cache = ragged("int8/int4")
    want = (cache.attend(torch.ones(3, 3, 10)), *cache.dequantize())
    assert_same_bits(tuple(torch.load(result, weights_only=True)), want)


STATE_NAMES = "batch, format, head_dim, heads_kv, key_codes, key_scales, lengths, value_codes, value_scales, version"
STATE_REFUSALS = {
    "format": (lambda _: ragged("int4").save_state(), "format must be int8, got int4"),
    "batch": (lambda _: QuantizedKVCache(2, 3, 10, 12).save_state(), "batch must be 3, got 2"),
    "heads": (lambda _: QuantizedKVCache(3, 2, 10, 12).save_state(), "heads_kv must be 3, got 2"),
    "head_dim": (lambda _: QuantizedKVCache(3, 3, 12, 12).save_state(), "head_dim must be 10, got 12"),
    "version": (lambda state: state | {"version": 2}, "version must be 1, got 2"),
    "length": (
        lambda state: state | {"lengths": torch.tensor([13, 0, 0], dtype=torch.int32)},
        "lengths must lie in 0..12, the capacity, got 13 at 0",
    ),
    "negative-length": (
        lambda state: state | {"lengths": torch.tensor([14, -1, 0], dtype=torch.int32)},
        "lengths must lie in 0..12, the capacity, got 14 at 0",
    ),
    "lengths-dtype": (lambda state: state | {"lengths": torch.tensor([9, 4, 0])}, "lengths must be int32, got int64"),
    "lengths-shape": (
        lambda state: state | {"lengths": torch.zeros(2, dtype=torch.int32)},
        "lengths must have shape [3], got [2]",
    ),
    "other-lengths": (
        lambda state: state | {"lengths": torch.tensor([9, 3, 0], dtype=torch.int32)},
        "key_codes must have shape [3, 12, 10], got [3, 13, 10]",
    ),
    "codes-dtype": (
        lambda state: state | {"value_codes": state["value_codes"].byte()},
        "value_codes must be int8, got uint8",
    ),
    "no-tensor": (lambda state: state | {"value_scales": 1.0}, "value_scales must be a tensor, got float"),
    "entry-too-many": (
        lambda state: state | {"zeros": 1},
        f"state must have the entries {STATE_NAMES}, got {STATE_NAMES}, zeros",
    ),
    "nothing": (lambda _: {}, "version must be 1, got nothing"),
    "no-state": (lambda _: [1], "state must be a dict, got a list"),
}


@pytest.mark.parametrize("case", STATE_REFUSALS)
def test_load_state_refuses(case):
    """With nothing written."""
    make_state, said = STATE_REFUSALS[case]
    cache = ragged()
    state = make_state(cache.save_state())
    with pytest.raises(ValueError, match=f"^{re.escape('QuantizedKVCache.load_state: ' + said)}$"):
        cache.load_state(state)
    assert_same_bits(parts(cache), parts(ragged()))


def test_nan_rows_survive_a_state():
    cache = QuantizedKVCache(1, 1, 8, 4)
    cache.append(torch.full((1, 1, 8), math.nan), torch.ones(1, 1, 8))
    other = QuantizedKVCache(1, 1, 8, 4)
    other.load_state(cache.save_state())
    assert_same_bits(parts(other), parts(cache))
