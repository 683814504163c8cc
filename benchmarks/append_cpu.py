"""append beside attend at 4096 tokens (one row) and beside the machine's copy bandwidth (a prefill of 4096 rows).

python -m benchmarks.append_cpu --geometry G1 --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import bandwidth
from benchmarks.common import COLD_BYTES, GEOMETRIES, Case, command, csv, describe, geometries, machine, save
from benchmarks.peers.kvq import cache
from benchmarks.report import columns, milliseconds, spread
from benchmarks.timing import Entry, Timing, measure

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def appends(copies: list[Any], at: int, rows: list[torch.Tensor], name: str) -> Iterator[Callable[[], None]]:
    """Calls that append ``rows`` at position ``at`` of one copy each: lengths go back first, 0.1 us of the time."""
    for parts, lengths in copies:
        view = lengths.numpy()

        def call(parts: Any = parts, lengths: torch.Tensor = lengths, view: Any = view) -> None:
            view[:] = at
            torch.ops.kvq.append(*parts, lengths, *rows, name)

        yield call


def entries(case: Case, name: str, dtype: torch.dtype) -> tuple[dict[str, Entry], int]:
    """attend at 4096 tokens, one row, the prefill and a copy that moves as many bytes; and these bytes."""
    parts, nbytes = cache(case, name)
    batch = case.geometry.batch
    copies = [
        ([part.clone() for part in parts], torch.full((batch,), case.tokens, dtype=torch.int32))
        for _ in range(case.copies(nbytes))
    ]
    query = case.query.to(dtype)
    attends = [partial(torch.ops.kvq.attend, query, *held, lengths.clone(), name) for held, lengths in copies]
    prompt = [side.to(dtype) for side in (case.key, case.value)]
    prompts = [prompt, *([side.clone() for side in prompt] for _ in range(case.copies(prompt[0].nbytes * 2) - 1))]
    token = [side[:, :, -1:].clone() for side in prompt]
    prefills = [
        call for index, copy in enumerate(copies) for call in appends([copy], 0, prompts[index % len(prompts)], name)
    ]
    moved = sum(side.nbytes for side in prompt) + nbytes
    half = moved // 2
    memory = bandwidth.arena(2 * half * case.copies(moved))
    move = bandwidth.library().kvq_copy
    starts = range(memory.data_ptr(), memory.data_ptr() + len(memory) - moved + 2, 2 * half)
    moves = [partial(move, at + half, at, half, case.threads) for at in starts]
    keep = (memory,)
    return {
        "attend": Entry(attends),
        "copy": Entry(moves, keep=keep),
        "append 1 row": Entry(list(appends(copies, case.tokens - 1, token, name)), "attend"),
        f"prefill {case.tokens} rows": Entry(prefills, "copy"),
    }, moved


def rows(case: Case, name: str, dtype: str, timings: dict[str, Timing], moved: int) -> Iterator[dict[str, Any]]:
    for what, timing in timings.items():
        ratio = timing.ratio
        yield {
            "geometry": case.geometry.name,
            "threads": case.threads,
            "format": name,
            "input": dtype,
            "what": what,
            **asdict(timing),
            "of attend": ratio if what == "append 1 row" else None,
            "of copy bandwidth": 1 / ratio if what.startswith("prefill") and ratio else None,
            "moved": moved if what.startswith(("copy", "prefill")) else None,
        }


def shown(row: dict[str, Any]) -> list[str]:
    share = "-" if row["of attend"] is None else f"{row['of attend']:.1%}"
    bandwidth_share = "-" if row["of copy bandwidth"] is None else f"{row['of copy bandwidth']:.2f}"
    rate = f"{row['moved'] / row['median'] / 1e9:.1f}" if row["moved"] else "-"
    facts = [row["what"], row["geometry"], str(row["threads"]), row["format"], row["input"]]
    return [*facts, milliseconds(row["median"]), spread(row["median"], row["iqr"]), rate, share, bandwidth_share]


HEADER = ["", "geometry", "threads", "format", "input", "ms", "spread", "GB/s moved", "of attend", "of copy bandwidth"]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", type=geometries, default=list(GEOMETRIES.values()))
    parser.add_argument("--threads", type=csv, default=["1", "2"])
    parser.add_argument("--format", type=csv, default=["int8", "int4"])
    parser.add_argument("--input", type=csv, default=list(DTYPES), help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--footprint", type=int, default=COLD_BYTES >> 20, help="MiB that each entry rotates")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    facts = machine()
    print(describe(facts), flush=True)
    found: list[dict[str, Any]] = []
    for geometry in arguments.geometry:
        for threads in map(int, arguments.threads):
            torch.set_num_threads(threads)
            for name in arguments.format:
                for dtype in arguments.input:
                    case = Case(geometry, arguments.tokens, threads, arguments.footprint << 20)
                    timed, moved = entries(case, name, DTYPES[dtype])
                    timings = measure(timed, threads=threads, rounds=arguments.rounds, seconds=arguments.seconds)
                    found += rows(case, name, dtype, timings, moved)
    print(f"\n{columns(HEADER, map(shown, found))}")
    save(arguments.json, {"command": command("append_cpu", argv), "machine": facts, "rows": found})
    return found


if __name__ == "__main__":
    main()
