"""A run of attend_cpu against the targets: one line a cell, what misses its target marked."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import Cell, Row, cells, columns

INT8_FLOOR = {"G1": 1.2, "G2": 2.0, "G3": 1.8}
"""At most so many times the time of reading the cache once, cold; on G1 from 2048 tokens on."""
INT4_FLOOR = {"G1": 1.6}
PEER = {"G2": 2.5, "G3": 2.5}
"""At least so many times as fast as the fastest peer, cold; int4 beside the fastest peer with 4 bits: 4."""
INT4_PEER = {"G2": 4.0, "G3": 4.0}
G1_TOKENS, G1_SHORT = 2048, 512
SCALING, SCALING_BYTES = 1.7, 4 << 20
"""Two threads over one, where the cache is larger."""

LEGEND = (
    "Ratios of times, * = misses its target: int8 and int4 over reading their own bytes (cold int8: G1 from 2048 "
    "tokens 1.2, G2 2.0, G3 1.8; cold int4: G1 1.6), int4 over int8 (1), the fastest peer over int8 (cold G2 and G3 "
    "2.5; G1 at 512 tokens 1), the fastest peer with 4 bits over int4 (cold G2 and G3 4), 1 thread over 2 (1.7 above "
    "4 MiB)."
)
RATIOS = ("int8/floor", "int4/floor", "int4/int8", "peer/int8", "4-bit peer/int4", "int8 scaling", "int4 scaling")


@dataclass(frozen=True)
class Figure:
    """A ratio, None where the run lacks what it takes, with its bounds."""

    value: float | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def missed(self) -> bool:
        if self.value is None:
            return False
        too_high = self.at_most is not None and self.value > self.at_most
        return too_high or (self.at_least is not None and self.value < self.at_least)

    def __str__(self) -> str:
        return "-" if self.value is None else f"{self.value:.2f}{'*' if self.missed else ''}"


def over(above: Row | None, below: Row | None) -> float | None:
    return above.median / below.median if above and below else None


def figures(cell: Cell, one_thread: Cell | None) -> list[Figure]:
    """In the order of the header's ratios."""
    first = cell.rows[0]
    geometry = first.geometry if first.mode == "cold" else ""
    by_name = {row.name: row for row in cell.rows}
    single = {row.name: row for row in one_thread.rows} if one_thread and first.threads == 2 else {}
    int8, int4 = by_name.get("kvq int8"), by_name.get("kvq int4")
    long_enough = geometry != "G1" or first.tokens >= G1_TOKENS
    at_short = {"G1": 1.0} if first.tokens <= G1_SHORT else {}

    def scaling(name: str) -> Figure:
        row = by_name.get(name)
        bound = SCALING if row and row.nbytes > SCALING_BYTES else None
        return Figure(over(single.get(name), row), at_least=bound)

    return [
        Figure(int8 and cell.own_floor(int8), at_most=INT8_FLOOR.get(geometry) if long_enough else None),
        Figure(int4 and cell.own_floor(int4), at_most=INT4_FLOOR.get(geometry) if long_enough else None),
        Figure(over(int4, int8), at_most=1.0),
        Figure(int8 and cell.speedup(int8), at_least=(PEER | at_short).get(geometry)),
        Figure(int4 and cell.speedup(int4, 4), at_least=INT4_PEER.get(geometry)),
        scaling("kvq int8"),
        scaling("kvq int4"),
    ]


def summary(rows: list[Row]) -> str:
    """The table and what its columns mean; empty without our lines."""
    by_cell = dict(cells(rows))
    lines = []
    for (geometry, tokens, threads, mode), cell in by_cell.items():
        found = figures(cell, by_cell.get((geometry, tokens, 1, mode)))
        if any(figure.value is not None for figure in found):
            lines.append([f"{geometry} {tokens} {mode}", str(threads), *map(str, found)])
    return f"{columns(['', 'threads', *RATIOS], lines)}\n\n{LEGEND}" if lines else ""
