"""A Llama of random weights, over which the examples run in seconds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from examples.llama import Llama, LlamaConfig
from examples.reading import RECALL_DISTANCE, RECALL_TOKENS

TINY = LlamaConfig(
    vocab_size=96,
    hidden_size=96,
    intermediate_size=80,
    layers=2,
    heads_q=6,
    heads_kv=2,
    head_dim=16,
    max_positions=RECALL_DISTANCE + RECALL_TOKENS,
)
MAX_TOKENS = 160


def tiny(format: str, batch: int = 1, layers: int = TINY.layers) -> Llama:
    torch.manual_seed(0)
    model = Llama(replace(TINY, layers=layers)).requires_grad_(False)
    model.embed_tokens.weight.mul_(0.02)  # else a tied model repeats its last token
    for layer in model.layers:  # keys and values of order 1
        for weight in layer.self_attn.parameters():
            weight.normal_(std=weight.size(1) ** -0.5)
    model.setup_caches(batch, MAX_TOKENS, format)
    return model


def prompt(tokens: int, batch: int = 1) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))
