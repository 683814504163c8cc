"""quantize_kv_storage on a plain Llama: the bits of QuantizedKVCache, whatever spells the plain cache."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
import torch
from common import FORMAT_NAMES
from rewrite_models import (
    MAX_TOKENS,
    SPELLINGS,
    TINY,
    Counter,
    CutAtPosition,
    IndexCopy,
    IndexPut,
    NarrowCopy,
    SliceAssign,
    export,
    model,
    quantized,
    steps,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kvq_ops import get_format, quantize_kv_storage

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # torch's own, on its way to Inductor
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",  # torch's own, in export
    "ignore:While compiling, we found certain side effects:UserWarning",  # the models' clock, under strict=True
)
ERROR = {"int8": 2e-2, "int4": 0.5}
"""Of logits against the plain cache, relative L2, by the coarser side."""


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def run(step, batch: int = 2, number: int = 24) -> Tensor:
    return torch.stack([step(tokens, positions) for tokens, positions in steps(batch, number)])


def written_inline(spelling, batch: int = 2) -> ExportedProgram:
    return export(model(spelling, batch), batch)


def functional(spelling, batch: int = 2) -> ExportedProgram:
    return export(model(spelling, batch), batch).run_decompositions({})


def traced_by_dynamo(spelling, batch: int = 2) -> ExportedProgram:
    return export(model(spelling, batch), batch, strict=True)


@pytest.mark.parametrize(
    ("spelling", "made", "batch"),
    [
        *((spelling, written_inline, batch) for spelling in SPELLINGS for batch in (1, 2)),
        *((spelling, functional, 2) for spelling in (IndexPut, SliceAssign, NarrowCopy, Counter)),
        *((spelling, traced_by_dynamo, 2) for spelling in (IndexPut, SliceAssign, CutAtPosition)),
    ],
)
def test_equals_the_quantized_cache(spelling, made, batch):
    program = made(spelling, batch)
    rewritten, report = quantize_kv_storage(program, strict=True)
    assert len(report.rewritten) == 2
    got = run(rewritten.module(), batch)
    assert torch.equal(got, run(quantized(spelling, batch=batch), batch))
    error = relative(got, run(program.module(), batch))
    assert ERROR["int8"] / 100 < error < ERROR["int8"]  # nearer than that would be no quantized cache


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_format(name):
    """Over all rows, so that blocks of tokens freeze; and once more from the start."""
    program = written_inline(NarrowCopy)
    rewritten, report = quantize_kv_storage(program, get_format(name))
    module = rewritten.module()
    got = run(module, number=MAX_TOKENS)
    assert report.format == get_format(name).name
    assert torch.equal(got, run(quantized(NarrowCopy, name), number=MAX_TOKENS))
    assert relative(got, run(program.module(), number=MAX_TOKENS)) < ERROR["int4" if "4" in name else "int8"]
    assert torch.equal(run(module, number=12), got[:12])
    held = rewritten.state_dict | rewritten.constants
    parts = [held[part] for attention in report.attentions for part in attention.parts]
    assert sum(part.nbytes for part in parts) == report.bytes_after


def test_the_program_passed_in_stays_as_it_was():
    program = written_inline(Counter)
    states = program.state_dict | program.constants
    before = str(program), {name: held.clone() for name, held in states.items()}, list(states)
    rewritten, _ = quantize_kv_storage(program)
    run(rewritten.module())
    after = program.state_dict | program.constants
    assert (str(program), list(after)) == (before[0], before[2])
    assert all(torch.equal(held, before[1][name]) for name, held in after.items())
    assert all(after[name] is states[name] for name in states)
    assert rewritten.state_dict["embed_tokens.weight"] is program.state_dict["embed_tokens.weight"]  # no second copy


@pytest.mark.parametrize("made", [written_inline, functional])
def test_the_plain_buffers_are_gone(made):
    """From state, constants and signature; the new ones are as persistent as the key's buffer."""
    rewritten, report = quantize_kv_storage(made(IndexCopy))
    attention = report.attentions[1]
    cache = "layers.1.self_attn.cache"
    assert attention.caches == (f"{cache}.key", f"{cache}.value")
    names = [f"{cache}.kvq_{part}" for part in ("key_codes", "key_scales", "value_codes", "value_scales")]
    assert attention.parts == tuple(names)
    signature = rewritten.graph_signature
    buffers = {spec.target for spec in signature.input_specs if spec.kind == InputKind.BUFFER}
    module = rewritten.module()
    for held in (buffers, dict(module.named_buffers()), rewritten.state_dict | rewritten.constants):
        assert not set(attention.caches) & set(held)
        assert set(names) <= set(held)
    assert set(names) <= set(rewritten.state_dict)
    assert signature.buffers_to_mutate == {}
    targets = [str(node.target) for node in rewritten.graph.nodes]
    assert (targets.count("kvq.append.default"), targets.count("kvq.attend.default")) == (2, 2)
    assert not [target for target in targets if "scaled_dot" in target or "index_copy" in target or "arange" in target]
    rewritten.graph.lint()
    rewritten.validate()


