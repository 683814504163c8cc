"""What quantize_kv_storage leaves as it is, and the words that say why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rewrite_models import (
    MAX_TOKENS,
    TINY,
    Cache,
    Clock,
    Counter,
    IndexCopy,
    IndexPut,
    SliceAssign,
    export,
    model,
    steps,
)
from torch import Tensor, nn
from torch.export import ExportedProgram

from kvq_ops import quantize_kv_storage

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")  # torch's own
BATCH, HEADS_Q, HEADS_KV, HEAD_DIM = 2, 6, 2, 16


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """One attention over a cache, without the model around it: query, key and value come in."""

    def __init__(self, make_cache: Callable[..., nn.Module] = Cache) -> None:
        super().__init__()
        self.clock = Clock()
        self.cache = make_cache(self.clock, BATCH, HEADS_KV, HEAD_DIM)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, *others: Tensor) -> Tensor:
        self.clock.position, self.clock.others = position, others
        self.cache.append(key, value)
        return self.cache.attend(query)


def exported(layer: nn.Module, *others: Tensor, tokens: int = 1) -> ExportedProgram:
    query = torch.randn(BATCH, HEADS_Q, tokens, HEAD_DIM)
    key, value = torch.randn(2, BATCH, HEADS_KV, tokens, HEAD_DIM)
    return torch.export.export(layer, (query, key, value, torch.arange(tokens), *others))


class SlidingWindow(Cache):
    def mask(self) -> Tensor:
        rows = torch.arange(MAX_TOKENS)
        return ((rows <= self.clock.position) & (rows > self.clock.position - 8))[None]


class OffByOne(Cache):
    def mask(self) -> Tensor:
        return torch.arange(MAX_TOKENS)[None] < self.clock.position


class Wrong(Cache):
    """Right but for the last position: nothing but trying it tells."""

    def mask(self) -> Tensor:
        return torch.arange(MAX_TOKENS)[None] <= self.clock.position.clamp(max=MAX_TOKENS - 2)


class Slopes(Cache):
    def mask(self) -> Tensor:
        rows = torch.arange(MAX_TOKENS)
        return torch.where(rows <= self.clock.position, 0.1 * (rows - self.clock.position), -torch.inf)[None]


class Faint(Cache):
    def mask(self) -> Tensor:
        return torch.where(torch.arange(MAX_TOKENS) <= self.clock.position, 0.0, -9.0)[None]


class NoMask(Cache):
    def mask(self) -> None:
        return None


class MaskFromInput(Cache):
    def mask(self) -> Tensor:
        return super().mask() & self.clock.others[0]


class OtherPosition(Cache):
    def mask(self) -> Tensor:
        return torch.arange(MAX_TOKENS) <= self.clock.others[0][:, None]


class MaskFromCache(Cache):
    def mask(self) -> Tensor:
        return (self.key[:1, :1, :, 0] != 0)[:, :, None] & super().mask()


class RandomMask(Cache):
    def mask(self) -> Tensor:
        return super().mask() & (torch.rand(MAX_TOKENS) > 0)


class Ring(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.index_copy_(2, self.clock.position % MAX_TOKENS, rows)


class Clamped(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.index_copy_(2, self.clock.position.clamp(max=MAX_TOKENS - 1), rows)


class Backwards(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.index_copy_(2, MAX_TOKENS - 1 - self.clock.position, rows)


class AlwaysFirst(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer[:, :, 0:1] = rows


class Apart(Cache):
    """Keys and values at positions of their own."""

    def append(self, key: Tensor, value: Tensor) -> None:
        self.key.index_copy_(2, self.clock.position, key)
        self.value.index_copy_(2, self.clock.others[0], value)


class MovesInBetween(Counter):
    def append(self, key: Tensor, value: Tensor) -> None:
        at = self.lengths[:1]
        self.key.index_copy_(2, at, key)
        self.lengths.add_(1)
        self.value.index_copy_(2, at, value)


class Where(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        here = (torch.arange(MAX_TOKENS) == self.clock.position)[:, None]
        buffer.copy_(torch.where(here, rows, buffer))


class Twice(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        super().write(buffer, rows)
        super().write(buffer, -rows)


class Adds(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        torch.ops.aten.index_put_(buffer, [None, None, self.clock.position], rows, True)


class Overwrites(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.copy_(rows.expand(-1, -1, MAX_TOKENS, -1))


class WritesOtherAxis(Cache):
    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.index_copy_(1, self.clock.position, rows[:, :1].expand(-1, -1, MAX_TOKENS, -1))


class ReadsBefore(Cache):
    def append(self, key: Tensor, value: Tensor) -> None:
        self.old = self.key.repeat_interleave(3, 1), self.value.repeat_interleave(3, 1)
        super().append(key, value)

    def attend(self, query: Tensor) -> Tensor:
        key, value = self.old
        del self.old
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask())


class AnotherReader(Cache):
    def attend(self, query: Tensor) -> Tensor:
        return super().attend(query) + self.key.mean()


class Half(Cache):
    """Attends the second half of its rows alone."""

    def attend(self, query: Tensor) -> Tensor:
        key, value = self.key[:, :, MAX_TOKENS // 2 :], self.value[:, :, MAX_TOKENS // 2 :]
        mask = self.mask()[:, MAX_TOKENS // 2 :]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class OneBuffer(Cache):
    def attend(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, self.key, self.key, attn_mask=self.mask(), enable_gqa=True)


class Interleaved(Cache):
    """Heads repeated as a whole: query head h reads KV head h % heads_kv."""

    def attend(self, query: Tensor) -> Tensor:
        key, value = (buffer.repeat(1, 3, 1, 1) for buffer in (self.key, self.value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask())


class Rotated(Cache):
    """Keys turned as they are read."""

    def attend(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, -self.key, self.value, attn_mask=self.mask(), enable_gqa=True)


class Causal(NoMask):
    def attend(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, self.key, self.value, is_causal=True, enable_gqa=True)


class Dropout(Cache):
    def attend(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, self.key, self.value, self.mask(), 0.1, enable_gqa=True)


class InSubgraph(Cache):
    def attend(self, query: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().attend(query)


class Stacked(Cache):
    """One buffer for all, keys at 0 and values at 1."""

    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.register_buffer("both", torch.stack([self.key, self.value]))

    def append(self, key: Tensor, value: Tensor) -> None:
        self.write(self.both[0], key)
        self.write(self.both[1], value)

    def attend(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, self.both[0], self.both[1], attn_mask=self.mask(), enable_gqa=True)


class OneStorage(Cache):
    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.key, self.value = torch.stack([self.key, self.value])


class Double(Cache):
    dtype = torch.float64

    def append(self, key: Tensor, value: Tensor) -> None:
        super().append(key.double(), value.double())

    def attend(self, query: Tensor) -> Tensor:
        return super().attend(query.double())


class UnlikeCounter(Counter):
    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.lengths[1] = 5


class DriftingCounter(Counter):
    def attend(self, query: Tensor) -> Tensor:
        out = super().attend(query)
        self.lengths.add_(torch.arange(2, dtype=torch.int32))
        return out


POSITION = (torch.zeros(1, dtype=torch.int64),)
REFUSED = [
    (SlidingWindow, (), "its mask is not causal: it is wrong at position 8"),
    (OffByOne, (), "its mask is not causal: it is wrong at position 0"),
    (Wrong, (), "its mask is not causal: it is wrong at position 39"),
    (Slopes, (), "its mask is not causal: it is wrong at position 1"),
    (Faint, (), "its mask is not causal: it is wrong at position 0"),
    (NoMask, (), "it has no mask: it sees all 40 rows, written or not"),
    (MaskFromInput, (torch.ones(MAX_TOKENS, dtype=torch.bool),), "its mask depends on others_0, not on the position"),
    (OtherPosition, POSITION, "its mask depends on others_0, not on the position position alone"),
    (MaskFromCache, (), "reads the cache cache.key too"),
    (RandomMask, (), "its row or mask depends on the random aten.rand.default"),
    (Ring, (), "it writes position 40 into row 0: a ring, which a quantized cache is not"),
    (Clamped, (), "it writes position 40 into row 39: a ring, which a quantized cache is not"),
    (Backwards, (), "the row that it writes at position 0 is 39"),
    (AlwaysFirst, (), "row does not follow a position: the row that it writes at position 1 is 0"),
    (Apart, POSITION, "the row that it writes depends on position, others_0, not on one position"),
    (MovesInBetween, (), "changes the step's rows or position between the writes of key and value"),
    (Where, (), "reads the cache cache.key too"),
    (Twice, (), "the cache cache.key is written 2 times in a step, not once"),
    (Adds, (), "writes by several indices, by a mask or by adding, not one row"),
    (Overwrites, (), "does not write one token's rows by their position"),
    (WritesOtherAxis, (), "writes along another axis of cache.key than the tokens"),
    (ReadsBefore, (), "it reads the cache cache.key before the step's token is written"),
    (AnotherReader, (), "mean reads the cache cache.key too"),
    (Half, (), "reads a part of the cache that is not its first tokens"),
    (OneBuffer, (), "key and value are read from one buffer, cache.key"),
    (Interleaved, (), "is not [batch, heads, tokens, head_dim] of cache.key with each head repeated in place"),
    (Rotated, (), "it reads what aten.neg.default gives (neg), not a cache buffer of its own"),
    (Causal, (), "is_causal=True lets a query of one token see the first row alone"),
    (Dropout, (), "it drops out with probability 0.1"),
    (InSubgraph, (), "it stands in a subgraph"),
    (Stacked, (), "it reads a part of a larger buffer"),
    (OneStorage, (), "the cache cache.key shares its memory with cache.value"),
    (Double, (), "a quantized cache cannot take its place: dtype must be float32, bfloat16 or float16, got float64"),
    (UnlikeCounter, (), "its position cache.lengths has 2 numbers, which may differ"),
    (DriftingCounter, (), "the numbers of its position come to differ"),
]


@pytest.mark.parametrize(("cache", "others", "reason"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_refused(cache, others, reason):
    program = exported(Layer(cache), *others)
    same, report = quantize_kv_storage(program, allow_none=True)
    (attention,) = report.attentions
    assert reason in attention.reason
    assert not attention.rewritten
    assert f"skipped: {attention.reason}" in str(report)
    assert "kvq" not in str(same.graph)
    assert same.state_dict.keys() == program.state_dict.keys()
    assert attention.bytes_before == attention.bytes_after
    with pytest.raises(ValueError, match=re.escape(reason)):
        quantize_kv_storage(program)


@pytest.mark.parametrize("cache", [Ring, SlidingWindow, AnotherReader, Stacked, OneBuffer, ReadsBefore])
def test_refused_in_a_functional_program(cache):
    program = exported(Layer(cache)).run_decompositions({})
    _, report = quantize_kv_storage(program, allow_none=True)
    assert [attention.rewritten for attention in report.attentions] == [False]


def test_what_is_refused_here_is_rewritten_without_the_flaw():
    assert len(quantize_kv_storage(exported(Layer()), strict=True)[1].rewritten) == 1


def test_a_query_of_two_tokens():
    with pytest.raises(ValueError, match="its query has 2 tokens, not 1"):
        quantize_kv_storage(exported(Layer(), tokens=2))


def test_a_cache_that_is_an_input():
    class Inputs(nn.Module):
        def forward(self, query: Tensor, key: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, key)
            mask = torch.arange(MAX_TOKENS) <= position[:, None]
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    rows, caches = torch.randn(1, 2, 1, 16), torch.zeros(2, 1, 2, MAX_TOKENS, 16)
    program = torch.export.export(Inputs(), (rows, rows, torch.tensor([0]), *caches))
    with pytest.raises(ValueError, match="its key cache is the input keys, not a buffer"):
        quantize_kv_storage(program)


def test_a_cache_that_two_layers_share():
    llama = model(Cache)
    first, second = (layer.self_attn.cache for layer in llama.layers)
    second.append = lambda *_: None
    second.attend = first.attend
    _, report = quantize_kv_storage(export(llama), allow_none=True)
    assert len(report.attentions) == 2
    assert all("reads the cache layers.0.self_attn.cache.key too" in skipped.reason for skipped in report.skipped)


def test_head_dim():
    llama = model(Cache, config=dataclasses.replace(TINY, head_dim=6))
    reason = "a quantized cache cannot take its place: head_dim must be even and from 8 to 1024, got 6"
    with pytest.raises(ValueError, match=reason):
        quantize_kv_storage(export(llama))


def test_one_layer_of_two():
    """What can be rewritten is; the other keeps its cache, and the program runs."""
    llama = model(IndexPut)
    llama.layers[1].self_attn.cache = SlidingWindow(llama.clock, BATCH, HEADS_KV, HEAD_DIM)
    program = export(llama)
    rewritten, report = quantize_kv_storage(program)
    assert [attention.rewritten for attention in report.attentions] == [True, False]
    assert (report.attentions[1].bytes_before, report.attentions[1].bytes_after) == (20480, 20480)
    module, plain = rewritten.module(), program.module()
    assert "layers.1.self_attn.cache.key" in rewritten.state_dict
    for step in steps():
        got, expected = module(*step), plain(*step)
        assert 0 < (got - expected).norm() / expected.norm() < 2e-2
    with pytest.raises(
        ValueError, match=r"^quantize_kv_storage: exported_program must be rewritten whole under strict=T"
    ):
        quantize_kv_storage(program, strict=True)


def test_a_decomposed_program():
    with pytest.raises(ValueError, match=r"got no scaled_dot_product_attention \(is the program decomposed\?\)$"):
        quantize_kv_storage(export(model(IndexCopy)).run_decompositions())


def test_arguments():
    with pytest.raises(
        ValueError, match=r"^quantize_kv_storage: exported_program must be a .*ExportedProgram, got Block$"
    ):
        quantize_kv_storage(model(SliceAssign).layers[0])
    with pytest.raises(ValueError, match=r"^quantize_kv_storage: format must be one of .* got 'int3'$"):
        quantize_kv_storage(exported(Layer()), "int3")
