"""KVQCache and KVQLayer method by method, what they refuse, and what is made of masks."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from benchmarks import transformers_matrix
from benchmarks.tiny_models import ARCHITECTURES, COMMON, LAYERS
from kvq_ops import get_format
from kvq_ops.integrations.transformers import KVQCache, KVQLayer
from kvq_ops.integrations.transformers.attention import attention as kvq_attention
from kvq_ops.integrations.transformers.attention import register
from kvq_ops.integrations.transformers.padding import new_tokens
from tests.transformers_models import (
    ARGUMENT,
    CAPACITY,
    PADDING,
    PROMPT,
    attention,
    forward,
    model,
    prompts,
)

HEADS, HEAD_DIM, TOKENS = 2, 16, 40


class Attention(torch.nn.Module):
    """What of a model's attention module the attention function looks at."""

    is_causal = True


def rows(tokens: int = TOKENS, batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, batch, HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return key, value


def causal(tokens: int, seen: int = 0, padding: tuple[int, ...] = PADDING, positions: int = CAPACITY) -> Tensor:
    own, all_ = torch.arange(seen, seen + tokens)[:, None], torch.arange(positions)
    shown = (all_ <= own) & (all_ >= torch.tensor(padding)[:, None, None])
    return shown[:, None]


def attend(layer: KVQLayer, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    query = torch.randn(*key.shape[:1], 4, *key.shape[2:], generator=torch.Generator().manual_seed(9))
    out, weights = kvq_attention(Attention(), query, *layer.update(key, value), mask, scaling=0.25, **given)
    assert weights is None
    return out


def filled(format: str = "int8_hq", padding: tuple[int, ...] = PADDING, tokens: int = TOKENS) -> KVQLayer:
    layer = KVQLayer(CAPACITY, get_format(format))
    attend(layer, *rows(tokens, len(padding)), causal(tokens, padding=padding))
    return layer


def held(layer: KVQLayer, b: int) -> tuple[Tensor, Tensor]:
    key, value = layer.cache.dequantize()
    length = int(layer.cache.lengths[b])
    return key[b, :, :length], value[b, :, :length]


def same(layer: KVQLayer, b: int, other: KVQLayer, source: int) -> bool:
    pairs = zip(held(layer, b), held(other, source), strict=True)
    return layer.padding[b] == other.padding[source] and all(torch.equal(one, two) for one, two in pairs)


def test_padding_stays_out() -> None:
    layer = filled("int8")
    assert layer.cache.lengths.tolist() == [TOKENS - count for count in PADDING]
    assert layer.padding.tolist() == list(PADDING)
    assert int(layer.get_seq_length()) == TOKENS
    key, value = rows()
    for b, count in enumerate(PADDING):
        for found, given in zip(held(layer, b), (key, value), strict=True):
            torch.testing.assert_close(found, given[b, :, count:], rtol=0, atol=float(given.abs().max()) / 127)


def test_padded_queries_give_zeros() -> None:
    layer = KVQLayer(CAPACITY, get_format("int8"))
    out = attend(layer, *rows(), causal(TOKENS))
    for b, count in enumerate(PADDING):
        assert not out[b, :count].any()
        assert out[b, count:].abs().amin(0).any()


def test_sequences_may_begin_in_a_later_chunk() -> None:
    layer, whole = KVQLayer(CAPACITY, get_format("int8_kivi")), filled("int8_kivi", (7, 0, 2))
    key, value = rows()
    for first in range(0, TOKENS, 4):
        last = first + 4
        mask = causal(4, first, (7, 0, 2))
        attend(layer, key[:, :, first:last], value[:, :, first:last], mask)
    for b in range(3):
        assert same(layer, b, whole, b)


def test_sinks_take_part_in_the_softmax() -> None:
    """gpt-oss: a logit a head that brings no value, against the softmax written out."""
    sinks = torch.tensor([0.0, 3.0, -2.0, 8.0])
    for padding in (PADDING, (0, 0, 0)):
        layer = KVQLayer(CAPACITY, get_format("int8"))
        key, value = rows()
        out = attend(layer, key, value, causal(TOKENS, padding=padding), s_aux=sinks)
        query = torch.randn(3, 4, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(9))
        for b, count in enumerate(padding):
            stored_key, stored_value = (part.repeat_interleave(2, 0) for part in held(layer, b))
            logits = 0.25 * query[b, :, count:] @ stored_key.mT
            shown = torch.ones(logits.shape[1:], dtype=torch.bool).tril()
            logits = torch.cat(
                [logits.masked_fill(~shown, -torch.inf), sinks[:, None, None].expand_as(logits[..., :1])], 2
            )
            expected = logits.softmax(-1)[..., :-1] @ stored_value
            torch.testing.assert_close(out[b, count:].transpose(0, 1), expected, rtol=0, atol=2e-3)


def test_reset() -> None:
    layer = filled()
    layer.reset()
    assert int(layer.get_seq_length()) == 0
    attend(layer, *rows(), causal(TOKENS))
    assert all(same(layer, b, filled(), b) for b in range(3))


@pytest.mark.parametrize("format", ["int8", "int8_hq", "int4_kivi"])
@pytest.mark.parametrize("count", [1, 17, TOKENS - 3, TOKENS])
def test_crop(format: str, count: int) -> None:
    """As if the newest tokens had never come, padding included."""
    layer, left = filled(format), TOKENS - count
    layer.crop(-count)
    assert int(layer.get_seq_length()) == left
    assert layer.padding.tolist() == [min(padding, left) for padding in PADDING]
    assert layer.cache.lengths.tolist() == [max(0, left - padding) for padding in PADDING]
    if left:
        fresh = KVQLayer(CAPACITY, get_format(format))
        attend(fresh, *(part[:, :, :left] for part in rows()), causal(left))
        assert all(same(layer, b, fresh, b) for b in range(3))


def test_reorder() -> None:
    for format in ("int8", "int4_hq", "int8_kivi"):
        layer, before = filled(format), filled(format)
        layer.reorder_cache(torch.tensor([2, 2, 0]))
        for b, source in enumerate([2, 2, 0]):
            assert same(layer, b, before, source)
            assert not same(layer, b, before, 1)


def test_repeat_and_select() -> None:
    before = filled("int4_hq")
    layer = filled("int4_hq")
    layer.batch_repeat_interleave(2)
    assert layer.batch_size == layer.cache.batch == 6
    assert all(same(layer, b, before, b // 2) for b in range(6))
    layer.batch_select_indices(torch.tensor([5, 0, -4]))
    for b, source in enumerate([2, 0, 1]):
        assert same(layer, b, before, source)
    layer.batch_select_indices(torch.tensor([True, False, True]))
    assert same(layer, 0, before, 2)
    assert same(layer, 1, before, 1)
    # What comes next goes on in the new tensors.
    attend(layer, *rows(1, 2), causal(1, TOKENS, (2, 0)))
    assert int(layer.get_seq_length()) == TOKENS + 1
    with pytest.raises(ValueError, match=re.escape("indices must lie in -2..1, got tensor([2])")):
        layer.batch_select_indices(torch.tensor([2]))


def test_offload_waits_for_attention() -> None:
    """An offloading cache offloads right after update, when attention still needs the parts."""
    moves = []

    class Recording(KVQLayer):
        def _move(self, device: torch.device) -> None:
            moves.append((device.type, int(self.seen)))
            super()._move(device)

    layer = Recording(CAPACITY, get_format("int8"), offloads=True)
    key, value = layer.update(*rows())
    layer.offload()
    assert moves == []
    kvq_attention(Attention(), torch.randn(3, 4, TOKENS, HEAD_DIM), key, value, causal(TOKENS))
    assert moves == [("cpu", TOKENS)]
    layer.prefetch()
    assert moves[1:] == [("cpu", TOKENS)]
    assert all(same(layer, b, filled("int8"), b) for b in range(3))


def test_methods_before_the_first_update() -> None:
    cache = KVQCache(model().config, CAPACITY)
    for call in (cache.reset, lambda: cache.crop(-3), lambda: cache.reorder_cache(torch.tensor([0]))):
        call()
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
    assert not cache.is_initialized
    assert cache.is_compileable
    assert cache.is_croppable
    assert cache.get_mask_sizes(5, 0) == (CAPACITY, 0)
    assert cache.get_max_length() == CAPACITY


def test_early_initialization() -> None:
    cache, config = KVQCache(model().config, CAPACITY, "int4_hq"), model().config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    cache.early_initialization(3, heads, head_dim, torch.bfloat16, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.batch_size == 3
    needed = get_format("int4_hq").bytes_needed(3, heads, head_dim, CAPACITY)
    counts = 8 * (3 + 1)
    assert cache.nbytes == LAYERS * (needed + counts)
    addresses = [layer.cache.key_codes.data_ptr() for layer in cache.layers]
    other, config = model().to(torch.bfloat16), model().config
    try:
        ids, mask = prompts()
        with attention(other, "kvq"):
            forward(other, ids, mask, **{ARGUMENT: cache})
    finally:
        other.to(torch.float32)
    assert [layer.cache.key_codes.data_ptr() for layer in cache.layers] == addresses


def test_two_builds_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None: ...

    other.__module__ = "another_build.attention"
    monkeypatch.setitem(AttentionInterface._global_mapping, "kvq", other)
    with pytest.raises(RuntimeError, match=r"one build of kvq_ops must serve .* after another_build.attention$"):
        register()
    assert AttentionInterface._global_mapping["kvq"] is other


def test_filled_in_inference_mode_reset_outside() -> None:
    with torch.inference_mode():
        layer = filled()
        layer.batch_repeat_interleave(2)
    layer.crop(-1)
    layer.reorder_cache(torch.tensor([0, 0, 1, 1, 2, 2]))
    layer.reset()


def test_batch_methods_of_a_model() -> None:
    """A cache repeated and cut down goes on as if it had been filled so."""
    ids, mask = prompts()
    more, ones = torch.tensor([[7], [8], [9]]), torch.cat([mask, mask.new_ones(3, 1)], 1)
    with attention(model(), "kvq"):
        cache = KVQCache(model().config, CAPACITY, skip_layers=(1,))
        forward(model(), ids, mask, **{ARGUMENT: cache})
        expected = forward(model(), more, ones, **{ARGUMENT: cache})
        cache = KVQCache(model().config, CAPACITY, skip_layers=(1,))
        forward(model(), ids, mask, **{ARGUMENT: cache})
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([4, 1]))
        found = forward(model(), more[[2, 0]], ones[[2, 0]], **{ARGUMENT: cache})
    torch.testing.assert_close(found, expected[[2, 0]], rtol=0, atol=1e-3)


def test_report() -> None:
    cache = KVQCache(model("gpt-oss").config, CAPACITY, "int4_hq", skip_layers=(3,))
    ids, mask = prompts()
    with attention(model("gpt-oss"), "kvq"):
        forward(model("gpt-oss"), ids, mask, **{ARGUMENT: cache})
    report = cache.report()
    assert [layer.quantized for layer in report.layers] == [False, True, False, False]
    assert [layer.layer_type for layer in report.layers[:2]] == ["sliding_attention", "full_attention"]
    assert report.layers[0].reason.startswith("a window of 16 is shorter than max_cache_len 64")
    assert report.layers[3].reason == "skip_layers names it"
    assert report.nbytes == cache.nbytes > 0
    assert report.layers[1].nbytes == cache.layers[1].nbytes
    assert report.layers[3].nbytes == 2 * 3 * HEADS * CAPACITY * HEAD_DIM * 4
    assert "1 of 4 quantized" in str(report)


def test_linear_attention_layers_are_transformers_own() -> None:
    sizes = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen3_next", **{**COMMON, **sizes})
    cache = KVQCache(config, CAPACITY)
    assert [layer.quantized for layer in cache.report().layers] == [False, True]
    assert cache.report().layers[0].reason == "linear_attention is transformers' own"
    with pytest.raises(ValueError, match=r"have batch_repeat_interleave in every layer, got LinearAttentionLayer"):
        cache.batch_repeat_interleave(2)


LLAMA = {"config": "Llama", "max_cache_len": CAPACITY}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": "int3"}, "KVQCache: format must be one of"),
        ({"max_cache_len": 0}, "KVQCache: max_cache_len must be an int of at least 1, got 0"),
        ({"max_cache_len": True}, "KVQCache: max_cache_len must be an int of at least 1, got True"),
        ({"max_cache_len": 2**31}, "KVQCache: max_cache_len must be at most 2147483647, got 2147483648"),
        ({"skip_layers": (4,)}, "KVQCache: skip_layers must be ints in -4..3, got 4"),
        ({"skip_layers": range(4)}, "KVQCache: config must have a layer to quantize, got none in model type 'llama'"),
        (
            {"config": "Gemma 2"},
            "attn_logit_softcapping must be None, attend has no soft cap yet, got 50.0 (model type",
        ),
        ({"config": "Mistral, all layers with a window"}, "a window of 16 is shorter than max_cache_len 64"),
    ],
)
def test_refused_by_the_cache(given: dict[str, Any], words: str) -> None:
    arguments = LLAMA | given
    arguments["config"] = model(arguments["config"]).config
    with pytest.raises(ValueError, match=re.escape(words)):
        KVQCache(**arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"softcap": 50.0}, "softcap must be None, attend has none, got 50.0 (model type 'unknown')"),
        ({"position_bias": torch.zeros(1)}, "position_bias must be None, attend has none, got one"),
        ({"sliding_window": 16}, "sliding_window must be None or at least max_cache_len 64, got 16"),
        ({"dropout": 0.5}, "dropout must be 0, attention over a quantized cache is inference only, got 0.5"),
        ({"is_causal": False}, "is_causal must be True, got False"),
        ({"output_attentions": True}, "output_attentions must be False, attend returns no weights, got True"),
    ],
)
def test_refused_by_attention(given: dict[str, Any], words: str) -> None:
    layer = KVQLayer(CAPACITY, get_format("int8"))
    with pytest.raises(ValueError, match=re.escape(f"kvq attention: {words}")):
        attend(layer, *rows(), causal(TOKENS), **given)
    assert int(layer.get_seq_length()) == 0