def test_lengths_are_no_buffer():
    """They are the position at each step, so nothing has to be reset and AOTInductor has nothing to freeze."""
    rewritten, _ = quantize_kv_storage(written_inline(IndexCopy))
    calls = {str(node.target): node for node in reversed(rewritten.graph.nodes)}
    append, attend = calls["kvq.append.default"], calls["kvq.attend.default"]
    lengths = append.args[4]
    assert lengths is attend.args[5]
    assert set(lengths.users) == {append, attend}
    assert lengths.op == "call_function"
    module = rewritten.module()
    first = run(module)
    assert torch.equal(run(module, number=5), first[:5])  # starts anew at position 0
    tokens, positions = steps()[7]
    run(module)
    assert torch.equal(module(tokens, positions), first[7])  # and means at any position what the plain one means


@pytest.mark.parametrize("name", ["int8", "int8_kivi"])
def test_what_plain_caches_hold_is_carried_over(name):
    program, held = written_inline(IndexPut), 37
    plain = program.module()
    expected = run(plain, number=MAX_TOKENS)
    for buffer in (buffer for name, buffer in plain.named_buffers() if name.endswith((".key", ".value"))):
        buffer[:, :, held:] = 0
    rewritten, _ = quantize_kv_storage(program, name)
    codes = rewritten.state_dict["layers.0.self_attn.cache.kvq_key_codes"]
    assert codes[:, :, 4:36].any(-1).all()
    assert not codes[:, :, held:].any()
    module = rewritten.module()
    got = torch.stack([module(*step) for step in steps(number=MAX_TOKENS)[held:]])
    assert relative(got, expected[held:]) < ERROR["int8"]


def test_beyond_the_capacity_is_refused():
    module = quantize_kv_storage(written_inline(IndexCopy))[0].module()
    tokens, _ = steps()[0]
    with pytest.raises(RuntimeError, match=r"kvq::append: .* must"):
        module(tokens, torch.tensor([MAX_TOKENS]))


def test_saves_and_loads():
    program, _ = quantize_kv_storage(written_inline(SliceAssign))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert torch.equal(run(loaded.module()), run(program.module()))


@pytest.mark.parametrize("spelling", [NarrowCopy, Counter])
def test_compiles_once(spelling):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    program = written_inline(spelling)
    (compiled, eager) = (quantize_kv_storage(program)[0].module() for _ in range(2))
    compiled = torch.compile(compiled, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = run(compiled)
    assert relative(got, run(eager)) < 1e-3  # a few codes that lay on the edge
    assert counter.frame_count == 1


def test_aot_inductor(tmp_path):
    """Batch 1, where torch freezes a one-element buffer that an aten operator touches. One layer compiles sooner."""
    one_layer = dataclasses.replace(TINY, layers=1)
    program, _ = quantize_kv_storage(export(model(IndexCopy, 1, one_layer), 1))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    step = torch._inductor.aoti_load_package(path)
    eager = run(quantized(IndexCopy, batch=1, config=one_layer), 1, 12)
    got = run(step, 1, 12)
    assert relative(got, eager) < 1e-3
    assert relative(got[-1], eager[-1]) < 1e-3
    assert torch.equal(run(step, 1, 3), got[:3])


def test_report():
    """Figures by hand: 2 sequences, 2 heads of 16, 40 tokens; a row is 16 codes and a scale."""
    program = written_inline(IndexCopy)
    _, report = quantize_kv_storage(program)
    attention = report.attentions[0]
    assert (attention.node, attention.module) == ("scaled_dot_product_attention", "layers.0.self_attn")
    assert (attention.batch, attention.heads_q, attention.heads_kv) == (2, 6, 2)
    assert (attention.head_dim, attention.max_tokens) == (16, 40)
    assert (attention.bytes_before, attention.bytes_after) == (2 * 2 * 2 * 40 * 16 * 4, 2 * 2 * 2 * 40 * (16 + 4))
    assert attention.values_per_token == 2 * 2 * 16
    assert (attention.bytes_per_token_before, attention.bytes_per_token_after) == (256, 80)
    assert (report.bytes_before, report.bytes_after) == (40960, 12800)
    assert (report.values_per_token, report.bytes_per_token_before, report.bytes_per_token_after) == (128, 512, 160)
    held = quantize_kv_storage(program)[0]
    parts = [held.state_dict[name] for attention in report.attentions for name in attention.parts]
    assert sum(part.nbytes for part in parts) == report.bytes_after
    lines = str(report).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[-1].split("|")[1:-1]] == [
        "all", "", "", "", "", "40,960 -> 12,800", "512 -> 160", "2 of 2 rewritten",
    ]  # fmt: skip
    assert "layers.0.self_attn.cache.key, layers.0.self_attn.cache.value | 6/2" in lines[2]


