"""KVQCache in models and generate() of transformers, against the same models in full precision, by logits."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.cache_utils import StaticSlidingWindowLayer

from benchmarks.tiny_models import LAYERS
from kvq_ops.integrations.transformers import KVQCache, KVQLayer
from tests.transformers_models import (
    ARGUMENT,
    BOUNDS,
    CAPACITY,
    NEW,
    PADDING,
    PROMPT,
    attention,
    compiled,
    error,
    forward,
    generate,
    generated_error,
    model,
    plain_logits,
    prompts,
    whole_mask,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

FORMATS = list(BOUNDS)
SUPPORTED = ["Llama", "Qwen3", "Gemma 2 without soft cap", "Gemma 3", "Phi-3", "gpt-oss", "StableLM", "GPT-NeoX"]
SUPPORTED += ["Gemma 4, layers sharing K and V", "Qwen3-Next"]


def cache_of(name: str = "Llama", format: str = "int8", **given: object) -> KVQCache:
    return KVQCache(model(name).config, CAPACITY, format, **given)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("padding", [(0,), PADDING], ids=["one", "padded"])
def test_greedy(format: str, padding: tuple[int, ...]) -> None:
    ids, mask = prompts(padding=padding)
    output = generate(model(), cache_of(format=format), ids, mask)
    assert output.sequences.shape[1] == PROMPT + NEW
    assert generated_error(model(), output, mask) < BOUNDS[format]


@pytest.mark.parametrize("name", SUPPORTED)
def test_models(name: str) -> None:
    ids, mask = prompts()
    output = generate(model(name), cache_of(name), ids, mask)
    assert generated_error(model(name), output, mask) < BOUNDS["int8"]


def test_the_judge_sees_a_lost_mask() -> None:
    """What a model makes of padding that it takes for text is far outside the bounds of 8 bits."""
    ids, mask = prompts()
    output = generate(model(), cache_of(), ids, torch.ones_like(mask))
    assert generated_error(model(), output, mask) > 5 * BOUNDS["int8"]


def test_greedy_tokens_are_the_plain_ones() -> None:
    """Where the judge is sure by more than a cache may cost it."""
    ids, mask = prompts()
    output = generate(model(), cache_of(format="int8_hq"), ids, mask)
    logits = plain_logits(model(), output.sequences, whole_mask(mask, output.sequences))[:, PROMPT - 1 : -1]
    best = logits.topk(2, -1).values
    sure = best[..., 0] - best[..., 1] > 4 * BOUNDS["int8_hq"] * logits.std()
    assert sure.float().mean() > 0.5
    assert torch.equal(output.sequences[:, PROMPT:][sure], logits.argmax(-1)[sure])


def test_sampled() -> None:
    ids, mask = prompts()
    torch.manual_seed(1)
    first = generate(model(), cache_of(), ids, mask, do_sample=True, temperature=2.0, num_return_sequences=2)
    torch.manual_seed(1)
    second = generate(model(), cache_of(), ids, mask, do_sample=True, temperature=2.0, num_return_sequences=2)
    assert torch.equal(first.sequences, second.sequences)
    assert len(first.sequences.unique(dim=0)) == 2 * len(PADDING)
    assert generated_error(model(), first, mask.repeat_interleave(2, 0)) < BOUNDS["int8"]


@pytest.mark.parametrize("name", ["Llama", "gpt-oss"])
@pytest.mark.parametrize("format", ["int8", "int8_hq"])
def test_beams(name: str, format: str) -> None:
    """A beam's score is the sum of log-probabilities: with caches out of step with their beams it would not be that of
    the beam's text."""
    ids, mask = prompts()
    output = generate(
        model(name), cache_of(name, format), ids, mask, num_beams=4, num_return_sequences=4, length_penalty=0.0
    )
    texts = output.sequences
    mask = mask.repeat_interleave(4, 0)
    logits = plain_logits(model(name), texts, whole_mask(mask, texts))[:, PROMPT - 1 : -1]
    scores = logits.log_softmax(-1).gather(2, texts[:, PROMPT:, None]).sum((1, 2))
    # Beams that end alike differ by less than this; those of other prompts, or shuffled ones, by whole nats.
    torch.testing.assert_close(output.sequences_scores, scores, rtol=0, atol=NEW * BOUNDS[format])


