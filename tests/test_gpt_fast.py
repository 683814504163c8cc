"""The example in gpt-fast's shape: the same tokens over both caches, one graph each, three lines of difference."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path

import pytest
import torch
from tiny_llama import TINY, prompt, tiny

from examples import gpt_fast
from examples.gpt_fast import Attention, QuantizedAttention, Transformer, from_llama, generate

EAGER = (gpt_fast.prefill, gpt_fast.decode_one_token)
PAGE = Path(__file__).parents[1] / "docs/moving_over/gpt_fast.md"


def model(format: str, batch: int = 1) -> Transformer:
    made = from_llama(tiny("plain"), format)
    made.setup_caches(batch, 64)
    return made


def test_plain_is_the_llama() -> None:
    llama, tokens = tiny("plain", batch=2), prompt(12, batch=2)
    ours = model("plain", batch=2)
    with torch.no_grad():
        expected = llama(tokens, torch.arange(12))
        torch.testing.assert_close(ours(tokens[:, :8], torch.arange(8)), expected[:, :8])
        torch.testing.assert_close(ours(tokens[:, 8:], torch.arange(8, 12)), expected[:, 8:])


@pytest.mark.parametrize("format", ["int8", "int8_hq"])
def test_same_tokens_as_plain(format: str) -> None:
    """Greedy over 2 sequences. And anew, over the caches of a longer sequence before."""
    plain, quantized = model("plain", batch=2), model(format, batch=2)
    expected = generate(plain, prompt(12, batch=2), 20, EAGER)
    assert expected.unique().numel() > 5
    assert torch.equal(generate(quantized, prompt(12, batch=2), 20, EAGER), expected)
    generate(quantized, prompt(30, batch=2), 5, EAGER)
    assert torch.equal(generate(quantized, prompt(12, batch=2), 20, EAGER), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("format", ["int8", "int4_hq"])
def test_compiled_once(format: str) -> None:
    """Both functions whole; neither is compiled again for another prompt or another step."""
    torch.compiler.reset()
    quantized, steps = model(format), gpt_fast.compiled()
    expected = [generate(quantized, prompt(tokens), 8, EAGER) for tokens in (12, 17, 9)]
    got = [generate(quantized, prompt(12), 8, steps)]
    with torch.compiler.set_stance("fail_on_recompile"):
        got += [generate(quantized, prompt(tokens), 8, steps) for tokens in (17, 9)]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert TINY.vocab_size > int(torch.cat(got, dim=1).max())


def changed_lines() -> list[str]:
    """Of Attention against QuantizedAttention, signatures apart."""

    def lines(attention: type) -> list[str]:
        body = inspect.getsource(attention).splitlines()
        return [line.strip() for line in body if not re.match(r"\s*(class|def) ", line)]

    found = difflib.ndiff(lines(Attention), lines(QuantizedAttention))
    return [line for line in found if line[:2] in ("- ", "+ ")]


def test_three_lines_differ() -> None:
    changes = changed_lines()
    assert sum(line.startswith("+") for line in changes) == 3
    assert sum(line.startswith("-") for line in changes) == 3


def test_page_shows_them() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [f"{line[0]} {line[1:].strip()}" for line in shown.splitlines() if line[:1] in ("-", "+")]
    assert sorted(lines) == sorted(changed_lines())
