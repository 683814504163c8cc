"""What a run of attend_cpu says: a table a cell, JSON, and the record's markdown.

python -m benchmarks.report RUN.json [--picture PNG]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ERROR_LIMITS, GEOMETRIES, describe


@dataclass(frozen=True)
class Row:
    """One contender in one cell; times in seconds."""

    geometry: str
    tokens: int
    threads: int
    mode: str
    name: str
    bits: int
    nbytes: int
    copies: int
    median: float
    iqr: float
    low: float
    blocks: int
    ratio: float | None
    """Over the floor of its bits, timed right before it in every round; None for a floor."""
    error: float | None
    note: str

    @property
    def cell(self) -> tuple[str, int, int, str]:
        return self.geometry, self.tokens, self.threads, self.mode

    @property
    def is_floor(self) -> bool:
        return self.name.startswith("floor")

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("kvq")

    @property
    def is_wrong(self) -> bool:
        return self.error is not None and not self.error <= ERROR_LIMITS[self.bits]


class Cell:
    """The rows of one cell with what they are compared to."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.floors = {row.bits: row for row in rows if row.is_floor}
        peers = (row for row in rows if not (row.is_floor or row.is_ours or row.is_wrong))
        self.peers = sorted(peers, key=lambda row: row.median)

    def own_floor(self, row: Row) -> float | None:
        """Over the time of reading the row's own bytes, at the rate of the floor of its bits (int8 above 8)."""
        if row.is_floor:
            return 1.0
        return row.ratio * self.floors[min(row.bits, 8)].nbytes / row.nbytes if row.ratio else None

    def int8_floor(self, row: Row) -> float | None:
        """Over the time of reading the int8 cache once."""
        if 8 not in self.floors:
            return None
        own, int8 = self.floors[min(row.bits, 8)].median, self.floors[8].median
        return own / int8 if row.is_floor else row.ratio * own / int8 if row.ratio else None

    def fastest_peer(self, bits: int | None = None) -> Row | None:
        return next((row for row in self.peers if bits in (None, row.bits)), None)

    def speedup(self, row: Row, bits: int | None = None) -> float | None:
        """How many times as fast as the fastest peer (with ``bits``)."""
        peer = self.fastest_peer(bits)
        return peer.median / row.median if peer else None


