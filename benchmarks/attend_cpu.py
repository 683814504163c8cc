"""attend over int8 and int4 caches on the CPU, beside the machine's read bandwidth and every peer that is installed.

    python -m benchmarks.attend_cpu --quick
    python -m benchmarks.attend_cpu --geometry G2 --tokens 4096 --threads 1 --only kvq,floor

One process and one run: all contenders of a cell are built, checked against float64 attention, and timed in rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import bandwidth, peers, report
from benchmarks.common import (
    COLD_BYTES,
    GEOMETRIES,
    Case,
    Contender,
    Geometry,
    cache_size,
    command,
    csv,
    geometries,
    machine,
    relative_error,
    save,
)
from benchmarks.summary import summary
from benchmarks.timing import CLOCKS, Entry, measure

DEFAULT_TOKENS = {"G1": (512, 2048, 8192), "G2": (1024, 4096, 16384), "G3": (512, 4096)}
QUICK_TOKENS = {"G1": (8192,), "G2": (4096,), "G3": (4096,)}
QUERY_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--geometry",
        type=geometries,
        default=list(GEOMETRIES.values()),
        help=f"of {', '.join(GEOMETRIES)}; default all",
    )
    parser.add_argument("--tokens", type=csv, help="cache lengths, or all (default: up to 16384)")
    parser.add_argument("--threads", type=csv, default=["1", "2"])
    parser.add_argument("--mode", type=csv, help="cold, hot (default: both)")
    parser.add_argument("--query", type=csv, default=["fp32"], help=f"our query dtypes, of {', '.join(QUERY_DTYPES)}")
    parser.add_argument("--only", type=csv, default=[], help=f"of {', '.join(peers.ORDER)}; a beginning will do")
    parser.add_argument("--rounds", type=int, help="over all contenders (default 5, quick 3)")
    parser.add_argument("--seconds", type=float, default=0.1, help="timed for each contender in each round")
    parser.add_argument("--footprint", type=int, help="MiB that a cold contender rotates (256, or twice a smaller L3)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a busy machine, 1 thread only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="PNG")
    parser.add_argument("--quick", action="store_true", help="one length for each geometry, cold")
    arguments = parser.parse_args(argv)
    for name in arguments.query:
        if name not in QUERY_DTYPES:
            parser.error(f"--query must be of {', '.join(QUERY_DTYPES)}, got {name}")
    for name in arguments.only:
        if not any(peer.startswith(name) for peer in peers.ORDER):
            parser.error(f"--only must be of {', '.join(peers.ORDER)}, got {name}")
    arguments.mode = arguments.mode or (["cold"] if arguments.quick else ["cold", "hot"])
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 5)
    return arguments


def lengths(geometry: Geometry, arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.tokens == ["all"]:
        return geometry.tokens
    if arguments.tokens:
        return tuple(map(int, arguments.tokens))
    return (QUICK_TOKENS if arguments.quick else DEFAULT_TOKENS)[geometry.name]


def chosen(only: list[str]) -> tuple[list[Any], dict[str, str], dict[str, str]]:
    """The modules to time, their versions, and the reasons of those that cannot run here."""
    names = [name for name in peers.ORDER if not only or any(name.startswith(part) for part in only)]
    loaded = {name: peers.load(name) for name in names}
    missing = {name: module for name, module in loaded.items() if isinstance(module, str)}
    modules = {name: module for name, module in loaded.items() if name not in missing}
    return list(modules.values()), {name: module.VERSION for name, module in modules.items()}, missing


def contenders(case: Case, module: Any, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    """The lines of one module; a peer that fails on the case is named on stderr and left out of this cell."""
    try:
        yield from module.make(case, query_dtypes)
    except Exception as error:
        if module.__name__.endswith((".kvq", ".floor")):
            raise
        where = f"{case.geometry.name} {case.tokens} tokens"
        print(f"{module.__name__} failed at {where}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)


def run_cell(case: Case, modules: list[Any], arguments: argparse.Namespace) -> list[report.Row]:
    torch.set_num_threads(case.threads)
    dtypes = [QUERY_DTYPES[name] for name in arguments.query]
    entries = {entry.name: entry for module in modules for entry in contenders(case, module, dtypes)}
    errors = {name: relative_error(entry, case) for name, entry in entries.items()}

    def yardstick(entry: Contender) -> str | None:
        name = f"floor int{min(entry.bits, 8)}"
        return name if name in entries and entry.name != name else None

    timings = measure(
        {name: Entry(entry.calls, yardstick(entry), entry.settle) for name, entry in entries.items()},
        threads=case.threads,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        clock=arguments.clock,
    )
    cell = case.geometry.name, case.tokens, case.threads, case.mode
    return [
        report.Row(
            *cell,
            name,
            entry.bits,
            entry.nbytes,
            len(entry.calls),
            **asdict(timings[name]),
            error=errors[name],
            note=entry.note,
        )
        for name, entry in entries.items()
    ]


def footprints(cold: int) -> list[int]:
    """Around the cold footprint, up to twice the L3 or 1 GiB: flat from there on means that cold reads memory."""
    return sorted({32 << 20, cold, min(max(2 * cache_size(3), 2 * cold), 1 << 30)})


def main(argv: list[str] | None = None) -> list[report.Row]:
    arguments = options(argv)
    threads = list(map(int, arguments.threads))
    cold = arguments.footprint << 20 if arguments.footprint else min(COLD_BYTES, 2 * cache_size(3) or COLD_BYTES)
    modules, versions, missing = chosen(arguments.only)
    run = {
        "command": command("attend_cpu", argv),
        "machine": machine(),
        "versions": versions,
        "missing": missing,
        "footprint": cold,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "clock": arguments.clock,
        "bandwidth": {},
    }
    if "floor" in versions and "cold" in arguments.mode:
        run["bandwidth"] = {count: bandwidth.read_by_footprint(count, footprints(cold)) for count in threads}
    print(report.preamble(run), flush=True)
    rows: list[report.Row] = []
    for geometry in arguments.geometry:
        for tokens in lengths(geometry, arguments):
            for mode in arguments.mode:
                for count in threads:
                    case = Case(geometry, tokens, count, cold if mode == "cold" else 0)
                    rows += (found := run_cell(case, modules, arguments))
                    gc.collect()
                    print(f"\n{report.table(report.Cell(found))}", flush=True)
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f}")
    if ours := summary(rows):
        print(f"\n{ours}")
    save(arguments.json, {**run, "rows": [asdict(row) for row in rows]})
    if arguments.picture:
        importlib.import_module("benchmarks.plot").picture(rows, arguments.picture)
    return rows


if __name__ == "__main__":
    main()
