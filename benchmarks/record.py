"""Writes RESULTS.md from the JSON files of one measurement.

python -m benchmarks.record FOLDER > benchmarks/RESULTS.md

FOLDER holds what --json wrote: attend.json and its like, formats.json, append.json, step.json, overhead.json, and
instructions.md, what `python -m benchmarks.instructions` printed; each where there is one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import append_cpu, formats, overhead, report, step
from benchmarks.common import describe
from benchmarks.report import columns
from benchmarks.summary import summary

HEAD = """# Results

Written by `python -m benchmarks.record` from the runs below; `make bench` makes a short one.

- **Cell**: a geometry, a cache length, a number of threads, cold or hot. G1: batch 1, 8 query and 8 KV heads, D 128.
  G2: batch 1, 24/4 heads, D 256. G3: batch 8, 32/8 heads, D 128. One query token a sequence, scale 1/sqrt(D), N(0, 1).
- **Cold**: every contender rotates through its own copies of the cache, like a model with many layers; hot: one copy.
- **Floor**: a streaming read of as many bytes as the cache holds, codes and scales, from the same allocator, rotated
  the same way, timed right before each contender in every round; the ratio is the median over the rounds.
- **Spread**: half the interquartile range over the blocks of all rounds, in percent of the median.
- **Error**: relative L2 against float64 attention on the unquantized data, the worst of the row.
- onnxruntime and OpenVINO append the newest token inside the timed call; the others attend only.
- Peers come from PyPI's wheels. Those of ik_llama.cpp and llama.cpp are AVX2 builds; the others use what the CPU has.
  vLLM's CPU backend has no int8 or int4 cache. llama-cpp-python and ggml-python have no wheels, so xllamacpp stands for
  llama.cpp. [BOUNDS.md](BOUNDS.md) says what bounds the figures that miss their targets, and what was tried.
"""


def attend(run: dict[str, Any]) -> str:
    rows = [report.Row(**row) for row in run["rows"]]
    return f"{summary(rows)}\n\n{report.markdown(run, rows)}"


def with_machine(body: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    return lambda run: f"Command: `{run['command']}`\n\n{describe(run['machine'])}\n\n{body(run)}"


FORMATS = with_machine(lambda run: columns(formats.HEADER, map(formats.shown, run["rows"])))
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "attend": ("attend on the CPU", attend),
    "attend_long": ("attend on the CPU, a long cache", attend),
    "attend_hot": ("attend on the CPU, one cache, hot", attend),
    "formats": ("attend by format", FORMATS),
    "formats_avx2": ("attend by format on AVX2", FORMATS),
    "append": (
        "append on the CPU",
        with_machine(lambda run: columns(append_cpu.HEADER, map(append_cpu.shown, run["rows"]))),
    ),
    "step": ("A compiled decode step", with_machine(lambda run: columns(step.HEADER, map(step.shown, run["rows"])))),
    "overhead": ("Short contexts and a busy machine", with_machine(overhead.tables)),
}


INSTRUCTIONS = """## Instructions of the inner loops

For 32 codes and one query row, six rows sharing the codes, as GCC compiles them (`python -m benchmarks.instructions`);
products are the multiply-accumulates among them. Nothing here timed avx512 without VNNI or NEON.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(HEAD)
    for name, (title, section) in SECTIONS.items():
        path = folder / f"{name}.json"
        if path.exists():
            print(f"## {title}\n\n{section(json.loads(path.read_text())).strip()}\n")
    if (folder / "instructions.md").exists():
        print(f"{INSTRUCTIONS}\n{(folder / 'instructions.md').read_text().strip()}")


if __name__ == "__main__":
    main()
