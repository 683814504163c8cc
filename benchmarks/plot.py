"""The picture of an attend_cpu run: time over the int8 floor, ours thick and red, 4-bit caches dashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.common import GEOMETRIES
from benchmarks.report import Row, cells

mpl.use("Agg")
TICKS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)


def picture(rows: list[Row], path: Path) -> None:
    """One plot for each geometry (across) and thread count (down): lines over the tokens, bars for a single length."""
    by_cell = dict(cells(rows))
    mode = "cold" if any(row.mode == "cold" for row in rows) else "hot"
    points = [
        (row, ratio) for row in rows if row.mode == mode and (ratio := by_cell[row.cell].int8_floor(row)) is not None
    ]
    if not points:
        raise ValueError("the picture needs the floor in the run")
    names = list(dict.fromkeys(row.name for row, _ in points))
    peers = [name for name in names if not name.startswith(("floor", "kvq"))]
    colors = {name: plt.get_cmap("tab20")(index % 20) for index, name in enumerate(peers)}
    colors |= {name: "black" if name.startswith("floor") else "crimson" for name in names if name not in colors}
    across = list(dict.fromkeys(row.geometry for row, _ in points))
    down = sorted({row.threads for row, _ in points})
    lengths = {name: sorted({row.tokens for row, _ in points if row.geometry == name}) for name in across}
    draw = bars if all(len(tokens) == 1 for tokens in lengths.values()) else lines
    size = 5 * len(across) + 3, 4 * len(down)
    figure, axes = plt.subplots(len(down), len(across), figsize=size, squeeze=False, layout="constrained")
    for row_of_axes, threads in zip(axes, down, strict=True):
        for axis, geometry in zip(row_of_axes, across, strict=True):
            chosen = [(row, ratio) for row, ratio in points if (row.geometry, row.threads) == (geometry, threads)]
            draw(axis, chosen, colors, lengths[geometry])
            axis.set_title(f"{GEOMETRIES[geometry]}, {threads} thread{'s' * (threads > 1)}", fontsize=10)
            axis.grid(alpha=0.3)
    figure.supxlabel(f"time over that of reading the int8 cache once ({mode})", fontsize=10)
    if draw is lines:
        handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
        figure.supxlabel("tokens in the cache", fontsize=10)
        figure.supylabel(f"time over that of reading the int8 cache once ({mode})", fontsize=10)
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def ratio_scale(axis: Any) -> None:
    """A logarithmic scale labelled in round ratios."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(TICKS, labels=[f"{tick:g}x" for tick in TICKS], fontsize=8)
    axis.set_minor_formatter(NullFormatter())


def lines(axis: Any, points: list[tuple[Row, float]], colors: dict[str, Any], lengths: list[int]) -> None:
    for name in dict.fromkeys(row.name for row, _ in points):
        found = sorted((row.tokens, ratio) for row, ratio in points if row.name == name)
        four_bit = any(row.bits == 4 for row, _ in points if row.name == name)
        axis.plot(
            *zip(*found, strict=True),
            color=colors[name],
            linestyle="--" if four_bit else "-",
            linewidth=3 if name.startswith("kvq") else 1.2,
            marker="o",
            markersize=4,
            label=name,
        )
    axis.set_xscale("log")
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    ratio_scale(axis.yaxis)


def bars(axis: Any, points: list[tuple[Row, float]], colors: dict[str, Any], lengths: list[int]) -> None:
    points = sorted(points, key=lambda point: -point[1])
    labels = [row.name for row, _ in points]
    places = axis.barh(labels, [ratio for _, ratio in points], color=[colors[label] for label in labels])
    for place, (row, ratio) in zip(places, points, strict=True):
        place.set_hatch("//" if row.bits == 4 else "")
        place.set_edgecolor("white")
        axis.text(ratio * 1.05, place.get_y() + place.get_height() / 2, f"{ratio:.2g}x", va="center", fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel(f"{lengths[0]} tokens", fontsize=8)
    ratio_scale(axis.xaxis)
    axis.set_xlim(right=max(ratio for _, ratio in points) * 1.6)