@pytest.mark.parametrize("name", ["Llama", "gpt-oss"])
def test_prefill_in_chunks(name: str) -> None:
    ids, mask = prompts()
    output = generate(model(name), cache_of(name), ids, mask, prefill_chunk_size=4)
    assert generated_error(model(name), output, mask) < BOUNDS["int8"]


@pytest.mark.parametrize("format", ["int8", "int8_hq"])
def test_assisted(format: str) -> None:
    """Drafts of another model are mostly refused and cut back; drafts of the model itself are mostly taken."""
    ids, mask = prompts(padding=(0,))
    for assistant in (model(seed=1), model()):
        cache = cache_of(format=format)
        output = generate(model(), cache, ids, mask, assistant_model=assistant)
        assert output.sequences.shape[1] == PROMPT + NEW
        assert generated_error(model(), output, mask) < BOUNDS[format]
        assert int(cache.get_seq_length()) == PROMPT + NEW - 1


def test_prompt_lookup() -> None:
    ids, mask = prompts(padding=(0,))
    output = generate(model(), cache_of(), ids.repeat(1, 2), mask.repeat(1, 2), prompt_lookup_num_tokens=3)
    assert generated_error(model(), output, mask.repeat(1, 2)) < BOUNDS["int8"]


@pytest.mark.parametrize("name", ["Llama", "gpt-oss"])
def test_turns_over_one_cache(name: str) -> None:
    """A second turn goes on where the first ended; after reset the cache is as new."""
    cache = cache_of(name)
    ids, mask = prompts()
    first = generate(model(name), cache, ids, mask, max_new_tokens=8)
    more, _ = prompts(6, (0, 0, 0), seed=1)
    ids = torch.cat([first.sequences, more], 1)
    mask = whole_mask(mask, ids)
    second = generate(model(name), cache, ids, mask, max_new_tokens=8)
    assert torch.equal(second.sequences[:, : ids.shape[1]], ids)
    assert generated_error(model(name), second, mask) < BOUNDS["int8"]
    # transformers' own layers are inference tensors.
    with torch.inference_mode(name != "Llama"):
        cache.reset()
    assert int(cache.get_seq_length()) == 0
    ids, mask = prompts()
    again = generate(model(name), cache, ids, mask, max_new_tokens=8)
    torch.testing.assert_close(torch.stack(again.logits), torch.stack(first.logits), rtol=0, atol=0)


def test_padding_is_never_cached() -> None:
    """A padded sequence is what it would be alone."""
    ids, mask = prompts()
    cache = cache_of(format="int8_hq")
    output = generate(model(), cache, ids, mask)
    layer = cache.layers[0]
    assert isinstance(layer, KVQLayer)
    assert layer.padding.tolist() == list(PADDING)
    assert layer.cache.lengths.tolist() == [PROMPT + NEW - 1 - count for count in PADDING]
    assert int(cache.get_seq_length()) == PROMPT + NEW - 1
    for b, count in enumerate(PADDING):
        alone = cache_of(format="int8_hq")
        with attention(model(), "kvq"):
            text = output.sequences[b : b + 1, count:-1]
            forward(model(), text, torch.ones_like(text), **{ARGUMENT: alone})
        key, value = layer.cache.dequantize()
        tokens = text.shape[1]
        # Where a value lies between two codes, a sum in another order falls to either side: one step of 127.
        for found, expected in zip((key, value), alone.layers[0].cache.dequantize(), strict=True):
            torch.testing.assert_close(found[b, :, :tokens], expected[0], rtol=0, atol=float(expected.abs().max()) / 60)


