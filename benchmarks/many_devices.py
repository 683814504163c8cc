"""How a large model's cache divides over several devices: writes the tables of ``docs/many_devices.md``.

``python -m benchmarks.many_devices --write`` brings the page up to date; without ``--write`` it says whether it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import table, with_block
from kvq_ops.format import FORMATS, CacheFormat

PAGE = Path(__file__).parents[1] / "docs/many_devices.md"
GIB = 2**30


@dataclass(frozen=True)
class Model:
    layers: int = 80
    heads_q: int = 64
    heads_kv: int = 8
    head_dim: int = 128
    item_bytes: int = 2


MODEL = Model()
RANKS = 8
CONTEXTS = {"128k": 128 * 1024, "1M": 1024 * 1024}
STRIPE = 64


def plain_bytes(model: Model, heads_kv: int, tokens: int) -> int:
    """Of a cache in 16 bits."""
    return model.layers * 2 * heads_kv * tokens * model.head_dim * model.item_bytes


def quantized_bytes(model: Model, format: CacheFormat, heads_kv: int, tokens: int) -> int:
    return model.layers * format.bytes_needed(1, heads_kv, model.head_dim, tokens)


def share(tokens: int) -> int:
    """Rows that :class:`TokenParallelCache` allocates on one of ``RANKS``."""
    return -(-tokens // (STRIPE * RANKS)) * STRIPE + 1


def merge_bytes(model: Model) -> tuple[int, int]:
    """What one rank puts into the two all-reduces of one token: of one layer and of all. The largest lse, one float a
    query head; then each head's weighted output and its weight."""
    layer = 4 * model.heads_q + 4 * model.heads_q * (model.head_dim + 1)
    return layer, layer * model.layers


def tensor_parallel_bytes(model: Model) -> int:
    """What one rank puts into the all-reduces of one token that a row-parallel output and a row-parallel MLP need, with
    or without a quantized cache: two a layer of the hidden state, heads_q * head_dim wide, in 16 bits."""
    return model.layers * 2 * model.heads_q * model.head_dim * model.item_bytes


def sizes() -> str:
    """GiB a sequence, by format and context: the whole, and a device's part by heads and by tokens."""
    header = ["cache"]
    header += [f"{name}: {what}" for name in CONTEXTS for what in ("whole", "by heads", "by tokens")]
    rows = []
    for name, format in {"16 bits": None, **FORMATS}.items():
        cells = []
        for tokens in CONTEXTS.values():
            for heads_kv, held in (
                (MODEL.heads_kv, tokens),
                (MODEL.heads_kv // RANKS, tokens),
                (MODEL.heads_kv, share(tokens)),
            ):
                if format is None:
                    found = plain_bytes(MODEL, heads_kv, held)
                else:
                    found = quantized_bytes(MODEL, format, heads_kv, held)
                cells.append(f"{found / GIB:.2f}")
        rows.append([name if format is None else f"`{name}`", *cells])
    return table(header, rows)


def traffic() -> str:
    layer, all_layers = merge_bytes(MODEL)
    reduce = 2 * (RANKS - 1) / RANKS  # a ring sends this much of what it reduces
    rows = [
        [name, f"{count:,}", f"{put:,}", f"{put * reduce:,.0f}"]
        for name, count, put in (
            ("merge of token shares, a layer", 2, layer),
            ("merge of token shares, all layers", 2 * MODEL.layers, all_layers),
            ("tensor parallel, all layers", 2 * MODEL.layers, tensor_parallel_bytes(MODEL)),
        )
    ]
    return table(["a token of one sequence", "all-reduces", "bytes put in", "bytes sent by a ring"], rows)


BLOCKS = {"sizes": sizes, "traffic": traffic}


def updated(page: str) -> str:
    """The page with every block between its marks made anew."""
    for name, make in BLOCKS.items():
        page = with_block(page, name, make())
    return page


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.many_devices", description="Tables of docs/many_devices.md.")
    parser.add_argument("--write", action="store_true", help="bring the page up to date")
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if parser.parse_args(argv).write:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        print("docs/many_devices.md is out of date: python -m benchmarks.many_devices --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