def cells(rows: list[Row]) -> Iterator[tuple[tuple[str, int, int, str], Cell]]:
    grouped: dict[tuple[str, int, int, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.cell, []).append(row)
    yield from ((key, Cell(group)) for key, group in grouped.items())


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table with aligned columns, the first to the left."""
    lines = [header, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]

    def line(values: Sequence[str]) -> str:
        first, *others = zip(values, widths, strict=True)
        return " | ".join([first[0].ljust(first[1]), *(value.rjust(width) for value, width in others)])

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {line(header)} |", f"|{rule}|", *(f"| {line(row)} |" for row in lines[1:])])


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 1e-2 else f"{seconds * 1e3:.1f}"


def spread(median: float, iqr: float) -> str:
    """Half the interquartile range in percent of the median."""
    return f"±{iqr / median / 2:.0%}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def plural(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def table(cell: Cell) -> str:
    """One cell for the terminal: medians, interquartile range, fastest block, ratios to the floors and the peers."""
    first = cell.rows[0]
    columns = ("ms", "IQR", "best", "GB/s", "own floor", "int8 floor", "vs peer", "vs 4-bit", "error")
    widths = (9, 6, 9, 7, 11, 11, 9, 9, 9)

    def line(name: str, *values: str) -> str:
        return f"  {name:33}" + "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))

    lines = [f"{GEOMETRIES[first.geometry]}, {first.tokens} tokens, {plural(first.threads)}, {first.mode}"]
    lines.append(line("", *columns) + "  rotated")
    for row in cell.rows:
        values = line(
            row.name,
            milliseconds(row.median),
            f"{row.iqr / row.median:.0%}",
            milliseconds(row.low),
            f"{row.nbytes / row.median / 1e9:.1f}",
            times(cell.own_floor(row)),
            times(cell.int8_floor(row)),
            times(cell.speedup(row)) if row.is_ours else "",
            times(cell.speedup(row, 4)) if row.is_ours and row.bits == 4 else "",
            "" if row.error is None else f"{row.error:.1e}",
        )
        wrong = "  WRONG RESULT" * row.is_wrong
        lines.append(f"{values}  {row.copies} x {row.nbytes / 2**20:.1f} MiB{wrong}")
    fastest = [
        f"{label}: {peer.name}"
        for label, bits in (("fastest peer", None), ("with 4 bits", 4))
        if (peer := cell.fastest_peer(bits))
    ]
    return "\n".join([*lines, *(["  " + "; ".join(fastest)] if fastest else [])])


def preamble(run: dict[str, Any]) -> str:
    """Machine, versions and what could not run."""
    lines = [describe(run["machine"])]
    for threads, rates in run["bandwidth"].items():
        shown = ", ".join(f"{int(size) >> 20} MiB {rate:.1f}" for size, rate in rates.items())
        lines.append(f"read bandwidth by footprint, {plural(int(threads))}, GB/s: {shown}")
    cold, rounds, seconds = run["footprint"] >> 20, run["rounds"], run["seconds"]
    load = run["machine"]["load"]
    how = f"{rounds} rounds of {seconds} s each, {run['clock']} time"
    lines.append(f"cold rotates {cold} MiB a contender; {how}; load {load:.1f} at the start")
    lines += [f"timed: {version}" for version in run["versions"].values()]
    lines += [f"not timed: {name}: {reason}" for name, reason in run["missing"].items()]
    return "\n".join(lines)


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    run = json.loads(path.read_text())
    return run, [Row(**row) for row in run.pop("rows")]


def markdown(run: dict[str, Any], rows: list[Row]) -> str:
    """The record: a table for each geometry, thread count and mode."""
    by_cell = dict(cells(rows))
    parts = [f"Command: `{run['command']}`", "", *(f"- {line}" for line in preamble(run).splitlines())]
    for geometry, threads, mode in dict.fromkeys((row.geometry, row.threads, row.mode) for row in rows):
        mine = [row for row in rows if (row.geometry, row.threads, row.mode) == (geometry, threads, mode)]
        lengths = sorted({row.tokens for row in mine})
        parts += ["", f"### {GEOMETRIES[geometry]}, {plural(threads)}, {mode}", ""]
        parts += [
            f"| ms, spread (x int8 floor) | {' | '.join(map(str, lengths))} | error |",
            "|---" * (len(lengths) + 2) + "|",
        ]
        for name in dict.fromkeys(row.name for row in mine):
            found = {row.tokens: row for row in mine if row.name == name}
            shown = [times_cell(found.get(tokens), by_cell) for tokens in lengths]
            errors = [row.error for row in found.values() if row.error is not None]
            parts.append(f"| {name} | {' | '.join(shown)} | {f'{max(errors):.1e}' if errors else ''} |")
        parts += comparisons(mine, by_cell, lengths)
    return "\n".join(parts) + "\n"


def times_cell(row: Row | None, by_cell: dict[Any, Cell]) -> str:
    """Median with half the interquartile range, and the ratio to the int8 floor."""
    if row is None:
        return "-"
    return f"{milliseconds(row.median)} {spread(row.median, row.iqr)} ({times(by_cell[row.cell].int8_floor(row))})"


COMPARISONS: dict[str, Callable[[Cell, Row], float | None]] = {
    "time / own floor": lambda cell, row: cell.own_floor(row),
    "fastest peer / time": lambda cell, row: cell.speedup(row),
    "fastest 4-bit peer / time": lambda cell, row: cell.speedup(row, 4) if row.bits == 4 else None,
}


def comparisons(rows: list[Row], by_cell: dict[Any, Cell], lengths: list[int]) -> Iterator[str]:
    """Rows of a markdown table: our lines against their own floor and the fastest peers."""
    for name in dict.fromkeys(row.name for row in rows if row.is_ours):
        found = {row.tokens: (by_cell[row.cell], row) for row in rows if row.name == name}
        for label, ratio in COMPARISONS.items():
            values = [ratio(*found[tokens]) if tokens in found else None for tokens in lengths]
            if any(value is not None for value in values):
                yield f"| **{name}**: {label} | {' | '.join(map(times, values))} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, help="also draw this PNG from all runs together")
    arguments = parser.parse_args()
    loaded = [load(path) for path in arguments.run]
    print("\n".join(markdown(run, rows) for run, rows in loaded))
    if arguments.picture:
        importlib.import_module("benchmarks.plot").picture(
            [row for _, rows in loaded for row in rows], arguments.picture
        )


if __name__ == "__main__":
    main()