def test_argument_names() -> None:
    ids, mask = prompts()
    expected = generate(model(), cache_of(), ids, mask, max_new_tokens=4)
    with warnings.catch_warnings():
        if ARGUMENT == "cache":
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        found = generate(model(), cache_of(), ids, mask, max_new_tokens=4, argument="past_key_values")
    assert torch.equal(found.sequences, expected.sequences)
    if ARGUMENT == "cache":
        with attention(model(), "kvq"), pytest.warns(FutureWarning, match="past_key_values"):
            logits = forward(model(), ids, mask, past_key_values=cache_of())
        torch.testing.assert_close(logits[:, -1], expected.logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "gpt-oss"])
def test_skip_layers(name: str) -> None:
    """Skipped layers are plain, and the result is nearer to the plain one."""
    ids, mask = prompts()
    errors = {}
    for skipped in ((), (1,)):
        cache = cache_of(name, "int4_hq", skip_layers=skipped)
        errors[skipped] = generated_error(model(name), generate(model(name), cache, ids, mask), mask)
        plain = {report.layer for report in cache.report().plain}
        assert set(skipped) <= plain
    assert 0 < errors[1,] < errors[()] < BOUNDS["int4_hq"]


def test_skipped_layers_do_all_that_quantized_ones_do() -> None:
    ids, mask = prompts()
    cache = cache_of(skip_layers=(0, -1))
    output = generate(model(), cache, ids, mask, num_beams=2, length_penalty=0.0)
    logits = plain_logits(model(), output.sequences, whole_mask(mask, output.sequences))[:, PROMPT - 1 : -1]
    scores = logits.log_softmax(-1).gather(2, output.sequences[:, PROMPT:, None]).sum((1, 2))
    torch.testing.assert_close(output.sequences_scores, scores, rtol=0, atol=NEW * BOUNDS["int8"])
    ids, mask = prompts(padding=(0,))
    output = generate(model(), cache_of(skip_layers=(0, -1)), ids, mask, assistant_model=model(seed=1))
    assert generated_error(model(), output, mask) < BOUNDS["int8"]


def test_a_window_that_is_never_left_is_quantized() -> None:
    name = "Mistral, all layers with a window"
    ids, mask = prompts(padding=(0, 3), tokens=6)
    cache = KVQCache(model(name).config, 16, "int8")
    assert len(cache.report().quantized) == LAYERS
    output = generate(model(name), cache, ids, mask, max_new_tokens=10)
    assert generated_error(model(name), output, mask) < BOUNDS["int8"]


@pytest.mark.parametrize("format", ["int8", "int8_hq"])
def test_compiled(format: str) -> None:
    """generate compiles the decode step: one graph, the eager logits; another cache, length of prompt or padding
    compiles nothing."""
    torch.compiler.reset()
    counters.clear()
    chosen = model("Llama", layers=2)
    for padding, tokens, new in ((PADDING, PROMPT, 8), ((0, 4, 1), 9, NEW)):
        ids, mask = prompts(tokens, padding)
        eager = generate(chosen, KVQCache(chosen.config, CAPACITY, format), ids, mask, max_new_tokens=new)
        cache = KVQCache(chosen.config, CAPACITY, format)
        found = generate(chosen, cache, ids, mask, max_new_tokens=new, compile_config=compiled())
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert generated_error(chosen, found, mask) < BOUNDS[format]
        assert torch.equal(found.sequences, eager.sequences)
        assert int(cache.get_seq_length()) == tokens + new - 1
        # Sums in another order, and a code here and there that falls to the other side.
        assert error(torch.stack(found.logits), torch.stack(eager.logits)) < BOUNDS[format] / 4


@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss"])
def test_compiled_hybrids(name: str) -> None:
    """Captured whole; Inductor adds minutes to these and no call of ours."""
    torch.compiler.reset()
    counters.clear()
    ids, mask = prompts()
    chosen = model(name, layers=2)
    config = compiled(backend="aot_eager")
    output = generate(chosen, KVQCache(chosen.config, CAPACITY), ids, mask, compile_config=config)
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    assert generated_error(chosen, output, mask) < BOUNDS["int8"]


