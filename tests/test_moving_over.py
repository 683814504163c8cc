"""The pages of docs/moving_over: the lines after "Now:" are run as they stand, those after "Before:" where they can."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from common import attention, relative_error
from torch import Tensor

PAGES = Path(__file__).parents[1] / "docs/moving_over"
ERRORS = {"int8": 0.01, "int4_hq": 0.12}
"""Relative L2 errors of attention over N(0, 1) that docs/formats.md gives, rounded up."""


def blocks(page: str) -> dict[str, list[str]]:
    """The page's Python by what stands before: ``Before`` or ``Now``, and what comes after."""
    found: dict[str, list[str]] = {}
    label = ""
    for said, code in re.findall(
        r"^(Before|Now):$|^```python\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL
    ):
        label = said or label
        if code:
            found.setdefault(label, []).append(code)
    assert list(found) == ["Before", "Now"]
    return found


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def test_kv_quant_attn() -> None:
    given = {"batch": 2, "heads_kv": 2, "head_dim": 64, "max_tokens": 256}
    given |= {"key": rows(2, 2, 200, 64), "value": rows(2, 2, 200, 64).roll(1, 0), "query": rows(2, 4, 1, 64)}
    expected, _ = attention(given["query"], given["key"], given["value"])
    first, second = blocks("kv_quant_attn.md")["Now"]
    old = blocks("kv_quant_attn.md")["Before"][0].splitlines()
    assert first.splitlines()[1:] == old[1:], "nothing but the first line changes"
    with torch.no_grad():
        exec(first, given)
        assert relative_error(given["out"], expected) < ERRORS["int8"]
        exec(second, given)
        assert ERRORS["int8"] < relative_error(given["out"], expected) < ERRORS["int4_hq"]


def test_cpu_attn() -> None:
    sizes = {"n_kv_heads": 2, "max_seq": 32, "head_dim": 64}
    k, v, q = rows(2, 64), rows(2, 64) + 1, rows(4, 64)
    keys, values, queries = rows(1, 2, 20, 64), rows(1, 2, 20, 64) + 1, rows(1, 4, 20, 64)
    given: dict[str, Any] = sizes | {"k": k, "v": v, "q": q, "keys": keys, "values": values, "queries": queries}
    with torch.no_grad():
        for code in blocks("cpu_attn.md")["Now"]:
            exec(code, given)
    assert relative_error(given["out"], v.double().repeat_interleave(2, 0)) < ERRORS["int8"]
    assert given["out"].shape == (4, 64)
    cache = given["cache"]  # the page's claim on uniform logits
    mean = cache.dequantize()[1].double().mean(2).repeat_interleave(2, 1)
    assert relative_error(cache.attend(torch.zeros(1, 4, 64)), mean) < 1e-5
    assert relative_error(given["outs"], attention(queries, keys, values)[0]) < ERRORS["int8"]


@pytest.fixture
def generation() -> dict[str, Any]:
    """A tiny model and a prompt, as the pages' code takes them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make test` installs it")
    if "cache" not in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
        pytest.skip(f"transformers {transformers.__version__} calls a model's cache past_key_values")
    from benchmarks.tiny_models import architecture, tiny_model

    ids = torch.randint(1, 128, (1, 14), generator=torch.Generator().manual_seed(0))
    model = tiny_model(architecture("Llama"))
    return {"model": model, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


def run_generation(codes: list[str], given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        for code in codes:
            exec(code, given)
    return given["tokens"]


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_static_cache(generation: dict[str, Any]) -> None:
    """Over 8 bits the model gives the tokens that it gave."""
    page = blocks("static_cache.md")
    before = run_generation(page["Before"], generation)
    now = run_generation(page["Now"], generation)
    assert before.shape == (1, 14 + 32)
    assert torch.equal(now, before)
    assert generation["cache"].report().quantized


def test_quantized_cache(generation: dict[str, Any]) -> None:
    now = run_generation(blocks("quantized_cache.md")["Now"], generation)
    assert now.shape == (1, 14 + 32)
    assert {layer.format for layer in generation["cache"].report().quantized} == {"int4_hq"}


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_quantized_cache_before(generation: dict[str, Any]) -> None:
    pytest.importorskip(
        "optimum.quanto", reason="optimum-quanto is not installed: transformers' QuantizedCache needs it"
    )
    tokens = run_generation(blocks("quantized_cache.md")["Before"], generation)
    assert tokens.shape == (1, 14 + 32)


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", (PAGES / page).read_text())
    assert [link for link in links if not (PAGES / link).exists()] == []
