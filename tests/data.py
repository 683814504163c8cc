"""Three kinds of keys, values and queries, from harmless to hostile.

normal: everything N(0, 1). outlier: keys as RoPE models have them (log-normal channel scales, up to four channels of
the slowest quarter of pairs with means of 8 to 16 sigma), a dozen keys that each query head matches strongly, a sink
at token 0, heavy-tailed values. extreme: the same with means of 40 to 80 sigma.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

KINDS = ("normal", "outlier", "extreme")
MATCHES = 12


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates channel pairs (i, i + D / 2) of x [..., D] by angles of their positions."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 1e4 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def raise_logits(key: Tensor, query: Tensor, at: Tensor, probability: Tensor) -> None:
    """Moves the keys [tokens, D] at some tokens along query [D], so that these get about the wanted probabilities."""
    logits = key @ query / math.sqrt(query.shape[0])
    wanted = logits.logsumexp(0) + probability.log()
    key[at] += ((wanted - logits[at]) * math.sqrt(query.shape[0]) / query.square().sum())[:, None] * query


@functools.lru_cache(maxsize=128)
def make(
    kind: str, batch: int, heads_q: int, heads_kv: int, head_dim: int, tokens: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, Hq, D] of the position after the last, key and value [B, Hkv, tokens, D], fp32. Not to be written."""
    generator = torch.Generator().manual_seed(seed + 7919 * KINDS.index(kind))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = (
        normal(batch, heads_q, head_dim),
        normal(batch, heads_kv, tokens, head_dim),
        normal(batch, heads_kv, tokens, head_dim),
    )
    if kind == "normal":
        return query.float(), key.float(), value.float()
    low, high = {"outlier": (8.0, 16.0), "extreme": (40.0, 80.0)}[kind]
    half, slow = head_dim // 2, head_dim // 8
    means = torch.zeros(batch, heads_kv, head_dim, dtype=torch.float64)
    for row in means.flatten(0, 1):
        channels = half - 1 - torch.randperm(slow, generator=generator)[:4]
        channels += half * torch.randint(0, 2, channels.shape, generator=generator)
        sizes = low + (high - low) * torch.rand(channels.shape, generator=generator, dtype=torch.float64)
        row[channels] = sizes * normal(*channels.shape).sign()
    key = key * (0.3 * normal(batch, heads_kv, 1, head_dim)).exp() + means[:, :, None]
    key = rope(key, torch.arange(tokens, dtype=torch.float64))
    query = rope(query[:, :, None], torch.tensor([tokens], dtype=torch.float64))[:, :, 0]
    value /= torch.stack([normal(*value.shape).square() for _ in range(5)]).mean(0).sqrt()
    group, matches = heads_q // heads_kv, min(MATCHES, tokens - 1)
    for b in range(batch):
        for h in range(heads_q):
            at = 1 + torch.randperm(tokens - 1, generator=generator)[:matches]
            peaks = torch.linspace(0.12, 0.03, matches, dtype=torch.float64)
            raise_logits(key[b, h // group], query[b, h], at, peaks)
        for h in range(0, heads_q, group):
            raise_logits(key[b, h // group], query[b, h], torch.tensor([0]), torch.tensor([0.1], dtype=torch.float64))
    value[:, :, 0] *= 0.1
    return query.float(), key.float(), value.float()
