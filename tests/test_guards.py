"""What torch.compile must not do to a cache: copy it, compile again, change the order of writes and reads."""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from common import assert_same_bits, run_python
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import kvq_ops
from kvq_ops import QuantizedKVCache, checks, get_format

# torch's own, on its way to Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

BATCH, HEADS_Q, HEADS_KV, HEAD_DIM, MAX_TOKENS = 2, 4, 2, 64, 4096
CACHE = BATCH * HEADS_KV * MAX_TOKENS * HEAD_DIM // 2
"""Bytes of the codes of one side in 4 bits: no allocation comes near it."""
FORMATS = ["int8", "int4_hq", "int8_kivi"]

Parts = dict[str, Tensor]


@dataclass
class Cache:
    """A cache as a dataclass, as other people keep theirs."""

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    lengths: Tensor
    key_zeros: Tensor | None = None
    value_zeros: Tensor | None = None
    key_full: Tensor | None = None
    value_full: Tensor | None = None


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        yield
    torch._dynamo.reset()


def fresh_parts(name: str) -> Parts:
    found = get_format(name).parts(BATCH, HEADS_KV, HEAD_DIM, MAX_TOKENS, "float32")
    made = {part_name: torch.zeros(part.shape, dtype=getattr(torch, part.dtype)) for part_name, part in found.items()}
    return made | {"lengths": torch.zeros(BATCH, dtype=torch.int32)}


def layer(x: Tensor, parts: Parts, name: str) -> Tensor:
    rows = x[:, ::2, None]
    kvq_ops.append(**parts, key=rows, value=rows * 2, format=name)
    return x + kvq_ops.attend(x, **parts, format=name)


def x() -> Tensor:
    return torch.randn(BATCH, HEADS_Q, HEAD_DIM, generator=torch.Generator().manual_seed(0))


def code_of(function: Callable[..., Tensor], *arguments: object) -> str:
    code = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)[1]
    assert "kvq.append" in "".join(code)
    return "\n".join(code)


def largest_allocation(code: str) -> int:
    """Elements of the largest tensor that generated code allocates."""
    shapes = re.findall(r"\bempty(?:_strided)?(?:_cpu|_cuda)?\(\(([^()]*)\)", code)
    return max((math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes), default=0)


# --------------------------------------------------------------------------------------------- how a model holds caches


class Buffers(nn.Module):
    """Layers whose parts are buffers of plain modules."""

    def __init__(self, name: str, layers: int) -> None:
        super().__init__()
        self.name = name
        self.caches = nn.ModuleList(nn.Module() for _ in range(layers))
        for cache in self.caches:
            for part_name, part in fresh_parts(name).items():
                cache.register_buffer(part_name, part)

    def forward(self, x: Tensor) -> Tensor:
        for cache in self.caches:
            x = layer(x, dict(cache.named_buffers()), self.name)
        return x


def through_buffers(name: str) -> tuple[Callable[..., Tensor], list[object]]:
    return Buffers(name, 3), []


def through_modules(name: str) -> tuple[Callable[..., Tensor], list[object]]:
    sizes = (BATCH, HEADS_KV, HEAD_DIM, MAX_TOKENS)
    caches = [QuantizedKVCache(*sizes, format=name, dtype=torch.float32) for _ in range(3)]

    def step(x: Tensor, caches: list[QuantizedKVCache]) -> Tensor:
        for cache in caches:
            cache.append(x[:, ::2], x[:, ::2] * 2)
            x = x + cache.attend(x)
        return x

    return step, [caches]


def through_arguments(name: str) -> tuple[Callable[..., Tensor], list[object]]:
    def step(x: Tensor, caches: list[Parts]) -> Tensor:
        for parts in caches:
            x = layer(x, parts, name)
        return x

    return step, [[fresh_parts(name) for _ in range(3)]]


def through_dataclasses(name: str) -> tuple[Callable[..., Tensor], list[object]]:
    def step(x: Tensor, caches: list[Cache]) -> Tensor:
        for cache in caches:
            x = layer(x, {part: value for part, value in vars(cache).items() if value is not None}, name)
        return x

    return step, [[Cache(**fresh_parts(name)) for _ in range(3)]]


HOLDERS = [through_buffers, through_modules, through_arguments, through_dataclasses]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__.removeprefix("through_"))
def test_no_allocation_of_the_size_of_a_cache(holder, name: str) -> None:
    """Whatever holds the parts. A cache of any size then costs a step the same."""
    function, caches = holder(name)
    code = code_of(function, x(), *caches)
    assert largest_allocation(code) <= BATCH * HEADS_Q * HEAD_DIM < CACHE
    assert not re.search(r"clone|copy_|auto_functionalized", code)


def test_arguments_compile_once() -> None:
    """Over 20 steps and three sets of fresh caches."""
    counter = CompileCounterWithBackend("inductor")
    step, _ = through_arguments("int4_hq")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(3):
        (caches,), (eager,) = (through_arguments("int4_hq")[1] for _ in range(2))
        for _ in range(20):
            assert torch.equal(compiled(x(), caches), step(x(), eager))
    assert counter.frame_count == 1


