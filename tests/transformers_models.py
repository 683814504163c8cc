"""What the tests of the transformers integration share: models, prompts, and the model without a cache as judge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CompileConfig

from benchmarks.tiny_models import ARGUMENT, BOUNDS, LAYERS, VOCABULARY, architecture, error, tiny_model

PADDING = (5, 0, 2)
PROMPT, NEW, CAPACITY = 14, 24, 64

__all__ = ["ARGUMENT", "BOUNDS", "CAPACITY", "NEW", "PADDING", "PROMPT", "VOCABULARY", "error"]


@functools.cache
def model(name: str = "Llama", seed: int = 0, layers: int = LAYERS) -> PreTrainedModel:
    chosen = architecture(name)
    given = {"num_hidden_layers": layers}
    if "layer_types" in chosen.given:
        given["layer_types"] = chosen.given["layer_types"][:layers]
    return tiny_model(chosen, seed, **given)


def prompts(tokens: int = PROMPT, padding: tuple[int, ...] = PADDING, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids [batch, tokens] and their mask, padded at the left."""
    ids = torch.randint(1, VOCABULARY, (len(padding), tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for b, count in enumerate(padding):
        ids[b, :count], mask[b, :count] = 0, 0
    return ids, mask


@contextmanager
def attention(chosen: PreTrainedModel, name: str) -> Iterator[None]:
    before = chosen.config._attn_implementation
    chosen.set_attn_implementation(name)
    try:
        yield
    finally:
        chosen.set_attn_implementation(before)


def generate(chosen: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor, **given: Any) -> Any:
    """generate() over a quantized cache, no token ending it, logits and scores kept."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    name = given.pop("argument", ARGUMENT)
    with attention(chosen, "kvq"), torch.inference_mode():
        return chosen.generate(ids, attention_mask=mask, **{name: cache}, **(options | given))


def forward(chosen: PreTrainedModel, ids: Tensor, mask: Tensor, **given: Any) -> Tensor:
    """One call of the model, over a cache in ``given`` that holds what the mask is longer by."""
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.inference_mode():
        return chosen(input_ids=ids, attention_mask=mask, position_ids=position_ids, **given).logits


def plain_logits(chosen: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The judge: the whole text at once, in full precision, by the model's own eager attention."""
    with attention(chosen, "eager"):
        return forward(chosen, ids, mask, use_cache=False)


def whole_mask(mask: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([mask, mask.new_ones(ids.shape[0], ids.shape[1] - mask.shape[1])], 1)


def generated_error(chosen: PreTrainedModel, output: Any, mask: Tensor) -> float:
    """How far the logits of a generated text are from the judge's, which reads the same text."""
    ids = output.sequences
    found = torch.stack(output.logits, 1)
    expected = plain_logits(chosen, ids, whole_mask(mask, ids))
    return error(found, expected[:, -found.shape[1] - 1 : -1])


def compiled(**given: Any) -> CompileConfig:
    """generate() compiles on the CPU too."""
    config = CompileConfig(**({"fullgraph": True, "mode": "default"} | given))
    config._compile_all_devices = True
    return config