def test_refused_by_methods() -> None:
    layer = filled("int8_hq", (0,), 63)
    with pytest.raises(
        ValueError, match="tokens_to_remove must be negative or 0, the number of tokens to remove, got 5"
    ):
        layer.crop(5)
    layer = KVQLayer(256, get_format("int8_hq"))
    attend(layer, *rows(200, 1), None)
    with pytest.raises(ValueError, match=r"QuantizedKVCache.truncate: lengths must cut a sequence back by at most 64"):
        layer.crop(-150)
    assert int(layer.get_seq_length()) == 200
    key, value = rows()
    with pytest.raises(ValueError, match=r"value must have head_dim 16 like key, got 8 \(model type 'deepseek'\)"):
        KVQLayer(CAPACITY, get_format("int8"), model_type="deepseek").update(key, value[..., :8])


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_refused_by_other_attention(name: str) -> None:
    ids, mask = prompts()
    with (
        attention(model(), name),
        pytest.raises(ValueError, match=r"attention implementation 'kvq' as it is, got .*llama"),
    ):
        forward(model(), ids, mask, **{ARGUMENT: KVQCache(model().config, CAPACITY)})


def test_refused_by_models_without_attention_implementations() -> None:
    ids, mask = prompts()
    with pytest.raises(ValueError, match=r"got \.shape of it in model type 'falcon'"):
        forward(model("Falcon"), ids, mask, **{ARGUMENT: KVQCache(model("Falcon").config, CAPACITY)})