# ----------------------------------------------------------------------------------------------------- order and copies


def test_appends_between_attends_of_other_caches_keep_their_order() -> None:
    """Each attend sees what was appended before it and nothing that comes after."""

    def step(a: Parts, b: Parts, rows: Tensor, query: Tensor) -> list[Tensor]:
        seen = []
        for turn in range(3):
            kvq_ops.append(**a, key=rows + turn, value=rows * turn, format="int8")
            seen.append(kvq_ops.attend(query, **b, format="int8"))
            kvq_ops.append(**b, key=rows - turn, value=rows + turn, format="int8")
            seen.append(kvq_ops.attend(query, **a, format="int8"))
        return seen

    rows, query = torch.randn(BATCH, HEADS_KV, 1, HEAD_DIM), torch.randn(BATCH, HEADS_Q, HEAD_DIM)
    eager, compiled = ([fresh_parts("int8") for _ in range(2)] for _ in range(2))
    fast = torch.compile(step, fullgraph=True)
    for _ in range(3):
        assert_same_bits(fast(*compiled, rows, query), step(*eager, rows, query))
    for got, want in zip(compiled, eager, strict=True):
        assert_same_bits(list(got.values()), list(want.values()))


def test_deepcopy_of_a_compiled_module() -> None:
    """The copy has caches of its own and the same steps."""
    compiled = torch.compile(Buffers("int4_hq", 2), fullgraph=True)
    first = compiled(x())
    twin = copy.deepcopy(compiled)
    torch._dynamo.reset()
    assert torch.equal(twin(x()), compiled(x()))
    twin(x())
    lengths = [[cache.lengths.tolist() for cache in module.caches] for module in (compiled, twin)]
    assert lengths == [[[2, 2]] * 2, [[3, 3]] * 2]
    assert not torch.equal(first, compiled(x()))


# -------------------------------------------------------------------------------------------- layouts that torch copies


# Rows that do not depend on what was read before leave torch free to move reads past writes, which costs it copies.
# In a model they do depend, all but those of views that come with rows from elsewhere.


def independent(x: Tensor, caches: list[Parts], rows: Tensor) -> Tensor:
    for parts in caches:
        kvq_ops.append(**parts, key=rows, value=rows, format="int8")
        x = x + kvq_ops.attend(x, **parts, format="int8")
    return x


def sliced_inside(x: Tensor, stacked: Parts, rows: Tensor) -> Tensor:
    return independent(x, [{name: part[index] for name, part in stacked.items()} for index in range(2)], rows)


def written_again(x: Tensor, parts: Parts, rows: Tensor) -> Tensor:
    return independent(x, [parts, parts], rows)


def stacked() -> Parts:
    return {name: torch.stack([part, part]) for name, part in fresh_parts("int8").items()}


def interleaved() -> list[Parts]:
    """Layers as the second dimension: no element is shared, but the memory of one lies between that of the other."""
    codes = torch.zeros(BATCH, 2, HEADS_KV, MAX_TOKENS, HEAD_DIM, dtype=torch.int8)
    return [fresh_parts("int8") | {"key_codes": codes[:, index]} for index in range(2)]


def copying(which: str) -> tuple[Callable[..., Tensor], list[object]]:
    rows = torch.randn(BATCH, HEADS_KV, 1, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    if which == "sliced inside":
        return sliced_inside, [stacked(), rows]
    if which == "interleaved":
        return independent, [interleaved(), rows]
    return written_again, [fresh_parts("int8"), rows]


@pytest.mark.parametrize("which", ["sliced inside", "interleaved", "written again"])
def test_torch_copies_these(which: str) -> None:
    """What docs/deploy.md advises against; where torch learns to do without, this fails and the advice can go. The
    results are right all the same."""
    function, arguments = copying(which)
    assert largest_allocation(code_of(function, x(), *arguments)) >= CACHE
    torch._dynamo.reset()
    (_, compiled), (_, eager) = copying(which), copying(which)
    fast = torch.compile(function, fullgraph=True)
    for _ in range(2):
        assert torch.equal(fast(x(), *compiled), function(x(), *eager))


@pytest.mark.parametrize("which", ["sliced inside", "interleaved"])
def test_debug_finds_views(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    function, arguments = copying(which)
    with pytest.warns(UserWarning, match=r"^kvq::append: views of a larger storage: key_codes \(1048576 of 20971"):
        torch.compile(function, fullgraph=True, backend="eager")(x(), *arguments)


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__.removeprefix("through_"))
def test_debug_is_silent_where_all_is_well(holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    function, caches = holder("int4_hq")
    for dynamic in (False, True):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")(x(), *caches)


def test_debug_is_off_unless_asked_for() -> None:
    assert (os.environ.get("KVQ_DEBUG") == "1") == checks.DEBUG
    assert run_python("from kvq_ops import checks; print(checks.DEBUG)", KVQ_DEBUG="1").stdout == "True\n"