def test_compiled_without_positions() -> None:
    """A compiled call that counts positions itself, from the cache that the same call advances."""
    torch.compiler.reset()
    chosen = model("Llama", layers=2)
    ids, mask = prompts(padding=(0, 0))
    cache = KVQCache(chosen.config, CAPACITY)
    with attention(chosen, "kvq"), torch.inference_mode():
        found = [chosen(ids[:, :4], **{ARGUMENT: cache}).logits]
        step = torch.compile(chosen, fullgraph=True)
        found += [step(ids[:, t : t + 1], **{ARGUMENT: cache}).logits for t in range(4, PROMPT)]
    assert error(torch.cat(found, 1), plain_logits(chosen, ids, mask)) < BOUNDS["int8"]


def test_compiled_step_refuses_other_masks() -> None:
    """A mask that hides a token that the cache holds, or the new one, is no less refused than by eager."""
    torch.compiler.reset()
    chosen = model("Llama", layers=2)
    ids, mask = prompts()
    step = torch.compile(chosen, fullgraph=True)
    for hidden in (slice(6, 8), slice(-1, None)):
        cache = KVQCache(chosen.config, CAPACITY)
        with attention(chosen, "kvq"), torch.inference_mode():
            forward(chosen, ids[:, :-1], mask[:, :-1], **{ARGUMENT: cache})
            wrong = mask.clone()
            wrong[1, hidden] = 0
            with pytest.raises(RuntimeError, match="attention_mask must be causal and show all new tokens"):
                forward(step, ids[:, -1:], wrong, **{ARGUMENT: cache})


def test_autocast() -> None:
    """Keys leave RoPE in fp32 there, values a matmul in bf16."""
    chosen, (ids, mask) = model(), prompts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = generate(chosen, KVQCache(chosen.config, CAPACITY), ids, mask)
    assert generated_error(chosen, output, mask) < 2 * BOUNDS["int8"]  # bf16 matmuls come to the cache's error


@pytest.mark.slow
def test_compiled_prefill_in_chunks() -> None:
    """Chunks of a prompt go through compiled code where nothing is padded; with padding they are refused."""
    torch.compiler.reset()
    ids, mask = prompts(12, (0, 0))
    chosen = model("Llama", layers=2)
    config = chosen.config
    sizes = (2, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu"))
    given = {"prefill_chunk_size": 4, "compile_config": compiled(), "max_new_tokens": 4}
    cache = KVQCache(config, CAPACITY)
    cache.early_initialization(*sizes)
    output = generate(chosen, cache, ids, mask, **given)
    assert generated_error(chosen, output, mask) < BOUNDS["int8"]
    cache.reset()
    ids, mask = prompts(12, (0, 2))
    with pytest.raises(RuntimeError, match="attention_mask must be causal and show all new tokens"):
        generate(chosen, cache, ids, mask, **given)


def test_crop_of_a_model_with_windows() -> None:
    """A window of 16 that has let go of tokens cannot go back; before that it can."""
    chosen = model("Gemma 3")
    ids, mask = prompts(20, (0, 3))
    cache = KVQCache(chosen.config, CAPACITY)
    with attention(chosen, "kvq"):
        forward(chosen, ids[:, :15], mask[:, :15], **{ARGUMENT: cache})
        if not hasattr(StaticSlidingWindowLayer, "crop"):  # transformers 5.18: such layers never go back
            with pytest.raises(ValueError, match=r"KVQCache.crop: the model must have crop in every layer"):
                cache.crop(-3)
            assert int(cache.get_seq_length()) == 15
            return
        cache.crop(-3)
        again = forward(chosen, ids[:, 12:], mask, **{ARGUMENT: cache})
        expected = plain_logits(chosen, ids, mask)[:, 12:]
        assert error(again, expected) < BOUNDS["int8"]
        with pytest.raises(ValueError, match=r"KVQCache.crop: positions must be within every window, got 20 at layer"):
            cache.crop(-3)
    assert int(cache.get_seq_length()) == 20


def test_kvq_ops_imports_no_transformers() -> None:
    code = "import sys, kvq_ops; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