def test_bfloat16_costs_half_before():
    _, report = quantize_kv_storage(written_inline(NarrowCopy))
    assert report.attentions[0].bytes_per_token_before == 128


def test_a_symbolic_position():
    """The position as an int of the call instead of a tensor."""

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(SliceAssign)

        def forward(self, tokens: Tensor, position: int) -> Tensor:
            for layer in self.model.layers:
                layer.self_attn.cache.number = lambda: position
            return self.model(tokens, torch.arange(1) + position)

    shapes = {"tokens": None, "position": torch.export.Dim.DYNAMIC}
    program = torch.export.export(Step(), (torch.zeros(2, 1, dtype=torch.int64), 3), dynamic_shapes=shapes)
    rewritten, report = quantize_kv_storage(program, strict=True)
    module = rewritten.module()
    assert len(report.rewritten) == 2
    got = torch.stack([module(tokens, int(positions)) for tokens, positions in steps()])
    assert torch.equal(got, run(quantized(SliceAssign)))


@pytest.mark.filterwarnings("default")  # transformers' own
def test_transformers_static_cache():
    """The export that transformers makes: caches are constants beside unused buffers of the same memory, and the
    position passes through a scalar that each step overwrites."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make demo` installs it")
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    sizes = {"batch_size": 1, "max_cache_len": MAX_TOKENS}
    llama.generation_config = transformers.GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=MAX_TOKENS, cache_config=sizes
    )
    step = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "cache_position": torch.tensor([0])}
    program = torch.export.export(TorchExportableModuleWithStaticCache(llama, **sizes), (), step)
    rewritten, report = quantize_kv_storage(program, strict=True)
    assert report.values_per_token == 128
    held = rewritten.state_dict | rewritten.constants
    assert MAX_TOKENS * 2 * 16 not in {tensor.numel() for tensor in held.values() if tensor.dtype == torch.float32}
    plain, got = (
        torch.stack([module(input_ids=tokens, cache_position=at) for tokens, at in steps(1)])
        for module in (program.module(), rewritten.module())
    )
    assert ERROR["int8"] / 100 < relative(got, plain) < ERROR["int8"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # transformers' own
def test_the_demos_model():
    """The demo's figures of int8, by a rewrite of its plain model: 192 tokens decoded one by one."""
    pytest.importorskip("transformers", reason="transformers is not installed: `make demo` installs it")
    from examples.demo import decode
    from examples.llama import PLAIN
    from examples.metrics import compare, losses, perplexity
    from examples.smollm2 import load_model, load_text

    try:
        llama, tokenizer = load_model(torch.float32)
        text = load_text(tokenizer, 193)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    llama.setup_caches(1, 192, PLAIN)
    program = export(llama, 1)
    rewritten, report = quantize_kv_storage(program, strict=True)
    assert len(report.rewritten) == 30
    assert (report.bytes_per_token_before, report.bytes_per_token_after) == (46080, 12240)
    ids, targets = text[:192], text[1:]
    plain, got = (decode(made.module(), ids, 0)[0] for made in (program, rewritten))
    agreement, divergence = (figures.double().mean() for figures in compare(plain, got))
    assert abs(perplexity(losses(got, targets)) / perplexity(losses(plain, targets)) - 1) < 0.01
    assert agreement > 0.97  # two standard errors of 0.0072 below the demo's 0.985
    assert divergence < 0.002
    llama.setup_caches(1, 192, "int8")
    assert relative(got, decode(llama, ids, 0)[0]) < 1e-6
    assert math.isfinite(float(got.sum()))
