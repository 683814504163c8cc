"""Decoding in gpt-fast's shape: a prefill and a decode_one_token, each compiled whole, driven by ``input_pos``.

Such a model has ``Attention`` over ``KVCache``; ``QuantizedAttention`` over ``QuantizedKVCache`` differs from it in
three lines, which docs/moving_over/gpt_fast.md shows. ``python -m examples.gpt_fast --help`` lists the options; the
model is the demo's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import llama
from examples.llama import PLAIN, Llama, LlamaConfig, rotate
from examples.smollm2 import load_model
from kvq_ops import QuantizedKVCache

PROMPT = "What is the capital of Italy, and what is it famous for?"
Step = Callable[["Transformer", Tensor, Tensor], Tensor]


class KVCache(nn.Module):
    """Keys and values of one layer, [batch, heads_kv, max_tokens, head_dim], of which a mask shows a part."""

    def __init__(self, batch: int, heads_kv: int, head_dim: int, max_tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("key", "value"):
            rows = torch.zeros(batch, heads_kv, max_tokens, head_dim, dtype=dtype)
            self.register_buffer(name, rows, persistent=False)

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.key.index_copy_(2, input_pos, key), self.value.index_copy_(2, input_pos, value)


class Attention(llama.Attention):
    def setup_cache(self, batch: int, max_tokens: int, dtype: torch.dtype, _: str) -> None:
        shape = (batch, self.config.heads_kv, self.config.head_dim, max_tokens)
        self.kv_cache = KVCache(*shape, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        q = rotate(self.heads(self.q_proj(x)), cos, sin)
        k = rotate(self.heads(self.k_proj(x)), cos, sin)
        v = self.heads(self.v_proj(x))
        k, v = self.kv_cache.update(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class QuantizedAttention(Attention):
    def setup_cache(self, batch: int, max_tokens: int, dtype: torch.dtype, format: str) -> None:
        shape = (batch, self.config.heads_kv, self.config.head_dim, max_tokens)
        self.kv_cache = QuantizedKVCache(*shape, dtype=dtype, format=format)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:  # noqa: ARG002
        q = rotate(self.heads(self.q_proj(x)), cos, sin)
        k = rotate(self.heads(self.k_proj(x)), cos, sin)
        v = self.heads(self.v_proj(x))
        self.kv_cache.append(k, v)
        y = self.kv_cache.attend(q)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(llama.Block):
    def __init__(self, config: LlamaConfig, attention: type[Attention]) -> None:
        super().__init__(config)
        self.self_attn = attention(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, input_pos)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(Llama):
    """The weights of examples/llama.py; ``format`` is that of the cache, or ``plain``."""

    def __init__(self, config: LlamaConfig, format: str) -> None:
        super().__init__(config)
        self.format = format
        attention = Attention if format == PLAIN else QuantizedAttention
        self.layers = nn.ModuleList(Block(config, attention) for _ in range(config.layers))

    def setup_caches(self, batch: int, max_tokens: int) -> None:
        for layer in self.layers:
            layer.self_attn.setup_cache(batch, max_tokens, self.embed_tokens.weight.dtype, self.format)
        mask = torch.ones(max_tokens, max_tokens, dtype=torch.bool).tril()
        self.register_buffer("causal_mask", mask, persistent=False)

    def new_sequence(self) -> None:
        """A plain cache starts anew where ``input_pos`` does; a quantized one keeps count itself."""
        for layer in self.layers if self.format != PLAIN else ():
            layer.self_attn.kv_cache.reset()

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        """Logits [batch, tokens, vocab] of ``idx`` [batch, tokens] at positions ``input_pos`` [tokens]."""
        mask = self.causal_mask[input_pos]
        x = self.embed_tokens(idx)
        cos, sin = self.cos[input_pos].type_as(x), self.sin[input_pos].type_as(x)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, input_pos)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def prefill(model: Transformer, x: Tensor, input_pos: Tensor) -> Tensor:
    """The token after a prompt x [batch, tokens]: [batch, 1]."""
    return model(x, input_pos)[:, -1:].argmax(-1)


def decode_one_token(model: Transformer, x: Tensor, input_pos: Tensor) -> Tensor:
    """The token after x [batch, 1] at input_pos [1]."""
    return model(x, input_pos)[:, -1:].argmax(-1)


def compiled() -> tuple[Step, Step]:
    """Prompts have any length; a step's shapes never change, so CUDA graphs can take it."""
    return (
        torch.compile(prefill, fullgraph=True, dynamic=True),
        torch.compile(decode_one_token, fullgraph=True, mode="reduce-overhead"),
    )


@torch.no_grad()
def generate(model: Transformer, prompt: Tensor, new_tokens: int, steps: tuple[Step, Step]) -> Tensor:
    """Greedy: ``new_tokens`` tokens [batch, new_tokens] after prompt [batch, tokens]."""
    first, step = steps
    model.new_sequence()
    token = first(model, prompt, torch.arange(prompt.size(1)))
    input_pos, tokens = torch.tensor([prompt.size(1)]), [token]
    for _ in range(new_tokens - 1):
        token = step(model, token, input_pos).clone()
        tokens.append(token)
        input_pos.add_(1)
    return torch.cat(tokens, dim=1)


def from_llama(model: Llama, format: str) -> Transformer:
    """The same weights."""
    with torch.device("meta"):
        transformer = Transformer(model.config, format)
    transformer.load_state_dict(model.state_dict(), assign=True)
    transformer.setup_rope()
    return transformer.eval().requires_grad_(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A model decodes in gpt-fast's shape over a plain or quantized cache.")
    parser.add_argument("--cache", default="int8_hq", help="a format of kvq_ops, or plain (default: int8_hq)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args(arguments)
    weights, tokenizer = load_model(torch.float32)
    model, steps = from_llama(weights, args.cache), compiled()
    chat = [{"role": "user", "content": args.prompt}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    prompt = encoded["input_ids"]
    model.setup_caches(1, prompt.size(1) + args.new_tokens)
    generate(model, prompt, 3, steps)  # compiles
    start = time.perf_counter()
    tokens = generate(model, prompt, args.new_tokens, steps)
    seconds = time.perf_counter() - start
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    print(f"{args.cache}: {args.new_tokens / seconds:.1f} tokens/s, prompt of {prompt.size(1)} tokens included")


if __name__ == "__main__":
    main()
