"""The examples' Llama over plain caches in several spellings, and over attention that no quantized cache can serve."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from examples.llama import Llama, LlamaConfig, PlainKVCache
from kvq_ops import QuantizedKVCache

TINY = LlamaConfig(
    vocab_size=96,
    hidden_size=96,
    intermediate_size=80,
    layers=2,
    heads_q=6,
    heads_kv=2,
    head_dim=16,
    max_positions=80,
)
MAX_TOKENS = 40


class Clock:
    """Where the step stands: what a model hands its layers."""

    position: Tensor


class Cache(nn.Module):
    """A spelling of a plain cache: buffers ``key`` and ``value``, ``write`` and ``attend`` at the clock's position."""

    dtype = torch.float32
    scale: float | None = None
    tokens_first = False

    def __init__(self, clock: Clock, batch: int, heads_kv: int, head_dim: int) -> None:
        super().__init__()
        self.clock = clock
        shape = (batch, heads_kv, MAX_TOKENS, head_dim)
        if self.tokens_first:
            shape = (batch, MAX_TOKENS, heads_kv, head_dim)
        self.register_buffer("key", torch.zeros(shape, dtype=self.dtype))
        self.register_buffer("value", torch.zeros(shape, dtype=self.dtype), persistent=False)

    def append(self, key: Tensor, value: Tensor) -> None:
        self.write(self.key, key)
        self.write(self.value, value)

    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.index_copy_(2, self.clock.position, rows)

    def mask(self) -> Tensor | None:
        return torch.arange(MAX_TOKENS) <= self.clock.position[:, None]

    def attend(self, query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, self.key, self.value, attn_mask=self.mask(), enable_gqa=True)

    def number(self) -> int:
        """The position as an int in the graph."""
        position = self.clock.position.item()
        torch._check(position >= 0)
        torch._check(position < MAX_TOKENS)
        return position


class IndexCopy(Cache):
    """index_copy_, grouped heads by the attention, a comparison, a scale."""

    scale = 0.3

    def attend(self, query: Tensor) -> Tensor:
        mask = torch.arange(MAX_TOKENS).unsqueeze(0) < self.clock.position.unsqueeze(1) + 1
        return F.scaled_dot_product_attention(
            query, self.key, self.value, attn_mask=mask[None, None], scale=self.scale, enable_gqa=True
        )


class IndexPut(Cache):
    """cache[:, :, position] = rows, heads by repeat_interleave, a triangle indexed by the position."""

    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.register_buffer("triangle", torch.tril(torch.ones(MAX_TOKENS, MAX_TOKENS, dtype=torch.bool)))

    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer[:, :, self.clock.position] = rows

    def attend(self, query: Tensor) -> Tensor:
        group = query.size(1) // self.key.size(1)
        key, value = (buffer.repeat_interleave(group, dim=1) for buffer in (self.key, self.value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.triangle[None, None, self.clock.position]
        )


def repeat_heads(rows: Tensor, group: int) -> Tensor:
    batch, heads, tokens, head_dim = rows.shape
    return rows[:, :, None].expand(batch, heads, group, tokens, head_dim).reshape(batch, -1, tokens, head_dim)


class SliceAssign(Cache):
    """Slice assignment at an int, tokens before heads, heads by expand and reshape, an additive mask."""

    tokens_first = True

    def write(self, buffer: Tensor, rows: Tensor) -> None:
        position = self.number()
        buffer[:, position : position + 1] = rows.transpose(1, 2)

    def attend(self, query: Tensor) -> Tensor:
        group = query.size(1) // self.key.size(2)
        key, value = (repeat_heads(buffer.transpose(1, 2), group) for buffer in (self.key, self.value))
        hidden = torch.arange(MAX_TOKENS) > self.clock.position
        mask = torch.where(hidden, -torch.inf, 0.0)[None, None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class NarrowCopy(Cache):
    """narrow().copy_ into bfloat16, cast on reading, a mask filled with the least number."""

    dtype = torch.bfloat16

    def write(self, buffer: Tensor, rows: Tensor) -> None:
        buffer.narrow(2, self.number(), 1).copy_(rows)

    def attend(self, query: Tensor) -> Tensor:
        group = query.size(1) // self.key.size(1)
        key, value = (repeat_heads(buffer.to(query.dtype), group) for buffer in (self.key, self.value))
        mask = torch.zeros(1, 1, 1, MAX_TOKENS)
        mask.masked_fill_(torch.arange(MAX_TOKENS) > self.clock.position, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class CutAtPosition(SliceAssign):
    """The first Llama's spelling: reads rows up to the position, without a mask."""

    def attend(self, query: Tensor) -> Tensor:
        tokens = self.number() + 1
        group = query.size(1) // self.key.size(2)
        key, value = (repeat_heads(buffer[:, :tokens].transpose(1, 2), group) for buffer in (self.key, self.value))
        return F.scaled_dot_product_attention(query, key, value)


class Counter(PlainKVCache):
    """The examples' cache, whose position is a counter of its own that goes up between write and attention."""

    dtype = torch.float32
    scale = None

    def __init__(self, _: Clock, batch: int, heads_kv: int, head_dim: int) -> None:
        super().__init__(batch, heads_kv, head_dim, MAX_TOKENS, dtype=torch.float32)


class Quantized(nn.Module):
    """What a spelling becomes: the library's own cache, fed what that spelling would keep."""

    def __init__(self, spelling: type[Cache], format: str, batch: int, heads_kv: int, head_dim: int) -> None:
        super().__init__()
        self.cache = QuantizedKVCache(batch, heads_kv, head_dim, MAX_TOKENS, format=format, dtype=spelling.dtype)
        self.dtype, self.scale = spelling.dtype, spelling.scale

    def append(self, key: Tensor, value: Tensor) -> None:
        self.cache.append(key.to(self.dtype), value.to(self.dtype))

    def attend(self, query: Tensor) -> Tensor:
        return self.cache.attend(query, scale=self.scale)


class Model(Llama):
    """A decode step: tokens [batch, 1] at positions [1]."""

    clock: Clock

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.clock.position = positions
        return super().forward(tokens, positions)


def model(make_cache: Callable[..., nn.Module], batch: int = 2, config: LlamaConfig = TINY) -> Model:
    """The same weights over any cache."""
    torch.manual_seed(0)
    llama = Model(config).requires_grad_(False)
    llama.clock = Clock()
    llama.embed_tokens.weight.mul_(0.02)
    for layer in llama.layers:
        for weight in layer.self_attn.parameters():
            weight.normal_(std=weight.size(1) ** -0.5)
        layer.self_attn.cache = make_cache(llama.clock, batch, config.heads_kv, config.head_dim)
    return llama


def quantized(spelling: type[Cache], format: str = "int8", batch: int = 2, config: LlamaConfig = TINY) -> Model:
    """The model that a rewrite of ``spelling`` must equal."""
    return model(lambda _, *sizes: Quantized(spelling, format, *sizes), batch, config)


def export(llama: nn.Module, batch: int = 2, **options) -> ExportedProgram:
    step = (torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return torch.export.export(llama, step, **options)


def steps(batch: int = 2, number: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY.vocab_size, (number, batch, 1), generator=generator)
    return [(tokens[i], torch.tensor([i])) for i in range(number)]


SPELLINGS = [IndexCopy, IndexPut, SliceAssign, NarrowCopy, CutAtPosition, Counter]