def test_other_uses_of_what_update_returns() -> None:
    key, value = KVQLayer(CAPACITY, get_format("int8"), model_type="other").update(*rows())
    for use in (lambda: key[0], lambda: key.shape, lambda: torch.matmul(value, value), lambda: torch.ones(2) @ key):
        with pytest.raises(ValueError, match="model type 'other'"):
            use()


def test_a_missing_mask_function_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts()
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "kvq")
    with (
        attention(model(), "kvq"),
        pytest.raises(ValueError, match="the mask function of 'kvq' must be the registered one, got None"),
    ):
        forward(model(), ids, mask, **{ARGUMENT: KVQCache(model().config, CAPACITY)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mask: mask.flip(3), "be causal, with padding at the left only"),
        (lambda mask: mask & (torch.arange(CAPACITY) != 20), "be causal, with padding at the left only"),
        (lambda mask: mask | (torch.arange(CAPACITY) < TOKENS), "be causal, with padding at the left only"),
        (lambda mask: mask & (torch.arange(CAPACITY) < TOKENS - 3), "be causal, with padding at the left only"),
        (lambda mask: mask & (torch.arange(CAPACITY) > torch.arange(TOKENS)[:, None] - 8), "be causal, with padding"),
        (lambda mask: mask[:, 0], "have shape [3, 1, 40, positions], got [3, 40, 64]"),
        (lambda mask: mask.repeat(1, 4, 1, 1), "have shape [3, 1, 40, positions], got [3, 4, 40, 64]"),
        (
            lambda mask: torch.where(mask, 0.5, -torch.inf),
            "be a bool mask, or 0 where a token is seen and -inf elsewhere",
        ),
    ],
    ids=["right", "hole", "not-causal", "end", "window", "3-D", "heads", "bias"],
)
def test_masks_that_are_refused(change: Any, words: str) -> None:
    layer = KVQLayer(CAPACITY, get_format("int8"))
    with pytest.raises(ValueError, match=re.escape(f"kvq attention: attention_mask must {words}")):
        attend(layer, *rows(), change(causal(TOKENS)))
    assert layer.cache.lengths.tolist() == [0, 0, 0]


