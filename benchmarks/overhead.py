"""What a call costs beside its arithmetic at short contexts, and its tail while other threads keep every core busy.

python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import bandwidth
from benchmarks.common import GEOMETRIES, Case, command, csv, describe, geometries, machine, save
from benchmarks.peers.kvq import cache
from benchmarks.report import columns
from benchmarks.timing import Entry, measure, samples

SHORT, LONGER = 128, 1152
"""Tokens: the slope between them is the arithmetic of a token."""
BUSY_TOKENS = 2048
QUERIES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def short_calls(case: Case, name: str, dtype: torch.dtype) -> dict[str, Entry]:
    """Calls over one hot cache that differ in what they find to do."""
    parts, _ = cache(case, name)
    query = case.query.to(dtype)
    none = query[:, :, None][:, :, :0]

    def at(tokens: int, of: torch.Tensor = query) -> Entry:
        lengths = torch.full((case.geometry.batch,), tokens, dtype=torch.int32)
        return Entry([partial(torch.ops.kvq.attend, of, *parts, lengths, name)])

    return {
        "cpu_isa": Entry([torch.ops.kvq.cpu_isa]),
        "empty query": at(0, none),
        "length 0": at(0),
        f"{SHORT} tokens": at(SHORT),
        f"{LONGER} tokens": at(LONGER),
    }


def short_row(case: Case, name: str, dtype: str, rounds: int, seconds: float) -> dict[str, Any]:
    timings = measure(short_calls(case, name, QUERIES[dtype]), threads=case.threads, rounds=rounds, seconds=seconds)
    micros = {what: timing.median * 1e6 for what, timing in timings.items()}
    short, longer = micros[f"{SHORT} tokens"], micros[f"{LONGER} tokens"]
    arithmetic = (longer - short) / (LONGER - SHORT) * SHORT
    facts = {"geometry": case.geometry.name, "threads": case.threads, "format": name, "query": dtype}
    overhead = {"arithmetic": arithmetic, "overhead": short - arithmetic}
    return {**facts, **micros, **overhead, "over dispatch": (short - arithmetic) / micros["empty query"]}


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """One process a core that never sleeps, ended on the way out."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def tail(call: Callable[[], Any], count: int) -> dict[str, float]:
    """Median and 99th percentile in ms, and their ratio."""
    samples(call, count // 10 + 1)
    seconds = sorted(samples(call, count))
    median, p99 = statistics.median(seconds), seconds[int(0.99 * (count - 1))]
    return {"median": median * 1e3, "p99": p99 * 1e3, "p99/median": p99 / median}


def busy_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """The plain read on one thread shows what the scheduler alone does to a call of that length."""
    nbytes = case.geometry.cache_bytes(case.tokens, 8, 4)
    memory = bandwidth.arena(nbytes)
    calls: dict[str, Callable[[], Any]] = {
        "read, 1 thread": lambda: bandwidth.library().kvq_read(memory.data_ptr(), nbytes, 1)
    }
    lengths = torch.full((case.geometry.batch,), case.tokens, dtype=torch.int32)
    for name in ("int8", "int4"):
        calls[f"kvq {name}"] = partial(torch.ops.kvq.attend, case.query, *cache(case, name)[0], lengths, name)
    key, value = case.tiled(case.key), case.tiled(case.value)
    query = case.query[:, :, None]
    calls["torch SDPA fp32"] = partial(scaled_dot_product_attention, query, key, value, enable_gqa=True)
    return calls


def busy_rows(case: Case, count: int) -> Iterator[dict[str, Any]]:
    calls = busy_calls(case)
    for busy in (False, True):
        with busy_cores(len(os.sched_getaffinity(0))) if busy else contextlib.nullcontext():
            for name, call in calls.items():
                facts = {"what": name, "geometry": case.geometry.name, "tokens": case.tokens, "threads": case.threads}
                yield {**facts, "machine": "busy" if busy else "idle", **tail(call, count)}


def table(rows: list[dict[str, Any]]) -> str:
    """All columns as they are; three significant digits."""
    text = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return columns(list(rows[0]), text)


def tables(run: dict[str, Any]) -> str:
    """Both parts of a run with their reading."""
    text = (
        f"A call in microseconds. Arithmetic: the slope from {SHORT} to {LONGER} tokens over {SHORT} tokens; overhead: "
        f"the call at {SHORT} tokens less that; over dispatch: overhead over the same op with an empty query.\n\n"
        f"{table(run['short'])}"
    )
    if run["busy"]:
        text += f"\n\nSingle calls in milliseconds, idle and with one busy process a core.\n\n{table(run['busy'])}"
    return text


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", type=geometries, default=list(GEOMETRIES.values()))
    parser.add_argument("--threads", type=csv, default=["1", "2"])
    parser.add_argument("--format", type=csv, default=["int8", "int4"])
    parser.add_argument("--query", type=csv, default=["fp32"], help=f"of {', '.join(QUERIES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--calls", type=int, default=2000, help="for the tail; 0 leaves the busy machine out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    facts = machine()
    print(describe(facts), flush=True)
    short: list[dict[str, Any]] = []
    busy: list[dict[str, Any]] = []
    for threads in map(int, arguments.threads):
        torch.set_num_threads(threads)
        for geometry in arguments.geometry:
            case = Case(geometry, LONGER, threads, 0)
            for name in arguments.format:
                short += (
                    short_row(case, name, dtype, arguments.rounds, arguments.seconds) for dtype in arguments.query
                )
        if arguments.calls:
            busy += busy_rows(Case(GEOMETRIES["G1"], BUSY_TOKENS, threads, 0), arguments.calls)
    result = {"command": command("overhead", argv), "machine": facts, "short": short, "busy": busy}
    print(f"\n{tables(result)}")
    save(arguments.json, result)
    return result


if __name__ == "__main__":
    main()
