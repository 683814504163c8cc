"""What the documentation says of formats is what the formats say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import many_devices
from examples.metrics import BARS
from kvq_ops import FORMATS, get_format

ROOT = Path(__file__).parents[1]
README, DOCS = ((ROOT / name).read_text() for name in ("README.md", "docs/formats.md"))


def table(text: str, *header: str) -> list[list[str]]:
    """The rows, cell by cell, of the one table whose first columns are called so."""
    found = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    (rows,) = [rows for rows in found if rows[0][: len(header)] == list(header)]
    return rows[2:]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_bits_a_value() -> None:
    rows = table(DOCS, "format", "head_dim 64", "128", "256")
    assert {name for row in rows for name in names(row[0])} >= set(FORMATS)
    for cell, *bits in rows:
        for name in names(cell):
            assert bits == [f"{get_format(name).bits_per_value(head_dim):.4g}" for head_dim in (64, 128, 256)]


def test_codings_of_the_presets() -> None:
    rows = table(DOCS, "preset", "keys", "values", "sinks")
    assert {name for row in rows for name in names(row[0])} == set(FORMATS)
    for cell, keys, values, sinks in rows:
        for format in map(get_format, names(cell)):
            assert format.sinks == int(sinks)
            for side, coding, said in (("key", format.key, keys), ("value", format.value, values)):
                same = names(said)
                assert coding == getattr(get_format(same[0]), side) if same else said.startswith(coding.coding(side))
            if format.key.key_block:
                assert f"blocks of {format.key.key_block} tokens" in keys


@pytest.mark.parametrize("header", ["format", "cache"])
def test_every_preset_is_in_the_tables_of_errors(header: str) -> None:
    rows = table(DOCS, header, *{"format": ["normal"], "cache": ["bits a value"]}[header])
    assert {row[0].strip("`") for row in rows} - {"plain"} == set(FORMATS)


def test_bytes_a_token_of_the_readme() -> None:
    rows = table(README, "format", "keys")
    assert {name for row in rows for name in names(row[0])} >= set(FORMATS)
    for cell, _, _, bits, nbytes, *_ in rows:
        for name in names(cell):
            assert get_format(name).bytes_per_token(1, 128) == int(nbytes)
            assert bits == f"{get_format(name).bits_per_value(128):.3g}"


def test_names_are_formats() -> None:
    for text in (README, DOCS):
        for name in names(text):
            if re.fullmatch(r"int\d\w*(/\w+)*", name):
                get_format(name)
    assert set(BARS) <= set(FORMATS)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", [str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(path: str) -> None:
    here = (ROOT / path).parent
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", (ROOT / path).read_text())
    assert [link for link in links if not (here / link).exists()] == []


def test_many_devices_is_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert many_devices.main([]) == 0
    page = tmp_path / "page.md"
    page.write_text(many_devices.PAGE.read_text().replace("| 16 bits | 40.00 |", "| 16 bits | 41.00 |"))
    monkeypatch.setattr(many_devices, "PAGE", page)
    assert many_devices.main([]) == 1
    assert many_devices.main(["--write"]) == 0
    assert many_devices.main([]) == 0


def test_facts_of_many_devices() -> None:
    """80 layers, 8 KV heads of 128: 264 bytes a token and head in int8, 512 in 16 bits, by hand."""
    tokens = 131072
    model, int8 = many_devices.MODEL, get_format("int8")
    assert many_devices.plain_bytes(model, 8, tokens) == 80 * 8 * 512 * tokens
    assert many_devices.quantized_bytes(model, int8, 1, tokens) == 80 * (264 * tokens + 4)
    assert many_devices.share(tokens) == tokens // 8 + 1
    assert many_devices.share(64 * 8 + 1) == 2 * 64 + 1
    assert many_devices.merge_bytes(model) == (64 * 4 * 130, 80 * 64 * 4 * 130)
