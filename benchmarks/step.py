"""One compiled decode step over int8, int4 and the plain cache with SDPA, in tokens a second.

python -m benchmarks.step --model one-layer --dtype bf16,fp32

Two models with random weights: the demo's (SmolLM2-135M's shape) and one layer with G2's attention.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command, csv, describe, machine, save
from benchmarks.report import columns, milliseconds, spread
from benchmarks.timing import Entry, measure
from examples.llama import PLAIN, Llama, LlamaConfig

ROOM = 8
"""Tokens of capacity beside those that the step finds."""
MODELS = {
    "demo": (LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 100000.0), (512, 4096, 8192)),
    "one-layer": (LlamaConfig(1024, 768, 2048, 1, 24, 4, 256), (512, 4096, 8192, 32768)),
}
"""Configuration and cache lengths. The one layer's other weights are small, 31 MB in bf16, so that attention shows."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def filled_model(weights: Llama, tokens: int, format: str) -> Llama:
    """A model on the same weights with its caches holding ``tokens`` random tokens."""
    model = Llama(weights.config)
    model.load_state_dict(weights.state_dict(), assign=True)
    model.setup_caches(1, tokens + ROOM, format)
    config, dtype = weights.config, weights.embed_tokens.weight.dtype
    for cache in model.caches:
        for start in range(0, tokens, 4096):
            shape = 1, config.heads_kv, min(4096, tokens - start), config.head_dim
            cache.append(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    return model.eval().requires_grad_(False)


class Steps:
    """A compiled model whose step finds as many tokens as it is told: the lengths go back first, 0.1 us a layer."""

    def __init__(self, model: Llama) -> None:
        self.step = torch.compile(model, fullgraph=True)
        self.views = [cache.lengths.numpy() for cache in model.caches]
        self.bytes_per_token = sum(cache.bytes_per_token for cache in model.caches)
        self.token = torch.zeros(1, 1, dtype=torch.int64)

    def at(self, tokens: int) -> Callable[[], torch.Tensor]:
        position = torch.tensor([tokens])

        def run() -> torch.Tensor:
            for view in self.views:
                view[0] = tokens
            with torch.no_grad():
                return self.step(self.token, position)

        return run


def rows(name: str, dtype: str, lengths: list[int], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One model. The plain cache is as long as the step needs, since SDPA reads its whole capacity behind a mask; ours
    has one capacity for all lengths and is compiled once for each number of threads, which compiled code holds."""
    torch.manual_seed(0)
    torch.compiler.reset()
    config = replace(MODELS[name][0], max_positions=max(lengths) + ROOM)
    weights = Llama(config).to(DTYPES[dtype])
    ours = {format: Steps(filled_model(weights, max(lengths), format)) for format in arguments.format}
    plain = {tokens: Steps(filled_model(weights, tokens, PLAIN)) for tokens in lengths}
    for threads in map(int, arguments.threads):
        torch.set_num_threads(threads)
        for tokens in lengths:
            steps = {PLAIN: plain[tokens], **ours}
            entries = {format: Entry([step.at(tokens)]) for format, step in steps.items()}
            begin = time.perf_counter()
            for entry in entries.values():
                entry.calls[0]()
            seconds = time.perf_counter() - begin
            what = f"{name} {dtype}, {threads} thread(s), {tokens} tokens"
            print(f"{what}: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
            timings = measure(entries, threads=threads, rounds=arguments.rounds, seconds=arguments.seconds)
            for format, timing in timings.items():
                facts = {"model": name, "dtype": dtype, "tokens": tokens, "threads": threads, "cache": format}
                nbytes = steps[format].bytes_per_token * tokens
                speedup = timings[PLAIN].median / timing.median
                yield {**facts, **asdict(timing), "nbytes": nbytes, "speedup": speedup}


def shown(row: dict[str, Any]) -> list[str]:
    facts = [f"{row['model']} {row['dtype']}", str(row["tokens"]), str(row["threads"]), row["cache"]]
    rate = f"{1 / row['median']:.1f}"
    return [
        *facts,
        f"{row['nbytes'] / 2**20:.1f}",
        milliseconds(row["median"]),
        spread(row["median"], row["iqr"]),
        rate,
        f"{row['speedup']:.2f}x",
    ]


HEADER = ["model", "tokens", "threads", "cache", "cache MiB", "ms a step", "spread", "tokens/s", "vs plain"]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=csv, default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--dtype", type=csv, default=["bf16"], help=f"of {', '.join(DTYPES)}; of weights and plain cache"
    )
    parser.add_argument("--tokens", type=csv, help="default: 512, 4096, 8192, and 32768 for the one layer")
    parser.add_argument("--format", type=csv, default=["int8", "int4"])
    parser.add_argument("--threads", type=csv, default=["1", "2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch._dynamo.config.recompile_limit = 64  # one module code for every cache and number of threads
    facts = machine()
    print(describe(facts), flush=True)
    found: list[dict[str, Any]] = []
    for name in arguments.model:
        for dtype in arguments.dtype:
            found += rows(name, dtype, list(map(int, arguments.tokens or MODELS[name][1])), arguments)
    print(f"\n{columns(HEADER, map(shown, found))}")
    save(arguments.json, {"command": command("step", argv), "machine": facts, "rows": found})
    return found


if __name__ == "__main__":
    main()
