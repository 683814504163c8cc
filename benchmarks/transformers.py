"""SmolLM2 in transformers over KVQCache, over transformers' own plain and quantized caches, all in one run.

python -m benchmarks.transformers --prompt 1024 --tokens 64

Every cache reads the same speech: a prompt at once, then one token after another, the caches taking turns at each token
so that a noisy moment of the machine hits all. transformers' QuantizedCache wants optimum-quanto or hqq; what is not
installed, or fails, is left out with its words.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

from benchmarks.common import command, csv, describe, machine, save
from benchmarks.report import columns
from examples.metrics import compare, losses, perplexity
from examples.smollm2 import MODEL, load_text, packaged_file
from kvq_ops.integrations.transformers import KVQCache

PLAIN = "plain"


@dataclass
class Run:
    """One cache, how the model attends over it, and what came of it."""

    name: str
    implementation: str
    cache: Any
    call: Callable[..., Any]
    logits: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prompt_seconds: float = 0.0
    step_bytes: int = 0


def model_and_text(tokens: int) -> tuple[PreTrainedModel, Tensor]:
    path = packaged_file(*MODEL)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model.eval().requires_grad_(False), load_text(AutoTokenizer.from_pretrained(**source), tokens)


def runs(model: PreTrainedModel, capacity: int, formats: list[str], compiled: bool) -> Iterator[Run]:
    """The caches; those of peers that cannot be made are told and left out."""
    config = model.config
    step = torch.compile(model, fullgraph=True, dynamic=False) if compiled else None
    yield Run(PLAIN, "sdpa", DynamicCache(config=config), model)
    for name in formats:
        yield Run(f"kvq {name}", "kvq", KVQCache(config, capacity, name), model)
    if step is not None:
        yield Run("static, compiled", "sdpa", StaticCache(config=config, max_cache_len=capacity), step)
        for name in formats:
            yield Run(f"kvq {name}, compiled", "kvq", KVQCache(config, capacity, name), step)
    for backend, given in (("quanto", {"nbits": 4}), ("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1})):
        try:
            cache = QuantizedCache(backend=backend, config=config, **given)
        except ImportError as error:
            print(f"{backend}: left out: {error}", flush=True)
            continue
        yield Run(f"{backend} int{given['nbits']}", "sdpa", cache, model)


def feed(model: PreTrainedModel, run: Run, ids: Tensor, call: Callable[..., Any]) -> tuple[Tensor, float]:
    """One call over the run's cache: its logits [n, vocabulary] and its seconds."""
    model.set_attn_implementation(run.implementation)
    begin = time.perf_counter()
    logits = call(ids[None], cache=run.cache, logits_to_keep=1 if len(ids) > 1 else 0).logits[0]
    return logits.float(), time.perf_counter() - begin


def held(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of every tensor that an object holds, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        inner = getattr(thing, "__tensor_flatten__", None)
        if inner is not None:
            return sum(held(getattr(thing, name), seen) for name in inner()[0])
        storage = thing.untyped_storage()
        new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if new else 0
    if isinstance(thing, torch.nn.Module):
        return sum(held(part, seen) for part in thing.buffers())
    if isinstance(thing, dict):
        return sum(held(part, seen) for part in thing.values())
    if isinstance(thing, (list, tuple)):
        return sum(held(part, seen) for part in thing)
    return sum(held(layer.__dict__, seen) for layer in getattr(thing, "layers", ()))


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that a call has allocated at once, beyond what there was before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def read(model: PreTrainedModel, found: list[Run], text: Tensor, prompt: int) -> list[Run]:
    """Let every run read the text; those that fail are told and dropped."""
    kept = []
    for run in found:
        try:
            logits, run.prompt_seconds = feed(model, run, text[:prompt], model)
            run.logits.append(logits[-1:])
            # Compiles, where the run does; its token is not timed.
            run.logits.append(feed(model, run, text[prompt : prompt + 1], run.call)[0])
        except Exception as error:
            print(f"{run.name}: left out: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        kept.append(run)
        print(f"{run.name}: the prompt took {run.prompt_seconds:.1f} s", flush=True)
    for t in range(prompt + 1, len(text) - 2):
        for run in kept:
            logits, seconds = feed(model, run, text[t : t + 1], run.call)
            run.logits.append(logits)
            run.seconds.append(seconds)
    for run in kept:
        run.step_bytes = peak(lambda run=run: run.logits.append(feed(model, run, text[-2:-1], run.call)[0]))
    return kept


def rows(found: list[Run], text: Tensor, prompt: int) -> Iterator[dict[str, Any]]:
    plain = found[0]
    expected, targets = torch.cat(plain.logits), text[prompt:]
    for run in found:
        logits = torch.cat(run.logits)
        same, divergence = compare(expected, logits)
        median = statistics.median(run.seconds)
        yield {
            "cache": run.name,
            "prompt_seconds": run.prompt_seconds,
            "seconds": median,
            "ratio": statistics.median(b / a for a, b in zip(plain.seconds, run.seconds, strict=True)),
            "nbytes": held(run.cache),
            "step_bytes": run.step_bytes,
            "perplexity": perplexity(losses(logits, targets)),
            "agreement": float(same.double().mean()),
            "divergence": float(divergence.mean()),
        }


HEADER = [
    "cache",
    "prompt s",
    "ms a token",
    "to plain",
    "cache MB",
    "step MB",
    "perplexity",
    "top-1 agreement",
    "mean KL",
]


def shown(row: dict[str, Any]) -> list[str]:
    return [
        row["cache"],
        f"{row['prompt_seconds']:.2f}",
        f"{1e3 * row['seconds']:.1f}",
        f"{row['ratio']:.2f}x",
        f"{row['nbytes'] / 1e6:.1f}",
        f"{row['step_bytes'] / 1e6:.1f}",
        f"{row['perplexity']:.3f}",
        f"{row['agreement']:.4f}",
        f"{row['divergence']:.5f}",
    ]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens that go in at once; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="tokens after it; default: %(default)s")
    parser.add_argument("--format", type=csv, default=["int8", "int8_hq", "int4_hq"])
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled steps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    facts = machine()
    print(describe(facts), flush=True)
    length = arguments.prompt + arguments.tokens + 1
    model, text = model_and_text(length)
    with torch.no_grad():
        made = list(runs(model, length, arguments.format, not arguments.no_compile))
        found = list(rows(read(model, made, text, arguments.prompt), text, arguments.prompt))
    print(f"\n{columns(HEADER, map(shown, found))}")
    save(arguments.json, {"command": command("transformers", argv), "machine": facts, "rows": found})
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
