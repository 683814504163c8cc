"""What every cache format costs on a real model: ``python -m examples.quality``; ``--help`` lists the options.

SmolLM2 reads a text over a plain cache and over each format; perplexity, agreement and KL divergence say what the
format changed, each with its standard error and, where it has one, its bar. The text goes through in chunks that are
cut so that every query sees what it would see one token at a time (``examples.reading.chunks``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

import kvq_ops
from examples.llama import PLAIN, Llama
from examples.metrics import Quality, Readings, judge, verdicts
from examples.reading import (
    RECALL_DISTANCE,
    RECALL_NOTE,
    RECALL_START,
    RECALL_TOKENS,
    bits_per_value,
    read,
    recall,
)
from examples.report import Console, machine, markdown, show_verdicts, where
from examples.smollm2 import load_model, load_text

TOKENS = 2048
MAX_TOKENS = 8192
DTYPE = torch.float32
"""Of weights, activations and the plain cache, so that nothing but the format is measured."""


@dataclass(frozen=True)
class Row:
    """One line of the table: ``nbytes`` of all layers' caches, with what they keep in full precision."""

    cache: str
    bits_per_value: float
    bytes_per_token: int
    nbytes: int
    quality: Quality


def readings(model: Llama, text: Tensor, tokens: int) -> Readings:
    """What the model says about the first ``tokens`` tokens of the text, and about the passage to recall."""
    model.reset_caches()
    logits = torch.cat(list(read(model, text[:tokens], 0)))
    return Readings(logits, text[1 : tokens + 1], recall(model, text))


def measure(model: Llama, text: Tensor, tokens: int, formats: Sequence[str], console: Console) -> list[Row]:
    """A row for the plain cache and one for each format."""
    plain: Readings | None = None
    rows = []
    for name in [PLAIN, *formats]:
        model.setup_caches(1, max(tokens, RECALL_DISTANCE + RECALL_TOKENS), name)
        with console.stage(f"{name}: {tokens} tokens of text, then {RECALL_TOKENS} to recall"), torch.inference_mode():
            found = readings(model, text, tokens)
            plain = plain or found
            quality = judge(plain, found)
        console.line(
            f"{name}: perplexity {quality.perplexity:.3f}, agreement {quality.agreement.text('.4f')},"
            f" KL {quality.divergence.text('.6f')}, recall perplexity {quality.recall_perplexity:.3f}"
        )
        rows.append(
            Row(
                cache=name,
                bits_per_value=bits_per_value(model),
                bytes_per_token=sum(cache.bytes_per_token for cache in model.caches),
                nbytes=sum(cache.nbytes for cache in model.caches),
                quality=quality,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    header = ["cache", "bits a value", "bytes a token", "perplexity", "against plain"]
    header += ["top-1 agreement", "mean KL", "recall perplexity", "against plain"]
    cells = []
    for row in rows:
        quality, plain = row.quality, row.cache == PLAIN
        cells.append(
            [
                row.cache,
                f"{row.bits_per_value:.4g}",
                f"{row.bytes_per_token:,}",
                f"{quality.perplexity:.3f}",
                "" if plain else quality.perplexity_change.text("+.2%"),
                "" if plain else quality.agreement.text(".4f"),
                "" if plain else quality.divergence.text(".6f"),
                f"{quality.recall_perplexity:.3f}",
                "" if plain else quality.recall_change.text("+.2%"),
            ]
        )
    return markdown(header, cells)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Mean KL and lost agreement against bits a value, a labelled point a format with its standard error."""
    import matplotlib as mpl  # noqa: PLC0415  (only the picture needs it)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import PercentFormatter  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    shown = [row for row in rows if row.cache != PLAIN]
    all_bits = [row.bits_per_value for row in shown] or [0]
    for axis, title in zip(
        axes, ["mean KL(plain || format), nats", "tokens whose most likely next one changes"], strict=True
    ):
        for row in shown:
            got, lost, bits = row.quality.divergence, row.quality.agreement, row.bits_per_value
            value, error = (got.value, got.error) if axis is axes[0] else (1 - lost.value, lost.error)
            points = axis.errorbar(bits, value, yerr=error, marker="o", capsize=3)
            crowded = any(0 < other.bits_per_value - bits < 0.5 for other in shown)
            axis.annotate(
                row.cache,
                (bits, value),
                (-7, 4) if crowded else (7, 4),
                textcoords="offset points",
                ha="right" if crowded else "left",
                color=points[0].get_color(),
            )
        axis.set(yscale="log", xlabel="bits a value, all metadata included", title=title)
        axis.set_xlim(min(all_bits) - 1, max(all_bits) + 1)
        axis.grid(alpha=0.3, which="both")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1))
    figure.suptitle("SmolLM2-135M-Instruct, head_dim 64; bars are standard errors", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m examples.quality", description="What every cache format costs on a real model."
    )
    parser.add_argument("--formats", nargs="*", default=list(kvq_ops.FORMATS), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of text to compare over; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the error against the bits; wants matplotlib")
    args = parser.parse_args(argv)
    for name in args.formats:
        try:
            kvq_ops.get_format(name)
        except ValueError as error:
            parser.error(f"--formats: {error}")
    if not 2 <= args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens must be from 2 to {MAX_TOKENS}, got {args.tokens}")
    if args.picture and find_spec("matplotlib") is None:
        parser.error("--picture wants matplotlib: pip install matplotlib")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console, facts = arguments(argv), Console(), machine()
    print(f"SmolLM2-135M-Instruct over {', '.join([PLAIN, *args.formats])} caches\n{where(facts)}")
    with console.stage("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = load_model(DTYPE)
        text = load_text(tokenizer, max(args.tokens + 1, RECALL_START + RECALL_DISTANCE))
    rows = measure(model, text, args.tokens, args.formats, console)
    print(f"\n{table(rows)}\n\n{where(facts)}")
    print(
        f"perplexity, agreement, KL: over {args.tokens} tokens of a speech, as if one by one; recall: {RECALL_NOTE}.\n"
        "± one standard error, tokens taken as independent.\n"
    )
    results = verdicts({row.cache: row.quality for row in rows})
    held = show_verdicts(results)
    if args.json:
        figures = {
            "machine": facts,
            "tokens": args.tokens,
            "seconds": console.seconds(),
            "rows": [asdict(row) for row in rows],
            "bars": {name: dict(checks) for name, checks in results.items()},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.picture:
        picture(rows, args.picture)
    console.line("done")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
