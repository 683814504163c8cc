"""The error of attention over every format on three kinds of data, harmless to hostile.

    python -m benchmarks.quality > benchmarks/QUALITY.md

Relative L2 error of attend with fp32 queries against float64 attention on the data before quantisation; the mean over
seeds 0, 1, 2 ..., and its standard error. tests/data.py makes the data. examples/quality.py asks a real model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import kvq_ops
from kvq_ops import FORMATS, QuantizedKVCache

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from data import KINDS, make

BARS = {"int4_hq": (0.127, 0.130, 0.125), "int8_hq": (0.0078, 0.010, 0.011)}
"""The most that a format may miss by, for each kind."""
HEADS_Q, HEADS_KV = 8, 2


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Float64 attention of query [1, Hq, D] over key and value [1, Hkv, tokens, D]."""
    groups = query.double().unflatten(1, (HEADS_KV, -1))
    logits = groups @ key.double().transpose(2, 3) / query.shape[-1] ** 0.5
    return (logits.softmax(-1) @ value.double()).flatten(1, 2)


def errors(names: Sequence[str], kind: str, head_dim: int, tokens: int, seed: int) -> dict[str, float]:
    query, key, value = make(kind, 1, HEADS_Q, HEADS_KV, head_dim, tokens, seed)
    want, found = attention(query, key, value), {}
    for name in names:
        cache = QuantizedKVCache(1, HEADS_KV, head_dim, tokens, format=name, dtype=torch.float32)
        cache.append(key, value)
        got = cache.attend(query)
        found[name] = float((got - want).norm() / want.norm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=12)
    args = parser.parse_args()
    print(
        f"# Error of attention\n\nCommand: `python -m benchmarks.quality {' '.join(sys.argv[1:])}`\n".replace(
            " `\n", "`\n"
        )
    )
    print(f"head_dim {args.head_dim}, {args.tokens} tokens, {HEADS_Q} query heads over {HEADS_KV} KV heads, seeds 0 to")
    print(f"{args.seeds - 1}, kernels `{kvq_ops.cpu_isa()}`. Mean ± standard error of the relative L2 error.\n")
    print(f"| format | bits a value | {' | '.join(KINDS)} | bars |\n|---|--:|{'--:|' * len(KINDS)}---|")
    with torch.inference_mode():
        runs = {
            kind: [errors(args.formats, kind, args.head_dim, args.tokens, seed) for seed in range(args.seeds)]
            for kind in KINDS
        }
    for name in args.formats:
        cells, verdicts = [], []
        for kind, bar in zip(KINDS, BARS.get(name, (None,) * len(KINDS)), strict=True):
            found = [run[name] for run in runs[kind]]
            mean, spread = (
                statistics.mean(found),
                statistics.stdev(found) / len(found) ** 0.5 if args.seeds > 1 else 0.0,
            )
            cells.append(f"{mean:.4f} ± {spread:.4f}")
            if bar is not None:
                verdicts.append(f"{bar} {'holds' if mean <= bar else 'MISSED'}")
        bits = kvq_ops.get_format(name).bits_per_value(args.head_dim)
        print(f"| `{name}` | {bits:.3f} | {' | '.join(cells)} | {', '.join(verdicts)} |")


if __name__ == "__main__":
    main()
