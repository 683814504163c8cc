"""Which architectures of transformers work over a KVQCache: writes the table of ``docs/transformers.md``.

Tiny random models read a text of two sequences, one padded at the left: a prompt of 24 positions, then 24 tokens one by
one, over a KVQCache and over a DynamicCache with the model's own eager attention. What is compared is every logit.

``python -m benchmarks.transformers_matrix --write`` brings the page up to date; else it prints the table.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.page import table, with_block
from benchmarks.tiny_models import ARCHITECTURES, ARGUMENT, BOUNDS, VOCABULARY, Architecture, error, tiny_model
from kvq_ops.integrations.transformers import KVQCache

PAGE = Path(__file__).parents[1] / "docs/transformers.md"
FORMATS = ("int8", "int8_hq", "int4_hq")
TOKENS, PROMPT, PADDING, CAPACITY = 48, 24, 7, 64
EXACT = 1e-5
"""Of a relative error: what sums in another order leave in fp32."""


def text() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def read(model: PreTrainedModel, implementation: str, cache: Any, call: Callable[..., Any] | None = None) -> Tensor:
    """Logits [n, vocabulary] after each token that is no padding; ``call`` decodes in place of the model."""
    ids, mask = text()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation(implementation)
    found = []
    with torch.inference_mode():
        for first, last in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, TOKENS))]:
            given = {"input_ids": ids[:, first:last], "position_ids": positions[:, first:last], ARGUMENT: cache}
            decoder = model if first == 0 or call is None else call
            found.append(decoder(attention_mask=mask[:, :last], **given).logits)
    return torch.cat(found, 1)[mask.bool()]


def refusal(model: PreTrainedModel) -> str:
    """The words that a KVQCache of this model is refused with, or ""."""
    try:
        read(model, "kvq", KVQCache(model.config, CAPACITY))
    except ValueError as refused:
        return str(refused).partition(": call ")[0]
    return ""


def row(architecture: Architecture) -> list[str]:
    """One line of the table."""
    model = tiny_model(architecture)
    expected = read(model, "eager", DynamicCache(config=model.config))
    plain = error(read(model, "kvq", DynamicCache(config=model.config)), expected)
    cells = [architecture.name, "exact" if plain < EXACT else f"{plain:.4f}"]
    words = refusal(model)
    if words:
        return [*cells, "", *[""] * len(FORMATS), "", f"refused: `{words}`"]
    report = KVQCache(model.config, CAPACITY).report()
    cells.append(f"{len(report.quantized)} of {len(report.layers)}")
    errors = [error(read(model, "kvq", KVQCache(model.config, CAPACITY, name)), expected) for name in FORMATS]
    cells += [f"{found:.4f}" for found in errors]
    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled = error(read(model, "kvq", KVQCache(model.config, CAPACITY, FORMATS[0]), step), expected)
    cells.append(f"{compiled:.4f}")
    held = all(found < BOUNDS[name] for name, found in zip(FORMATS, errors, strict=True))
    return [*cells, "within the bounds" if held and compiled < BOUNDS[FORMATS[0]] else "**outside the bounds**"]


def matrix() -> str:
    header = [
        "model",
        "plain caches",
        "layers quantized",
        *(f"`{name}`" for name in FORMATS),
        "compiled `int8`",
        "outcome",
    ]
    rows = []
    for architecture in ARCHITECTURES:
        print(f"{architecture.name} ...", file=sys.stderr, flush=True)
        rows.append(row(architecture))
    bounds = ", ".join(f"`{name}` {BOUNDS[name]}" for name in FORMATS)
    facts = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}; bounds: {bounds}."
    return f"{table(header, rows)}\n\n{facts}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.transformers_matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="bring docs/transformers.md up to date")
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    made = matrix()
    if not args.write:
        print(made)
        return 0
    PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), "matrix", made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
