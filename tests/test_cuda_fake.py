"""CUDA tensors without a GPU: fake ones through export and compile. The graphs hold the ops, or, where Inductor would
generate code, their Triton launches; caches are written in place; CUDA graphs may be captured by torch's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import CODINGS, run_python
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.cudagraph_utils import check_for_mutation_ignore_cuda_graph_managed_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kvq_ops
from kvq_ops import QuantizedKVCache

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: CUDA tensors are refused"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: make gpu-check tests what is compiled for it"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


class Step(nn.Module):
    """Two layers over caches that are its own or are given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.caches = nn.ModuleList(make_cache(name) for _ in range(2))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        for cache in self.caches:
            cache.append(key, key)
            query = query + cache.attend(query)
        return query


def make_cache(name: str, max_tokens: int = 4096) -> QuantizedKVCache:
    return QuantizedKVCache(2, 2, 64, max_tokens, format=name, device="cuda")


def rows() -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(2, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))


@pytest.fixture(autouse=True)
def fake(monkeypatch) -> Iterator[None]:
    """A Triton driver that answers for an H200, since torch asks it which arguments a kernel writes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch._dynamo.reset()
    target = GPUTarget("cuda", 90, 32)
    stand_in = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    monkeypatch.setattr(driver, "_active", stand_in)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns that its default will change
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield
    torch._dynamo.reset()


def traced(function: Any, *arguments: Any) -> tuple[torch.fx.GraphModule, Any]:
    """The graph that Inductor would be given for inference, and what torch knows of its inputs. Inductor keeps writes
    of inputs in the graph, as copies at its end; they are added here, since tracing them asks for a GPU."""
    found: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append((graph, torch._guards.TracingContext.get().fw_metadata))
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    try:
        torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    except RuntimeError as error:  # once traced, running it fails
        if not found:
            raise AssertionError("nothing was compiled") from error
    assert len(found) == 1
    graph, facts = found[0]
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        for i, new in zip(facts.mutated_inp_runtime_indices, output.args[0], strict=False):
            graph.graph.call_function(torch.ops.aten.copy_.default, (inputs[i], new))
    return graph, facts


def targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", CODINGS)
def test_export_keeps_the_ops(name):
    """And names the buffers that they write."""
    step = Step(name)
    program = torch.export.export(step, rows())
    calls = [target for target in targets(program.graph) if "kvq" in target]
    assert calls == ["kvq.append.default", "kvq.attend.default"] * 2
    assert "aten.clone.default" not in targets(program.graph)
    decomposed = program.run_decompositions()
    written = set(decomposed.graph_signature.buffers_to_mutate.values())
    assert written == {f"caches.{i}.{part}" for i in range(2) for part in ("lengths", *step.caches[0]._parts)}


@pytest.mark.parametrize("name", CODINGS)
def test_compile_launches_triton_in_place(name):
    """No op of ours is left, nothing is cloned, and every write is to an input that CUDA graphs may hold."""
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

    step = Step(name)
    graph, facts = traced(step, *rows())
    assert not any("kvq" in target for target in targets(graph.graph))
    reinplace_inplaceable_ops_core(graph.graph)
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(launches) == 2 * (len(launches) // 2)
    assert 4 <= len(launches) <= 8
    assert [node.kwargs["tensors_to_clone"] for node in launches] == [[]] * len(launches)
    held = {i for cache in step.caches for i in range(len(cache._parts) + 1)}
    assert len(facts.mutated_inp_runtime_indices) == 2 * len(held)
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    mutated = list(facts.mutated_inp_runtime_indices)
    refusal = check_for_mutation_ignore_cuda_graph_managed_tensor(
        graph, [names[i] for i in mutated], mutated, facts.static_input_indices
    )
    assert refusal is None


def plain_step(query: Tensor, key: Tensor, *cache: Tensor) -> Tensor:
    kvq_ops.append(*cache, key.unsqueeze(2), key.unsqueeze(2), "int8")
    return kvq_ops.attend(query, *cache, "int8")


@pytest.mark.parametrize("marked", [True, False])
def test_plain_tensors(marked):
    """Parts of a QuantizedKVCache as arguments are static, since it marked them; others keep CUDA graphs away."""
    cache = make_cache("int8")
    parts = [cache.key_codes, cache.key_scales, cache.value_codes, cache.value_scales, cache.lengths]
    graph, facts = traced(plain_step, *rows(), *(parts if marked else [part.clone() for part in parts]))
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    mutated = list(facts.mutated_inp_runtime_indices)
    assert len(mutated) == 5
    refusal = check_for_mutation_ignore_cuda_graph_managed_tensor(
        graph, [names[i] for i in mutated], mutated, facts.static_input_indices
    )
    assert (refusal is None) == marked


def test_short_contexts_take_one_launch():
    query, _ = rows()
    for max_tokens, launches in ((128, 1), (65536, 2)):
        cache = make_cache("int8", max_tokens)
        graph, _ = traced(lambda query, cache=cache: cache.attend(query), query)
        found = [target for target in targets(graph.graph) if "triton_kernel_wrapper" in target]
        assert len(found) == launches
        torch._dynamo.reset()


def test_compile_caches_hash_the_kernels():
    from torch._library.triton import get_triton_kernels_for_op

    make_cache("int8").attend(rows()[0])
    for op, names in (("append", ["append_kernel", "finish_kernel"]), ("attend", ["attend_kernel", "combine_kernel"])):
        assert [kernel.__name__ for kernel in get_triton_kernels_for_op(f"kvq::{op}")] == names


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "triton" else find(name, *more)
import torch
from kvq_ops import QuantizedKVCache
cache = QuantizedKVCache(1, 1, 8, 4)
cache.append(*torch.ones(2, 1, 1, 8))
assert cache.attend(torch.ones(1, 1, 8)).isfinite().all() and not cache.overflowed()
from kvq_ops import cuda
try:
    cuda.attend(torch.ones(1, 1, 8), *(getattr(cache, name) for name in sys.argv[1:]), "int8")
except RuntimeError as error:
    print(error)
"""


def test_without_triton():
    """The CPU path does not miss it; a CUDA call says so."""
    result = run_python(WITHOUT_TRITON, "key_codes", "key_scales", "value_codes", "value_scales", "lengths")
    assert result.stderr == ""
    assert result.stdout == "kvq::attend: query must be on the CPU unless the package triton is installed, got cpu\n"


def test_importing_kvq_ops_does_not_import_triton():
    source = "import sys, kvq_ops, torch; kvq_ops.QuantizedKVCache(1, 1, 8, 4); print('triton' in sys.modules)"
    assert run_python(source).stdout == "False\n"


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    kvq_ops.cuda._problem.cache_clear()
    said = "be on a GPU of compute capability 8.0 or newer, not 7.5"
    assert kvq_ops.cuda._problem(torch.device("cuda", 0)) == said
    kvq_ops.cuda._problem.cache_clear()
