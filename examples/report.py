"""What a run shows: progress by the second, what the figures depend on, a table."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import torch

import kvq_ops


class Console:
    """Lines that begin with the seconds since the start; dots while a stage works."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.first_text: float | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def line(self, text: str, end: str = "\n") -> None:
        print(f"[{self.seconds():4.0f} s] {text}", end=end, flush=True)

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        self.line(text, end=" ")
        begin, over = time.perf_counter(), Event()
        ticker = Thread(target=self._tick, args=(over,), daemon=True)
        ticker.start()
        took = "failed"
        try:
            yield
            took = f"{time.perf_counter() - begin:.0f} s"
        finally:
            over.set()
            ticker.join()
            print("", took, flush=True)

    @staticmethod
    def _tick(over: Event) -> None:
        while not over.wait(2):
            print(".", end="", flush=True)

    def answer(self, text: str) -> None:
        if self.first_text is None:
            self.first_text = self.seconds()
        print(text, end="", flush=True)


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
    names = [platform.processor() or platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")] or names
    return {
        "cpu": names[0],
        "isa": kvq_ops.cpu_isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kvq_ops": kvq_ops.__version__,
    }


def where(facts: dict[str, str | int]) -> str:
    return "{cpu}, {isa} kernels, {threads} threads, torch {torch}, kvq_ops {kvq_ops}".format(**facts)


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned."""
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [header, rule, *cells]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_verdicts(verdicts: dict[str, list[tuple[str, bool]]]) -> bool:
    """Prints every bar; whether all hold."""
    for name, checks in verdicts.items():
        for text, holds in checks:
            print(f"{name}: {text}: {'holds' if holds else 'MISSED'}")
    return all(holds for checks in verdicts.values() for _, holds in checks)
