"""A Llama in every process, the tokens of its caches dealt to the processes, partial attention merged in the graph:

    torchrun --nproc-per-node 2 -m examples.context_parallel

Gloo on CPUs; with CUDA the same code takes NCCL (not run on a GPU).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from examples.llama import Llama
from examples.parallel import MAX_TOKENS, arguments, compare_with_one, process_group, random_llama, report
from kvq_ops.integrations.distributed import TokenParallelCache

STRIPE = 16
"""Tokens that stay together: small, so that a short text reaches every rank."""


def deal_tokens(model: Llama, group: ProcessGroup, format: str) -> Llama:
    """Gives every layer its rank's share of a cache, in place."""
    config, dtype = model.config, model.embed_tokens.weight.dtype
    for layer in model.layers:
        layer.self_attn.cache = TokenParallelCache(
            1, config.heads_kv, config.head_dim, MAX_TOKENS, group=group, stripe=STRIPE, format=format, dtype=dtype
        )
    return model


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("torchrun -m examples.context_parallel", "Tokens by rank.", argv)
    with process_group() as device:
        model, one = (random_llama(device) for _ in range(2))
        deal_tokens(model, dist.group.WORLD, args.format).to(device)
        one.setup_caches(1, MAX_TOKENS, args.format)
        outcome = compare_with_one(model, one.to(device), args.tokens)
        report(outcome, model, one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