def test_capacity_that_does_not_suffice() -> None:
    layer = filled("int8", (0,), CAPACITY)
    said = "max_cache_len must be at least 65, or the mask as long as what it hides, got 64, 64 of them taken and 1 new"
    with pytest.raises(ValueError, match=f"kvq attention: {said}"):
        attend(layer, *rows(1, 1), causal(1, CAPACITY, (0,)))
    assert int(layer.get_seq_length()) == CAPACITY


def test_masks_that_are_understood() -> None:
    lengths = torch.tensor([3, 8, 6], dtype=torch.int32)
    for mask in (causal(4, 8), torch.where(causal(4, 8), 0.0, -torch.inf), torch.where(causal(4, 8), 0.0, -3e38)):
        assert new_tokens(mask, lengths, 8, 4) == [4, 4, 4]
    assert new_tokens(causal(4, 0, (0,)), torch.zeros(2, dtype=torch.int32), 0, 4) == [4, 4]
    assert new_tokens(causal(4, 0, (6, 4, 1)), torch.zeros(3, dtype=torch.int32), 0, 4) == [0, 0, 3]
    # What a padded query sees means nothing.
    mask = causal(4, 0, (2,))
    mask[0, 0, :2, :1] = True
    assert new_tokens(mask, torch.zeros(1, dtype=torch.int32), 0, 4) == [2]


