"""The examples' Llama, its caches and the demo's figures, on a model of random weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import MAX_TOKENS, prompt, tiny
from torch import Tensor

from examples import demo, quality
from examples.llama import PLAIN, Llama
from examples.metrics import BARS, ROWS, Estimate, Quality, change, check, compare, losses, mean, perplexity
from examples.reading import RECALL_DISTANCE, RECALL_START, chunks, prefill, read
from examples.smollm2 import from_transformers, packaged_file
from kvq_ops import FORMATS, get_format

PUBLISHED = {"int8": 1.0e-2, "int4": 1.8e-1}
"""Relative L2 error of attention over N(0, 1), which the residual stream of a model dilutes."""
ROUNDING = {PLAIN: 2e-6, 8: 1e-3, 4: 1.8e-2}
"""Between two orders of the same sums: fp32, and a few codes that lay on the edge and fell to the other side."""


def logits_in_chunks(model: Llama, tokens: Tensor, *chunks: int) -> Tensor:
    model.reset_caches()
    positions = torch.arange(tokens.size(1)).split(list(chunks))
    return torch.cat([model(tokens[:, rows], rows) for rows in positions], dim=1)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def rounding(format: str) -> float:
    return ROUNDING[PLAIN if format == PLAIN else get_format(format).value.bits]


class Words:
    """A tokenizer: token n is the word ``n``."""

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(str(token) for token in token_ids)


@pytest.mark.filterwarnings("default")  # transformers' own
def test_llama_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make demo` installs it")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=80,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = from_transformers(theirs)
    ours.setup_caches(2, MAX_TOKENS, PLAIN)
    tokens = prompt(24, batch=2)
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert relative(logits_in_chunks(ours, tokens, 16, *[1] * 8), expected) < ROUNDING[PLAIN]


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantized_cache_costs_what_its_format_says(format: str) -> None:
    tokens = prompt(32, batch=2)
    chunks = (20, *[1] * 12)
    plain = logits_in_chunks(tiny(PLAIN, batch=2), tokens, *chunks)
    error = relative(logits_in_chunks(tiny(format, batch=2), tokens, *chunks), plain)
    assert PUBLISHED[format] / 100 < error < PUBLISHED[format]  # nearer than that would be no quantized cache


@pytest.mark.parametrize("format", [PLAIN, "int8", "int4"])
def test_chunks_do_not_matter(format: str) -> None:
    model, tokens = tiny(format), prompt(16)
    whole = logits_in_chunks(model, tokens, 16)
    assert relative(logits_in_chunks(model, tokens, *[1] * 16), whole) < rounding(format)


@pytest.mark.parametrize("format", [PLAIN, "int4", "int8_kivi", "int8_hq", "int4_hq", "int8_hq/int4_g32/sinks0"])
def test_reading_equals_one_by_one(format: str) -> None:
    model, tokens = tiny(format), prompt(150)
    expected = logits_in_chunks(model, tokens, *[1] * 150)[0]
    model.reset_caches()
    got = torch.cat([*read(model, tokens[0, :70], 0), *read(model, tokens[0, 70:], 70)])
    assert relative(got, expected) < rounding(format)
    assert relative(prefill(model, tokens[0, :100]), expected[99]) < 3 * rounding(format)  # of one row


@pytest.mark.parametrize("format", [None, *FORMATS.values(), get_format("int4_hq/sinks0"), get_format("int8/sinks3")])
@pytest.mark.parametrize(("start", "end"), [(0, 300), (0, 1), (3, 5), (66, 68), (67, 68), (35, 200)])
def test_no_query_of_a_chunk_sees_a_block_frozen_too_early(format, start: int, end: int) -> None:
    cuts = list(chunks(format, start, end))
    assert [token for first, last in cuts for token in range(first, last)] == list(range(start, end))
    if format and format.key.key_block:
        for first, last in cuts:
            assert len({max(format.frozen(token + 1), format.sinks) for token in range(first, last)}) == 1
    assert len(cuts) <= 2 + 2 * (end - start) // 32


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("format", [PLAIN, "int8", "int4_hq"])
def test_compiled_equals_eager(format: str) -> None:
    model, tokens = tiny(format), prompt(12)[0]
    model.reset_caches()
    eager, _ = demo.decode(model, tokens, 0)
    step = torch.compile(model, fullgraph=True)
    model.reset_caches()
    first, _ = demo.decode(step, tokens[:1], 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        rest, _ = demo.decode(step, tokens[1:], 1)
        assert relative(torch.cat([first, rest]), eager) < rounding(format)
        model.reset_caches()
        again, seconds = demo.decode(step, tokens, 0)
    assert torch.equal(again, torch.cat([first, rest]))
    assert len(seconds) == 12
    assert all(second > 0 for second in seconds)


def test_decode_gives_the_logits_after_each_token() -> None:
    model, tokens = tiny(PLAIN), prompt(9)
    expected = logits_in_chunks(model, tokens, 9)[0]
    last = prefill(model, tokens[0, :4])
    assert relative(last, expected[3]) < ROUNDING[PLAIN]
    assert relative(demo.decode(model, tokens[0, 4:], 4)[0], expected[4:]) < ROUNDING[PLAIN]


def test_answer_streams_greedy_text_up_to_the_end_token() -> None:
    model, ids = tiny(PLAIN), prompt(5)
    expected: list[int] = []
    for _ in range(demo.ANSWER_TOKENS):
        expected.append(int(logits_in_chunks(model, ids, ids.size(1))[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([expected[-1:]])], dim=1)
    end = next(token for i, token in enumerate(expected) if i >= 4 and token not in expected[:i])
    shown = expected[: expected.index(end)]
    assert len(shown) >= 4
    for eos_token_id, answer in ((end, shown), (-1, expected)):
        words, written = Words(eos_token_id), []
        assert demo.answer(model, model, words, ids[0, :5], written.append) == (eos_token_id == end)
        assert "".join(written) == words.decode(answer)
        assert len(written) == len(answer)


def test_answer_holds_back_half_a_character() -> None:
    class Bytes(Words):
        def decode(self, token_ids: list[int]) -> str:
            return "\u00e9".encode()[: len(token_ids)].decode(errors="replace") if len(token_ids) < 3 else "\u00e9!"

    written: list[str] = []
    demo.answer(tiny(PLAIN), tiny(PLAIN), Bytes(-1), prompt(5)[0], written.append)
    assert written[:2] == ["\u00e9", "!"]


def test_perplexity_of_typed_facts() -> None:
    halves = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    read = losses(halves.expand(2, 4), torch.tensor([0, 1]))
    assert read.tolist() == pytest.approx([math.log(2), math.log(4)], rel=1e-6)
    assert perplexity(read) == pytest.approx(2**1.5, rel=1e-6)
    many = losses(torch.zeros(ROWS + 1, 8), torch.zeros(ROWS + 1, dtype=torch.int64))
    assert perplexity(many) == pytest.approx(8, rel=1e-12)
    assert perplexity(losses(halves.expand(3, 4) + 100, torch.tensor([2, 3, 3]))) == pytest.approx(8, rel=1e-5)


def test_comparison_of_typed_facts() -> None:
    plain = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    other = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log()
    same, divergences = compare(plain, other)
    assert same.tolist() == [False, True]  # of two equal halves argmax takes the first
    assert divergences.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0], rel=1e-6, abs=1e-7)
    many = torch.randn(ROWS + 1, 8, generator=torch.Generator().manual_seed(2))
    same, divergences = compare(many, many)
    assert bool(same.all())
    assert divergences.tolist() == [0.0] * (ROWS + 1)


def test_standard_errors_of_typed_facts() -> None:
    got = mean(torch.tensor([True, True, True, False]))
    assert (got.value, got.error) == (0.75, 0.25)  # 0.5 / sqrt(4): of a sample, so over n - 1
    plain = torch.tensor([5.0, 1.0, 3.0], dtype=torch.float64)
    same = change(plain, plain + math.log(1.5))
    assert (same.value, same.error) == pytest.approx((0.5, 0), abs=1e-12)  # the text's own spread does not count
    more = change(plain, plain + torch.tensor([0.1, 0.2, 0.3]))
    assert (more.value, more.error) == pytest.approx((math.exp(0.2) - 1, math.exp(0.2) * 0.1 / math.sqrt(3)))
    assert Estimate(0.00123, 0.0004).text("+.2%") == "+0.12% ± 0.04%"


def judged(**changes: float) -> Quality:
    facts = {"perplexity_change": 0.005, "agreement": 0.985, "divergence": 0.002, "recall_change": 0.01, **changes}
    estimates = {name: Estimate(value, 0.001) for name, value in facts.items()}
    return Quality(perplexity=20.0, recall_perplexity=1.5, **estimates)


def row(**changes: float | str) -> demo.Row:
    facts = {"bits_per_value": 8.5, "bytes_per_token": 46080, "nbytes": 82_500_000, "tokens_per_second": 22.25}
    return demo.Row(**{"cache": "int8", **facts, "quality": judged(), **changes})


def cells(table: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[1][0].strip("-") == ""
    assert all(rule.endswith("-:") for rule in lines[1][1:])
    assert len({len(line) for line in table.splitlines()}) == 1
    return [lines[0], *lines[2:]]


def test_table() -> None:
    lines = cells(demo.table([row(), row(quality=replace(judged(), perplexity=1e4))], 1792))
    assert lines[0][:5] == ["cache", "bits a value", "bytes a token", "MB for 1792 tokens", "tokens/s"]
    assert lines[0][5:] == ["perplexity", "top-1 agreement", "mean KL", "recall perplexity"]
    assert lines[1] == ["int8", "8.5", "46,080", "82.5", "22.2", "20.000", "0.9850", "0.00200", "1.500"]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"perplexity_change": -0.005, "recall_change": -0.01}, []),
        ({"perplexity_change": 0.0051}, ["perplexity within 0.5% of plain: +0.51% ± 0.10%"]),
        ({"perplexity_change": -0.0051}, ["perplexity within 0.5% of plain: -0.51% ± 0.10%"]),
        ({"recall_change": 0.011}, ["recall perplexity within 1.0% of plain: +1.10% ± 0.10%"]),
        ({"agreement": 0.9849}, ["top-1 agreement at least 0.985: 0.9849 ± 0.0010"]),
        ({"divergence": 0.0021}, ["mean KL at most 0.002: 0.002100 ± 0.001000"]),
        ({"divergence": math.nan}, ["mean KL at most 0.002: nan ± 0.001000"]),
    ],
)
def test_bars(changes: dict[str, float], missed: list[str]) -> None:
    assert [text for text, holds in check(judged(**changes), BARS["int8"]) if not holds] == missed


def test_slack_is_in_standard_errors() -> None:
    worse = judged(perplexity_change=0.0069, agreement=0.9831, divergence=0.0039, recall_change=-0.0119)
    assert [holds for _, holds in check(worse, BARS["int8"], 1)] == [False] * 4
    assert [holds for _, holds in check(worse, BARS["int8"], 2)] == [True] * 4


def test_bars_are_of_formats() -> None:
    assert all(get_format(name).name == name for name in BARS)
    assert set(demo.FORMATS) <= set(FORMATS)


def test_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it draws the picture")
    text = prompt(RECALL_START + RECALL_DISTANCE)[0]
    monkeypatch.setattr(quality, "load_model", lambda _: (tiny(PLAIN), None))
    monkeypatch.setattr(quality, "load_text", lambda _, tokens: text[:tokens])
    figures, picture = tmp_path / "new" / "figures.json", tmp_path / "new" / "picture.png"
    files = ["--json", str(figures), "--picture", str(picture)]
    code = quality.main(["--tokens", "150", "--formats", "int8", "int4_hq", *files])
    found = json.loads(figures.read_text())
    assert code == (0 if all(holds for bars in found["bars"].values() for holds in bars.values()) else 1)
    assert [bars in BARS for bars in found["bars"]] == [True, True]
    plain, int8, int4 = (row["quality"] for row in found["rows"])
    assert plain["agreement"] == {"value": 1.0, "error": 0.0}
    assert plain["divergence"]["value"] == plain["recall_change"]["value"] == 0
    assert 0 < int8["divergence"]["value"] < int4["divergence"]["value"] < 0.1
    assert int8["recall_change"]["error"] > 0
    assert int8["perplexity"] == pytest.approx(plain["perplexity"] * (1 + int8["perplexity_change"]["value"]))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    lines = cells("\n".join(line for line in shown.splitlines() if line.startswith("|")))
    assert [line[0] for line in lines] == ["cache", PLAIN, "int8", "int4_hq"]
    assert "over 150 tokens" in shown
    assert "int4_hq: mean KL at most 0.008: " in shown


@pytest.mark.parametrize("program", [demo, quality])
@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--formats", "int3"], "--formats: format must be one of"),
        (["--tokens", "1"], "--tokens must be from 2 to 8192, got 1"),
    ],
)
def test_arguments_refused(program, argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.arguments(argv)
    assert text in capsys.readouterr().err


def test_packaged_file() -> None:
    wrong = "0" * 64
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps no-such-thing==1$"):
        packaged_file("no-such-thing==1", "a/b", wrong)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps pytest==1$"):
        packaged_file("pytest==1", "pytest/no_such_file", wrong)
    with pytest.raises(ValueError, match=f"must have sha256 {wrong}, got [0-9a-f]{{64}}: reinstall pytest==1$"):
        packaged_file("pytest==1", "pytest/__init__.py", wrong)
