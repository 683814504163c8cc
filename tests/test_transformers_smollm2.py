"""SmolLM2 in transformers over KVQCache, against the demo's own Llama over QuantizedKVCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from examples.demo import ANSWER_TOKENS, PROMPT, SLACK
from examples.llama import PLAIN, Llama
from examples.metrics import BARS, Readings, check, judge
from examples.reading import chunks, prefill
from examples.smollm2 import MODEL, from_transformers, load_text, packaged_file
from kvq_ops import get_format
from kvq_ops.integrations.transformers import KVQCache
from tests.transformers_models import ARGUMENT, attention

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # transformers' own, of the file's format
TOKENS = 512


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any, Llama]:
    try:
        path = packaged_file(*MODEL)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make test` installs it")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer, from_transformers(model)


def demo_answer(llama: Llama, prompt: Tensor, format: str, eos: int) -> list[int]:
    """The demo's greedy loop: the prompt in its chunks, then token by token."""
    llama.setup_caches(1, len(prompt) + ANSWER_TOKENS, format)
    logits, position = prefill(llama, prompt), torch.tensor([len(prompt)])
    ids: list[int] = []
    while len(ids) < ANSWER_TOKENS:
        token = logits.argmax().reshape(1, 1)
        ids.append(int(token))
        if ids[-1] == eos:
            break
        logits = llama(token, position)[0, -1]
        position.add_(1)
    return ids


@pytest.fixture(scope="module")
def prompt(loaded: tuple[Any, Any, Llama]) -> Tensor:
    chat = [{"role": "user", "content": PROMPT}]
    return loaded[1].apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def test_generate_answers_as_the_demo(loaded: tuple[Any, Any, Llama], prompt: Tensor) -> None:
    model, tokenizer, llama = loaded
    format = "int8_hq"
    with torch.inference_mode():
        expected = demo_answer(llama, prompt[0], format, tokenizer.eos_token_id)
    cache = KVQCache(model.config, prompt.shape[1] + ANSWER_TOKENS, format)
    with attention(model, "kvq"), torch.inference_mode():
        given = {ARGUMENT: cache, "max_new_tokens": ANSWER_TOKENS, "do_sample": False}
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)[0, prompt.shape[1] :]
    assert "Rome" in tokenizer.decode(found)
    assert found.tolist() == expected


# Sums in another order move codes that lie on an edge, so two runs of a format differ by as much as each differs from
# the plain cache; where the plain model's two best tokens are nearer than this, either may win.
SURE = {"int8": 0.25, "int4_hq": 0.5}


@pytest.mark.parametrize("format", list(SURE))
def test_choices_are_the_demos(loaded: tuple[Any, Any, Llama], prompt: Tensor, format: str) -> None:
    """On the demo's own answer, token by token."""
    from transformers import DynamicCache

    model, tokenizer, llama = loaded
    with torch.inference_mode():
        answer = torch.tensor(demo_answer(llama, prompt[0], format, tokenizer.eos_token_id))

        def logits(cache: Any) -> Tensor:
            given = {ARGUMENT: cache, "logits_to_keep": 1}
            first = model(prompt, **given).logits[0]
            return torch.cat([first, *(model(token[None, None], **given).logits[0] for token in answer[:-1])])

        plain = logits(DynamicCache(config=model.config))
        with attention(model, "kvq"):
            found = logits(KVQCache(model.config, prompt.shape[1] + ANSWER_TOKENS, format))
    best = plain.topk(2, -1).values
    sure = best[:, 0] - best[:, 1] > SURE[format]
    assert sure.float().mean() > 0.6
    assert torch.equal(found.argmax(-1)[sure], answer[sure])


def read(model: Any, text: Tensor, cache: Any, format: str) -> Tensor:
    """Logits after each token, in chunks that show each query what it would see if tokens came one by one."""
    found = []
    cuts = chunks(None if format == PLAIN else get_format(format), 0, len(text))
    with torch.inference_mode():
        for first, last in cuts:
            found.append(model(text[None, first:last], **{ARGUMENT: cache}).logits[0])
    return torch.cat(found)


def test_quality_is_the_demos(loaded: tuple[Any, Any, Llama]) -> None:
    """The bars of the demo over as many tokens as it reads."""
    from transformers import DynamicCache

    model, tokenizer, _ = loaded
    text = load_text(tokenizer, TOKENS + 1)
    inputs, targets = text[:TOKENS], text[1:]
    plain = read(model, inputs, DynamicCache(config=model.config), PLAIN)
    none = torch.zeros(2, dtype=torch.float64)
    for format in ("int8", "int8_hq", "int4_hq"):
        with attention(model, "kvq"):
            logits = read(model, inputs, KVQCache(model.config, TOKENS, format), format)
        quality = judge(Readings(plain, targets, none), Readings(logits, targets, none))
        missed = [said for said, holds in check(quality, BARS[format], SLACK) if not holds]
        assert missed == [], f"{format}: {quality}"