def test_a_mask_that_hides_what_is_held() -> None:
    """Of a later turn: tokens that are cached can no longer be hidden."""
    layer = filled("int8", (0, 0, 0))
    with pytest.raises(ValueError, match=r"another pattern at sequence 1 \(40 tokens held, 1 new\)"):
        attend(layer, *rows(1), causal(1, TOKENS, (0, 3, 0)))
    mask = causal(1, TOKENS, (0, 0, 0))
    attend(layer, *rows(1), mask)
    # The same mask once more is proved once more, for the next position.
    with pytest.raises(ValueError, match="another pattern at sequence 0"):
        attend(layer, *rows(1), mask)


def test_one_mask_over_two_caches() -> None:
    """What was proved for one cache is not taken for another, which holds something else."""
    mask = causal(4, 8, (0, 0, 0))
    config = model().config
    with attention(model(), "kvq"), torch.inference_mode():
        for held, refused in ((8, False), (6, True)):
            cache = KVQCache(config, CAPACITY)
            model()(torch.ones(3, held, dtype=torch.int64), **{ARGUMENT: cache})
            given = {"attention_mask": mask, ARGUMENT: cache}
            with pytest.raises(ValueError, match="attention_mask must") if refused else contextlib.nullcontext():
                model()(torch.ones(3, 4, dtype=torch.int64), **given)


def test_copies_are_apart() -> None:
    """A prompt that several answers begin with: its cache is copied and goes on in each copy."""
    ids, mask = prompts()
    more, whole = torch.tensor([[7], [8], [9]]), torch.cat([mask, mask.new_ones(3, 1)], 1)
    with attention(model(), "kvq"):
        cache = KVQCache(model().config, CAPACITY, "int4_hq")
        forward(model(), ids, mask, **{ARGUMENT: cache})
        other = copy.deepcopy(cache)
        first = forward(model(), more, whole, **{ARGUMENT: cache})
        assert int(other.get_seq_length()) == PROMPT
        second = forward(model(), more, whole, **{ARGUMENT: other})
    assert torch.equal(first, second)


def test_the_page_says_what_is_refused() -> None:
    """The table's models are those of its script, and a refusal's words are the ones that are raised."""
    lines = [line.split(" | ") for line in transformers_matrix.PAGE.read_text().splitlines() if line.startswith("| ")]
    outcomes = {cells[0].removeprefix("| "): cells[-1].removesuffix(" |") for cells in lines}
    for chosen in ARCHITECTURES:
        if "refused" in outcomes[chosen.name]:
            words = transformers_matrix.refusal(model(chosen.name))
            assert outcomes[chosen.name] == f"refused: `{words}`"
        else:
            assert outcomes[chosen.name] == "within the bounds"
            assert KVQCache(model(chosen.name).config, CAPACITY).report().quantized
