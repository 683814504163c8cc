"""A Llama in plain PyTorch, batch of equal positions, whose KV cache is a module per layer.

Attention calls ``cache.append(key, value)`` and then ``cache.attend(query)``: which cache that is, is decided in
:func:`make_cache` and nowhere else. Parameter names are those of ``transformers``' ``LlamaModel``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvq_ops

PLAIN = "plain"


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 8192


class PlainKVCache(nn.Module):
    """Static buffers in the model's dtype; every sequence of the batch has the same length."""

    def __init__(self, batch: int, heads_kv: int, head_dim: int, max_tokens: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (batch, heads_kv, max_tokens, head_dim)
        self.register_buffer("key", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("value", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int32), persistent=False)

    def append(self, key: Tensor, value: Tensor) -> None:
        index = self.lengths[0] + torch.arange(key.size(2), device=key.device)
        self.key.index_copy_(2, index, key)
        self.value.index_copy_(2, index, value)
        self.lengths.add_(key.size(2))

    def attend(self, query: Tensor) -> Tensor:
        tokens, max_tokens = query.size(2), self.key.size(2)
        row = self.lengths[0] - tokens + torch.arange(tokens, device=query.device)
        mask = torch.arange(max_tokens, device=query.device) <= row[:, None]
        return F.scaled_dot_product_attention(query, self.key, self.value, attn_mask=mask, enable_gqa=True)

    def reset(self) -> None:
        self.lengths.zero_()

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + self.lengths.nbytes

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.key[0, :, 0].nbytes


def make_cache(config: LlamaConfig, batch: int, max_tokens: int, format: str, dtype: torch.dtype) -> nn.Module:
    """One layer's cache. The swap from a plain to a quantized cache is these two lines."""
    shape = (batch, config.heads_kv, config.head_dim, max_tokens)
    if format == PLAIN:
        return PlainKVCache(*shape, dtype=dtype)
    return kvq_ops.QuantizedKVCache(*shape, format=format, dtype=dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


def rope_angles(config: LlamaConfig) -> Tensor:
    """Angles [max_positions, head_dim]: channel i and i + head_dim / 2 make a pair."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), config.rope_theta**-exponent)
    return torch.cat([angles, angles], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size_q, size_kv = config.heads_q * config.head_dim, config.heads_kv * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size_q, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, size_kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, size_kv, bias=False)
        self.o_proj = nn.Linear(size_q, config.hidden_size, bias=False)
        self.cache: nn.Module | None = None

    def heads(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.heads(self.q_proj(x)), cos, sin)
        key = rotate(self.heads(self.k_proj(x)), cos, sin)
        self.cache.append(key, self.heads(self.v_proj(x)))
        return self.o_proj(self.cache.attend(query).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.setup_rope()

    def setup_rope(self) -> None:
        """Tables [max_positions, head_dim]: no weights, so made anew where a checkpoint is loaded."""
        angles = rope_angles(self.config)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def setup_caches(self, batch: int, max_tokens: int, format: str) -> None:
        """Give every layer an empty cache: ``plain`` or a format of kvq_ops."""
        for layer in self.layers:
            dtype = self.embed_tokens.weight.dtype
            layer.self_attn.cache = make_cache(self.config, batch, max_tokens, format, dtype)

    @property
    def caches(self) -> list[nn.Module]:
        return [layer.self_attn.cache for layer in self.layers]

    def reset_caches(self) -> None:
        for cache in self.caches:
            cache.reset()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, T, vocab] of ``tokens`` [batch, T], which extend the caches at ``positions`` [T]."""
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[positions].type_as(x), self.sin[positions].type_as(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)
