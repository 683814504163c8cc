"""The main job: a real model decodes over a plain and over quantized caches, and a table says what each cost.

``python -m examples.demo --help`` lists the options. The decode step is compiled with ``fullgraph=True``, batch 1;
the answer and the text come from that step, one token at a time. The answer's prompt and the recall go through the
model in chunks, not compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

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
    prefill,
    recall,
)
from examples.report import Console, machine, markdown, show_verdicts, where
from examples.smollm2 import load_model, load_text

FORMATS = ["int8", "int4_hq", "int4"]
DTYPE = torch.float32
"""Of weights, activations and the plain cache. bfloat16 halves the bytes but is slower on a CPU without instructions
for it, and no faster at batch 1 on one with them."""
PROMPT = "What is the capital of Italy, and what is it famous for?"
ANSWER_TOKENS = 64
SLACK = 2
"""Standard errors by which a figure over few tokens may miss a bar that is set for 2048 of them."""

Step = Callable[[Tensor, Tensor], Tensor]


class Tokenizer(Protocol):
    eos_token_id: int

    def decode(self, token_ids: list[int], /) -> str: ...


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    cache: str
    bits_per_value: float
    bytes_per_token: int
    nbytes: int
    tokens_per_second: float
    quality: Quality


def decode(step: Step, ids: Tensor, start: int) -> tuple[Tensor, list[float]]:
    """Feed ``ids`` [n] one at a time at positions ``start`` on: the logits [n, vocab] after each, and its seconds."""
    position, rows, seconds = torch.tensor([start]), [], []
    for token in ids.split(1):
        begin = time.perf_counter()
        logits = step(token[None], position)
        seconds.append(time.perf_counter() - begin)
        rows.append(logits[0, -1])
        position.add_(1)
    return torch.stack(rows), seconds


def answer(model: Llama, step: Step, tokenizer: Tokenizer, prompt: Tensor, write: Callable[[str], None]) -> bool:
    """Greedy decoding; ``write`` gets the text as it comes. Whether the model came to its end."""
    logits, position = prefill(model, prompt), torch.tensor([len(prompt)])
    ids: list[int] = []
    written = 0
    while len(ids) < ANSWER_TOKENS:
        token = logits.argmax().reshape(1, 1)
        if int(token) == tokenizer.eos_token_id:
            return True
        ids.append(int(token))
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character's first bytes
            write(text[written:])
            written = len(text)
        logits = step(token, position)[0, -1]
        position.add_(1)
    return False


class Demo:
    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.console = console
        with console.stage("Loading SmolLM2-135M-Instruct"):
            self.model, self.tokenizer = load_model(DTYPE)
            self.text = load_text(self.tokenizer, max(args.tokens + 1, RECALL_START + RECALL_DISTANCE))
            chat = [{"role": "user", "content": args.prompt}]
            encoded = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
            self.prompt = encoded["input_ids"][0]
        self.tokens = args.tokens
        self.max_tokens = max(len(self.prompt) + ANSWER_TOKENS, args.tokens, RECALL_DISTANCE + RECALL_TOKENS)
        if self.max_tokens > self.model.config.max_positions:
            most = self.model.config.max_positions - ANSWER_TOKENS
            sys.exit(f"--prompt must be at most {most} tokens, got {len(self.prompt)}")
        console.line(f"Question: {args.prompt}")
        self.plain: Readings | None = None

    def compile_step(self, name: str) -> Step:
        """The decode step over empty caches of this format, compiled by one call."""
        torch.compiler.reset()
        self.model.setup_caches(1, self.max_tokens, name)
        step = torch.compile(self.model, fullgraph=True)
        with self.console.stage(f"{name}: compiling the decode step"):
            step(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        return step

    def run(self, name: str) -> Row:
        """Compile, answer, read the text, recall; the first call's logits are what later ones are compared with."""
        model, step = self.model, self.compile_step(name)
        self.console.line(f"{name}: ", end="")
        ended = answer(model, step, self.tokenizer, self.prompt, self.console.answer)
        print("" if ended else " ...")
        with self.console.stage(f"{name}: reading {self.tokens} tokens of text, one at a time"):
            model.reset_caches()
            logits, seconds = decode(step, self.text[: self.tokens], 0)
        with self.console.stage(f"{name}: recalling {RECALL_TOKENS} tokens, {RECALL_DISTANCE} tokens later"):
            recalled = recall(model, self.text)
        readings = Readings(logits, self.text[1 : self.tokens + 1], recalled)
        self.plain = self.plain or readings
        return Row(
            cache=name,
            bits_per_value=bits_per_value(model),
            bytes_per_token=sum(cache.bytes_per_token for cache in model.caches),
            nbytes=sum(cache.nbytes for cache in model.caches),
            tokens_per_second=1 / statistics.median(seconds),
            quality=judge(self.plain, readings),
        )


