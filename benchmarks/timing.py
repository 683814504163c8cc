"""One way to time for all benchmarks: torch.utils.benchmark, in rounds over all entries."""

from __future__ import annotations

import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.benchmark import Measurement, Timer

POOL_SPIN = 0.03
"""Seconds that OpenMP workers spin after a parallel region: GNU's runtime does so for 300 000 pauses, about 20 ms."""
YARDSTICK_SECONDS = 0.02
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""CPU time, summed over threads, leaves out what other processes take from a single thread."""


@dataclass(frozen=True)
class Entry:
    """What is timed: the calls in turn, over and over."""

    calls: Sequence[Callable[[], Any]]
    yardstick: str | None = None
    """The entry that is timed shortly before this one in every round, and that this one is compared to."""
    settle: float = 0.0
    """Seconds for which its threads go on spinning after a call; the next entry waits so long."""
    keep: Sequence[Any] = ()
    """What must outlive the calls."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and interquartile range over the blocks of all rounds."""

    median: float
    iqr: float
    low: float
    """The fastest block."""
    blocks: int
    ratio: float | None = None
    """Median over the rounds of the time over the yardstick's of that moment."""

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Timing:
        (merged,) = Measurement.merge(measurements)
        return cls(merged.median, merged.iqr, min(merged.times), len(merged.times))


def samples(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of ``count`` single calls: for the tail of the distribution, which blocks average away."""
    return timeit.Timer(call).repeat(count, 1)


def measure(
    entries: Mapping[str, Entry], *, threads: int, rounds: int = 5, seconds: float = 0.1, clock: str = "wall"
) -> dict[str, Timing]:
    """Times ``seconds`` of every entry in each round, so that a noisy moment of the machine hits all.

    A yardstick has no turn of its own: it is timed before each entry that names it."""
    options: dict[str, Any] = {"num_threads": threads, "timer": CLOCKS[clock]}
    timers = {
        name: Timer("next(calls)()", globals={"calls": itertools.cycle(entry.calls)}, label=name, **options)
        for name, entry in entries.items()
    }
    measured: dict[str, list[Measurement]] = {name: [] for name in entries}
    ratios: dict[str, list[float]] = {name: [] for name in entries}
    yardsticks = {entry.yardstick for entry in entries.values()}

    def run(name: str, least: float) -> float:
        measurement = timers[name].blocked_autorange(min_run_time=least)
        measured[name].append(measurement)
        if threads > 1:
            time.sleep(max(POOL_SPIN, entries[name].settle))
        return measurement.median

    for _ in range(rounds):
        for name, entry in entries.items():
            if name in yardsticks:
                continue
            floor = run(entry.yardstick, min(seconds, YARDSTICK_SECONDS)) if entry.yardstick else None
            median = run(name, seconds)
            if floor:
                ratios[name].append(median / floor)
    timings = {name: Timing.of(parts) for name, parts in measured.items() if parts}
    return {
        name: replace(timing, ratio=statistics.median(ratios[name]) if ratios[name] else None)
        for name, timing in timings.items()
    }
