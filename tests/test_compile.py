"""torch.compile: one graph, one compile, no copy of the cache, the bits of eager."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from common import Cache, append, assert_same_bits, attend, empty, parts
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from kvq_ops import QuantizedKVCache

# torch's own, on its way to Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

BATCH, HEADS_Q, HEADS_KV, HEAD_DIM = 2, 4, 2, 64


class Decoder(nn.Module):
    """Layers whose projections are products with constants: nothing whose sums a compiler may reorder."""

    def __init__(self, caches: list[QuantizedKVCache]) -> None:
        super().__init__()
        self.caches = nn.ModuleList(caches)
        generator = torch.Generator().manual_seed(0)
        for name in ("query", "key", "value"):
            self.register_buffer(name, torch.randn(len(caches), HEAD_DIM, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, Hq, D] or [B, Hq, T, D]."""
        for layer, cache in enumerate(self.caches):
            rows = x[:, :: HEADS_Q // HEADS_KV]
            cache.append(rows * self.key[layer], rows * self.value[layer])
            x = x + cache.attend(x * self.query[layer])
        return x


def caches(name: str = "int8", max_tokens: int = 64, layers: int = 2) -> list[QuantizedKVCache]:
    sizes = (BATCH, HEADS_KV, HEAD_DIM, max_tokens)
    return [QuantizedKVCache(*sizes, format=name, dtype=torch.float32) for _ in range(layers)]


def inputs(steps: int, tokens: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, HEADS_Q, HEAD_DIM) if tokens is None else (BATCH, HEADS_Q, tokens, HEAD_DIM)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def all_parts(model: Decoder) -> tuple[Tensor, ...]:
    return tuple(part for cache in model.caches for part in parts(cache).tensors())


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, None) for name in ("int8", "int8/int4", "int4_g32", "int8_kivi", "int4_hq")]
    + [(name, True) for name in ("int4", "int4_hq")],
)
def test_one_compile_and_the_bits_of_eager(name, dynamic):
    """Over 1000 steps, after reset and over fresh caches; every output and byte equals eager's, in place."""
    counter = CompileCounterWithBackend("inductor")
    eager, model = (Decoder(caches(name, 1000)) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    addresses = [part.data_ptr() for part in all_parts(model)]
    for x in inputs(1000):
        assert torch.equal(compiled(x), eager(x))
    assert_same_bits(all_parts(model), all_parts(eager))
    assert [part.data_ptr() for part in all_parts(model)] == addresses
    for cache in (*model.caches, *eager.caches):
        cache.reset()
    for x in inputs(3):
        assert torch.equal(compiled(x), eager(x))
    assert_same_bits(all_parts(model), all_parts(eager))
    fresh = caches(name, 1000)
    model.caches = nn.ModuleList(fresh)
    for x in inputs(3):
        compiled(x)
    assert fresh[0].lengths.tolist() == [3, 3]
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
def test_caches_as_arguments(dynamic):
    """One compiled function over any caches of a shape."""
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=counter)
    def step(cache: QuantizedKVCache, key: Tensor, value: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        cache.append(key, value)
        return cache.attend(query, scale=0.2, return_lse=True)

    key, value = torch.randn(2, BATCH, HEADS_KV, HEAD_DIM)
    query = torch.randn(BATCH, HEADS_Q, HEAD_DIM)
    for _ in range(3):
        cache, eager = caches(layers=2)
        for _ in range(3):
            eager.append(key, value)
            assert_same_bits(step(cache, key, value, query), eager.attend(query, scale=0.2, return_lse=True))
        assert_same_bits(parts(cache), parts(eager))
    assert counter.frame_count == 1


def test_prompts_of_any_length():
    """dynamic=True: prompts are one graph whatever their length. (Dynamo takes a module's buffers for static.)"""
    counter = CompileCounterWithBackend("inductor")
    eager, model = (Decoder(caches()) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9, 17):
        (x,) = inputs(1, tokens)
        assert torch.equal(compiled(x), eager(x))
    assert_same_bits(all_parts(model), all_parts(eager))
    assert counter.frame_count == 1


def test_plain_tensors_of_any_shape():
    """dynamic=True: the ops over a cache's tensors are one graph whatever batch, capacity and tokens."""
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(cache: Cache, rows: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        append(cache, rows, -rows, "int8/int4")
        return attend(query, cache, "int8/int4", return_lse=True)

    for batch, heads_kv, tokens, max_tokens in ((2, 3, 5, 40), (3, 4, 9, 50), (7, 2, 17, 60)):
        cache, eager = (empty("int8/int4", batch, heads_kv, HEAD_DIM, max_tokens) for _ in range(2))
        rows = torch.randn(batch, heads_kv, tokens, HEAD_DIM)
        query = torch.randn(batch, 2 * heads_kv, tokens, HEAD_DIM)
        got = step(cache, rows, query)
        append(eager, rows, -rows, "int8/int4")
        assert_same_bits(cache, eager)
        assert_same_bits(got, attend(query, eager, "int8/int4", return_lse=True))
    assert counter.frame_count == 1


def test_reset_inside_a_graph():
    model = Decoder(caches())

    @torch.compile(fullgraph=True)
    def restart(x: Tensor) -> Tensor:
        for cache in model.caches:
            cache.reset()
        return model(x)

    eager = Decoder(caches())
    for x in inputs(3):
        for cache in eager.caches:
            cache.reset()
        assert torch.equal(restart(x), eager(x))
        assert model.caches[0].lengths.tolist() == [1, 1]


def test_inference_mode():
    model, eager = Decoder(caches()), Decoder(caches())
    compiled = torch.compile(model, fullgraph=True)
    with torch.inference_mode():
        for x in inputs(3):
            assert torch.equal(compiled(x), eager(x))
    assert_same_bits(all_parts(model), all_parts(eager))


# ------------------------------------------------------------------------------------------------ copies of the cache


def allocations(code: list[str]) -> list[int]:
    """Elements of each tensor that generated code allocates, whatever allocates it."""
    shapes = re.findall(r"\bempty(?:_strided)?(?:_cpu|_cuda)?\(\(([^()]*)\)", "\n".join(code))
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


def code_of(function, *arguments) -> list[str]:
    code = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)[1]
    assert code
    return code


@pytest.mark.parametrize("name", ["int8", "int4_hq"])
def test_no_allocation_of_the_size_of_a_cache(name):
    model = Decoder(caches(name, 4096, layers=4))
    code = code_of(model, *inputs(1))
    smallest_part = min(
        part.numel() for cache in model.caches for part in parts(cache).named().values() if part.shape[2] > 1000
    )
    sizes = allocations(code)
    assert sizes
    assert max(sizes) <= BATCH * HEADS_Q * HEAD_DIM < smallest_part
    assert not re.search(r"clone|copy_|auto_functionalized", "\n".join(code))


def test_a_copy_of_the_cache_would_be_seen():
    (cache,) = caches(layers=1, max_tokens=4096)

    def step(rows: Tensor) -> Tensor:
        before = cache.key_codes.clone()
        cache.append(rows, rows)
        return before

    assert max(allocations(code_of(step, torch.randn(BATCH, HEADS_KV, HEAD_DIM)))) == cache.key_codes.numel()


def seconds_of_a_step(max_tokens: int) -> float:
    torch._dynamo.reset()
    model = Decoder(caches("int8", max_tokens, layers=1))
    compiled = torch.compile(model, fullgraph=True)
    marks = []
    for x in inputs(60):
        marks.append(time.perf_counter())
        compiled(x)
    return statistics.median(end - start for start, end in pairwise(marks[10:]))


def test_step_time_does_not_grow_with_the_capacity():
    """From 2 MB to 200 MB: a copy of the larger one would take tens of milliseconds."""
    bytes_per_token = caches(layers=1)[0].bytes_per_token * BATCH
    small, large = (seconds_of_a_step(size // bytes_per_token) for size in (2_000_000, 200_000_000))
    assert large < 3 * small + 1e-3


# ----------------------------------------------------------------------------------------------------------- gradients


def test_gradients_are_refused():
    """Compiled for training, attend says at once what backward would."""
    model = Decoder(caches())
    x = inputs(1)[0].requires_grad_()
    with torch.enable_grad(), pytest.raises(Exception, match="kvq::attend: query must not need a gradient, got a back"):
        torch.compile(model, fullgraph=True)(x).sum().backward()