def table(rows: Sequence[Row], max_tokens: int) -> str:
    """The rows as a Markdown table."""
    header = ["cache", "bits a value", "bytes a token", f"MB for {max_tokens} tokens", "tokens/s"]
    header += ["perplexity", "top-1 agreement", "mean KL", "recall perplexity"]
    cells = [
        [
            row.cache,
            f"{row.bits_per_value:.3g}",
            f"{row.bytes_per_token:,}",
            f"{row.nbytes / 1e6:.1f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.quality.perplexity:.3f}",
            f"{row.quality.agreement.value:.4f}",
            f"{row.quality.divergence.value:.5f}",
            f"{row.quality.recall_perplexity:.3f}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def footnotes(plain: Row, tokens: int) -> str:
    """What the table's columns are."""
    half = plain.bytes_per_token * 2 // DTYPE.itemsize
    return (
        f"plain: keys and values in {str(DTYPE).removeprefix('torch.')}, like the model; a 16-bit cache would take"
        f" {half:,} bytes a token.\n"
        f"perplexity, agreement, KL against plain: over {tokens} tokens of a speech, decoded one by one.\n"
        f"recall perplexity: {RECALL_NOTE}.\n"
        f"bits a value count all that describes a coded token; MB also the rows that hq and kivi keep in full"
        f" precision.\n"
        f"The bars are those of `make quality`; over {tokens} tokens {SLACK} standard errors are allowed for.\n"
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m examples.demo",
        description="A model decodes over quantized caches.",
        epilog="OMP_WAIT_POLICY=active makes a step faster on an idle machine, and far slower on a busy one.",
    )
    parser.add_argument(
        "--formats", nargs="*", default=FORMATS, help="to compare with plain; default: %(default)s; any of kvq_ops"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of text to compare over; default: %(default)s")
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args(argv)
    for name in args.formats:
        try:
            kvq_ops.get_format(name)
        except ValueError as error:
            parser.error(f"--formats: {error}")
    if not 2 <= args.tokens <= 8192:
        parser.error(f"--tokens must be from 2 to 8192, got {args.tokens}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console, facts = arguments(argv), Console(), machine()
    print(
        f"SmolLM2-135M-Instruct over {', '.join([PLAIN, *args.formats])} caches, batch 1, decode step compiled\n"
        f"{where(facts)}"
    )
    demo = Demo(args, console)
    rows = [demo.run(name) for name in [PLAIN, *args.formats]]
    print(f"\n{table(rows, demo.max_tokens)}\n\n{where(facts)}")
    print(footnotes(rows[0], args.tokens))
    results = verdicts({row.cache: row.quality for row in rows}, SLACK)
    held = show_verdicts(results)
    console.line(f"done; the first text came after {console.first_text or 0:.0f} s")
    if args.json:
        figures = {
            "machine": facts,
            "tokens": args.tokens,
            "max_tokens": demo.max_tokens,
            "seconds": {"first_text": console.first_text, "all": console.seconds()},
            "rows": [asdict(row) for row in rows],
            "bars": {name: dict(checks) for name, checks in results.items()},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
