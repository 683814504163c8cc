"""attend over every cache format, beside ``int4`` timed right before it.

python -m benchmarks.formats --geometry G2 --tokens 4096 --format int4_hq,int8_hq
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvq_ops
from benchmarks.common import COLD_BYTES, GEOMETRIES, Case, command, csv, describe, geometries, machine, save
from benchmarks.report import columns, milliseconds, spread, times
from benchmarks.timing import Entry, measure

BASE = "int4"
FORMATS = ["int8", "int8_kivi", "int8_hq", "int4_kivi", "int4_hq", "k8v4", "int4_g32", "int4_g64"]
DTYPE = torch.bfloat16
"""Of the query, and of the rows that a format keeps in full precision."""


def entry(case: Case, name: str) -> tuple[Entry, int]:
    """Calls over copies of one full cache, and the bytes of one."""
    geometry, tokens = case.geometry, case.tokens
    generator = torch.Generator().manual_seed(0)
    shape = geometry.batch, geometry.heads_kv, geometry.head_dim
    cache = kvq_ops.QuantizedKVCache(*shape, tokens, format=name, dtype=DTYPE)
    rows = (geometry.batch, geometry.heads_kv, tokens, geometry.head_dim)
    cache.append(*(torch.randn(rows, generator=generator).to(DTYPE) for _ in range(2)))
    query = torch.randn(geometry.batch, geometry.heads_q, geometry.head_dim, generator=generator).to(DTYPE)
    copies = [cache, *(copy.deepcopy(cache) for _ in range(case.copies(cache.nbytes) - 1))]
    return Entry([partial(one.attend, query) for one in copies], None if name == BASE else BASE), cache.nbytes


def cell(case: Case, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one geometry and length."""
    made = {name: entry(case, name) for name in [BASE, *(name for name in arguments.format if name != BASE)]}
    timings = measure(
        {name: each for name, (each, _) in made.items()},
        threads=case.threads,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        clock=arguments.clock,
    )
    for name, timing in timings.items():
        nbytes = made[name][1]
        facts = {"geometry": case.geometry.name, "tokens": case.tokens, "threads": case.threads, "format": name}
        yield {**facts, **asdict(timing), "nbytes": nbytes, "of base bytes": nbytes / made[BASE][1]}


def shown(row: dict[str, Any]) -> list[str]:
    facts = [row["geometry"], str(row["tokens"]), str(row["threads"]), row["format"], f"{row['nbytes'] / 2**20:.1f}"]
    ratio = times(row["ratio"] or 1.0)
    return [*facts, milliseconds(row["median"]), spread(row["median"], row["iqr"]), ratio, times(row["of base bytes"])]


HEADER = ["geometry", "tokens", "threads", "format", "MiB", "ms", "spread", f"time over {BASE}", f"bytes over {BASE}"]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", type=geometries, default=[GEOMETRIES["G2"], GEOMETRIES["G3"]])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in csv(text)], default=[4096, 8192])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--format", type=csv, default=FORMATS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--footprint", type=int, default=COLD_BYTES >> 20, help="MiB that each format rotates; 0: hot")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a busy machine, 1 thread only"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    facts = machine()
    print(describe(facts), flush=True)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for geometry in arguments.geometry:
            for tokens in arguments.tokens:
                found += cell(Case(geometry, tokens, arguments.threads, arguments.footprint << 20), arguments)
    print(f"\n{columns(HEADER, map(shown, found))}")
    save(arguments.json, {"command": command("formats", argv), "machine": facts, "rows": found})
    return found


if __name__ == "__main__":
    main()
