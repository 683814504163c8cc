"""The examples' Llama, its caches and the demo's figures, on a model of random weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from examples import demo
from examples.llama import PLAIN, Llama, LlamaConfig
from examples.metrics import ROWS, Comparison, compare, perplexity
from examples.smollm2 import from_transformers, packaged_file

TINY = LlamaConfig(
    vocab_size=96,
    hidden_size=96,
    intermediate_size=80,
    layers=2,
    heads_q=6,
    heads_kv=2,
    head_dim=16,
    max_positions=80,
)
MAX_TOKENS = 72
PUBLISHED = {"int8": 1.0e-2, "int4": 1.8e-1}
"""Relative L2 error of attention over N(0, 1), which the residual stream of a model dilutes."""
ROUNDING = {PLAIN: 2e-6, "int8": 1e-3, "int4": 1.8e-2}
"""Between two orders of the same sums: fp32, and a few codes that lay on the edge and fell to the other side."""


def tiny(format: str, batch: int = 1) -> Llama:
    torch.manual_seed(0)
    model = Llama(TINY).requires_grad_(False)
    model.embed_tokens.weight.mul_(0.02)  # else a tied model repeats its last token
    for layer in model.layers:  # keys and values of order 1
        for weight in layer.self_attn.parameters():
            weight.normal_(std=weight.size(1) ** -0.5)
    model.setup_caches(batch, MAX_TOKENS, format)
    return model


def prompt(tokens: int, batch: int = 1) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))


def logits_in_chunks(model: Llama, tokens: Tensor, *chunks: int) -> Tensor:
    model.reset_caches()
    positions = torch.arange(tokens.size(1)).split(list(chunks))
    return torch.cat([model(tokens[:, rows], rows) for rows in positions], dim=1)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


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
    assert relative(logits_in_chunks(model, tokens, *[1] * 16), whole) < ROUNDING[format]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("format", [PLAIN, "int8"])
def test_compiled_equals_eager(format: str) -> None:
    model, tokens = tiny(format), prompt(12)[0]
    model.reset_caches()
    eager, _ = demo.decode(model, tokens, 0)
    step = torch.compile(model, fullgraph=True)
    model.reset_caches()
    first, _ = demo.decode(step, tokens[:1], 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        rest, _ = demo.decode(step, tokens[1:], 1)
        assert relative(torch.cat([first, rest]), eager) < ROUNDING[format]
        model.reset_caches()
        again, seconds = demo.decode(step, tokens, 0)
    assert torch.equal(again, torch.cat([first, rest]))
    assert len(seconds) == 12
    assert all(second > 0 for second in seconds)


def test_decode_gives_the_logits_after_each_token() -> None:
    model, tokens = tiny(PLAIN), prompt(9)
    expected = logits_in_chunks(model, tokens, 9)[0]
    last = demo.prefill(model, tokens[0, :4])
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
    assert perplexity(halves.expand(2, 4), torch.tensor([0, 1])) == pytest.approx(2**1.5, rel=1e-6)
    assert perplexity(torch.zeros(ROWS + 1, 8), torch.zeros(ROWS + 1, dtype=torch.int64)) == pytest.approx(8, rel=1e-12)
    assert perplexity(halves.expand(3, 4) + 100, torch.tensor([2, 3, 3])) == pytest.approx(8, rel=1e-5)


def test_comparison_of_typed_facts() -> None:
    plain = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    other = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log()
    compared = compare(plain, other)
    # KL of the first row: 0.5 ln 2 + 0.5 ln 2/3; of two equal halves argmax takes the first.
    assert compared.divergence == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, rel=1e-6)
    assert compared.agreement == 0.5
    many = torch.randn(ROWS + 1, 8, generator=torch.Generator().manual_seed(2))
    assert compare(many, many) == Comparison(agreement=1.0, divergence=0.0)


def row(**changes: float) -> demo.Row:
    facts = {
        "bytes_per_token": 46080,
        "nbytes": 82_500_000,
        "tokens_per_second": 22.25,
        "perplexity": 20.0,
        "agreement": 0.985,
        "divergence": 0.002,
        "recall_perplexity": 1.5,
    }
    return demo.Row(cache="int8", **{**facts, **changes})


def test_table() -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in demo.table([row()], 1792).splitlines()]
    assert lines[0][:4] == ["cache", "bytes a token", "MB for 1792 tokens", "tokens/s"]
    assert lines[0][4:] == ["perplexity", "top-1 agreement", "mean KL", "recall perplexity"]
    assert lines[1][0].strip("-") == ""
    assert all(rule.endswith("-:") for rule in lines[1][1:])
    assert lines[2:] == [["int8", "46,080", "82.5", "22.2", "20.000", "0.9850", "0.00200", "1.500"]]
    assert len({len(line) for line in demo.table([row(), row(perplexity=1e4)], 1792).splitlines()}) == 1


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, [True, True, True]),
        ({"perplexity": 20.11}, [False, True, True]),
        ({"perplexity": 19.89}, [False, True, True]),
        ({"agreement": 0.9849}, [True, False, True]),
        ({"divergence": 0.0021}, [True, True, False]),
    ],
)
def test_bars(changes: dict[str, float], held: list[bool]) -> None:
    assert [holds for _, holds in demo.check(row(), row(**changes), demo.BARS["int8"])] == held


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--formats", "int3"], "--formats: format must be one of"),
        (["--tokens", "0"], "--tokens must be from 1 to 8192, got 0"),
    ],
)
def test_arguments_refused(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.arguments(argv)
    assert text in capsys.readouterr().err


def test_packaged_file() -> None:
    wrong = "0" * 64
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps no-such-thing==1$"):
        packaged_file("no-such-thing==1", "a/b", wrong)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps pytest==1$"):
        packaged_file("pytest==1", "pytest/no_such_file", wrong)
    with pytest.raises(ValueError, match=f"must have sha256 {wrong}, got [0-9a-f]{{64}}: reinstall pytest==1$"):
        packaged_file("pytest==1", "pytest/__init__.py", wrong)
