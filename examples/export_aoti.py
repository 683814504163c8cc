"""A decode step without Python: exported, compiled ahead of time to a ``.pt2``, and judged against eager.

``python -m examples.export_aoti --help`` lists the options. The caches of a package are its own buffers, which persist
between calls, or inputs, which the caller allocates; ``examples/aoti_runner`` runs either from C++.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call

import kvq_ops
from examples.llama import Llama
from examples.metrics import compare, mean
from examples.report import Console, machine, markdown, where
from examples.smollm2 import load_model

FORMATS = ["int8", "int4_hq", "int8_kivi"]
CACHES = ["buffers", "inputs"]
MAX_BATCH = 64
PROMPTS = ["The capital of Italy is Rome, a city that is known for", "Once upon a time, in a small village by the sea,"]

Step = Callable[[Tensor, Tensor], Tensor]


class DecodeStep(nn.Module):
    """Logits [batch, vocab] after tokens [batch, 1] at positions [1]; the caches are buffers of the model."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens, positions)[:, -1]


class DecodeStepOverInputs(DecodeStep):
    """The same over the parts of caches that the caller holds, by their names in the model."""

    def forward(self, tokens: Tensor, positions: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return functional_call(self.model, parts, (tokens, positions))[:, -1]


def cache_parts(model: Llama) -> dict[str, Tensor]:
    """Every part of every layer's cache by its name in the model."""
    return {name: part for name, part in model.named_buffers() if ".cache." in name}


def empty_parts(model: Llama, batch: int) -> dict[str, Tensor]:
    """Fresh parts for ``batch`` sequences, for a package that takes them as inputs."""
    parts = cache_parts(model)
    return {name: torch.zeros(batch, *part.shape[1:], dtype=part.dtype) for name, part in parts.items()}


def export_step(model: Llama, batch: int, caches: str) -> ExportedProgram:
    """The decode step of a model whose caches are set up and empty: over caches as buffers for ``batch`` sequences, as
    the caches are, over caches as inputs for any number up to ``MAX_BATCH``."""
    if caches == "inputs":
        batch = 2  # of an example with one, export would make a constant
    arguments = (torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with torch.no_grad():
        if caches == "buffers":
            return torch.export.export(DecodeStep(model), arguments)
        parts, size = empty_parts(model, batch), torch.export.Dim("batch", min=1, max=MAX_BATCH)
        shapes = ({0: size}, None, {name: {0: size} for name in parts})
        return torch.export.export(DecodeStepOverInputs(model), (*arguments, parts), dynamic_shapes=shapes)


def describe(model: Llama, batch: int, caches: str) -> dict[str, str]:
    """What a caller without Python must know: the version of ops and bytes, the batch, and of caches as inputs every
    part's dtype and shape, in the order of the inputs."""
    if caches == "buffers":
        return {**kvq_ops.PACKAGE_METADATA, "batch": str(batch), "inputs": ""}
    lines = [
        f"{str(part.dtype).removeprefix('torch.')} batch {' '.join(map(str, part.shape[1:]))}".strip()
        for part in cache_parts(model).values()
    ]
    return {**kvq_ops.PACKAGE_METADATA, "batch": "any", "inputs": "\n".join(lines)}


def compile_step(program: ExportedProgram, path: Path, metadata: dict[str, str], **configs: Any) -> None:
    """Compiles to the package ``path``; ``metadata`` travels in it, ``configs`` are Inductor's."""
    # Without the lower bound, AOTI_RUNTIME_CHECK_INPUTS=1 lets a batch of 1 pass where the batch is dynamic.
    ours = {"aot_inductor.metadata": metadata, "aot_inductor.check_lowerbound": False}
    if torch.__version__ >= "2.13":  # torch compares its own version number by number
        ours["aot_inductor.custom_ops_to_c_shims"] = kvq_ops.C_SHIMS
    torch._inductor.aoti_compile_and_package(  # noqa: SLF001 the name that torch documents
        program, package_path=str(path), inductor_configs=ours | configs
    )


def load_step(path: Path, model: Llama, batch: int) -> Step:
    """The package's step; over fresh caches like the model's, where they are inputs."""
    package = torch._inductor.aoti_load_package(str(path))  # noqa: SLF001 the name that torch documents
    metadata = package.get_metadata()
    kvq_ops.check_package(metadata)
    if not metadata["inputs"]:
        return package
    parts = empty_parts(model, batch)
    return lambda tokens, positions: package(tokens, positions, parts)


@dataclass(frozen=True)
class Generated:
    tokens: Tensor
    """[batch, n], the likeliest after each step"""
    logits: Tensor
    """[n, batch, vocab]"""
    tokens_per_second: float


@torch.inference_mode()
def generate(step: Step, prompt: Tensor, tokens: int, fed: Tensor | None = None) -> Generated:
    """Greedy decoding of ``tokens`` tokens after ``prompt`` [batch, n], both one by one; ``fed`` [batch, tokens] goes
    in instead of what was chosen, so that one near tie does not make all that follows another text."""
    given = prompt if fed is None else torch.cat([prompt, fed], dim=1)
    position, rows, begin = torch.zeros(1, dtype=torch.int64, device=prompt.device), [], 0.0
    token = given[:, :1]
    for index in range(prompt.size(1) + tokens - 1):
        if index == prompt.size(1) - 1:
            begin = time.perf_counter()
        # A package reads its inputs by the strides that it was exported with, whatever theirs are.
        logits = step(token.contiguous(), position)
        token = logits.argmax(-1, keepdim=True)
        if index >= prompt.size(1) - 1:
            rows.append(logits.clone())
        if index + 1 < given.size(1):
            token = given[:, index + 1 : index + 2]
        position += 1
    seconds = time.perf_counter() - begin
    chosen = torch.stack([row.argmax(-1) for row in rows], dim=1)
    return Generated(chosen, torch.stack(rows), chosen.numel() / seconds)


@dataclass(frozen=True)
class Agreement:
    """How near a package's steps are to eager's."""

    same: int
    """Steps whose choices are equal in every sequence."""
    difference: float
    """The largest of a logit."""
    divergence: float
    """The mean KL in nats."""
    close: bool
    """Whether the choice was eager's wherever eager's two best logits were further apart than twice the difference."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    format: str
    caches: str
    batch: int
    compile_seconds: float
    package_bytes: int
    eager: float
    tokens_per_second: float
    steps: int
    agreement: Agreement
    coding: float
    """The mean KL in nats of eager over this cache from eager over the plain one: what the format costs this text."""

    @property
    def holds(self) -> bool:
        """Sums in another order turn a few codes, these change the rows that follow, and soon the codes of eager and
        package are two roundings of nearly the same rows: no further from each other than from the rows themselves."""
        return self.agreement.close and self.agreement.divergence <= self.coding


def divergence(first: Generated, second: Generated) -> float:
    """The mean KL of the second from the first, in nats."""
    return mean(compare(first.logits.flatten(0, 1), second.logits.flatten(0, 1))[1]).value


def judge(eager: Generated, package: Generated) -> Agreement:
    """``package`` was fed what eager chose, so that with equal choices it generates the same text by itself."""
    same = eager.tokens == package.tokens
    difference = (eager.logits - package.logits).abs().amax(-1).T
    best = eager.logits.topk(2, -1).values
    tie = 2 * difference >= (best[..., 0] - best[..., 1]).T
    apart = divergence(eager, package)
    return Agreement(int(same.all(0).sum()), float(difference.max()), apart, bool((same | tie).all()))


class Exporter:
    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        with console.stage("Loading SmolLM2-135M-Instruct"):
            self.model, self.tokenizer = load_model(torch.float32)
        ids = [self.tokenizer(text)["input_ids"] for text in PROMPTS]
        length = min(map(len, ids))
        self.prompt = torch.tensor([row[:length] for row in ids])
        self.max_tokens = length + args.tokens
        self.seconds: dict[Path, float] = {}

    def run(self, format: str, caches: str, batch: int, folder: Path) -> Row:
        name = f"{format}, caches as {caches}, batch {batch}"
        self.model.setup_caches(batch, self.max_tokens, format)
        size = batch if caches == "buffers" else "any"
        path = folder / f"smollm2_{format}_{size}.pt2".replace("/", "-")
        if path not in self.seconds:
            begin = time.perf_counter()
            with self.console.stage(f"{name}: export and compile"):
                program = export_step(self.model, batch, caches)
                compile_step(program, path, describe(self.model, batch, caches))
            self.seconds[path] = time.perf_counter() - begin
        prompt = self.prompt[:batch]
        with self.console.stage(f"{name}: {self.args.tokens} tokens, eager, package and plain cache"):
            eager = generate(DecodeStep(self.model), prompt, self.args.tokens)
            package = generate(load_step(path, self.model, batch), prompt, self.args.tokens, eager.tokens)
            self.model.setup_caches(batch, self.max_tokens, "plain")
            plain = generate(DecodeStep(self.model), prompt, self.args.tokens, eager.tokens)
        self.console.line(repr(self.tokenizer.decode(package.tokens[0].tolist()[:24])))
        return Row(
            format=format,
            caches=caches,
            batch=batch,
            compile_seconds=self.seconds[path],
            package_bytes=path.stat().st_size,
            eager=eager.tokens_per_second,
            tokens_per_second=package.tokens_per_second,
            steps=self.args.tokens,
            agreement=judge(eager, package),
            coding=divergence(plain, eager),
        )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    header = ["cache", "as", "batch", "compile s", "package MB", "tokens/s", "eager tokens/s"]
    header += ["equal tokens", "largest logit difference", "mean KL", "KL of the format"]
    cells = [
        [
            row.format,
            row.caches,
            str(row.batch),
            f"{row.compile_seconds:.0f}",
            f"{row.package_bytes / 1e6:.1f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.eager:.1f}",
            f"{row.agreement.same}/{row.steps}",
            f"{row.agreement.difference:.2g}",
            f"{row.agreement.divergence:.2g}",
            f"{row.coding:.2g}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.export_aoti", description="A decode step without Python.")
    add = parser.add_argument
    add("--formats", nargs="*", default=FORMATS, help="default: %(default)s; any of kvq_ops")
    add("--batch", nargs="*", type=int, choices=[1, 2], default=[1, 2], help="default: %(default)s")
    add("--caches", nargs="*", choices=CACHES, default=CACHES, help="default: %(default)s")
    add("--tokens", type=int, default=200, help="to generate; default: %(default)s")
    add("--keep", type=Path, metavar="FOLDER", help="leave the packages there")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args(argv)
    for name in args.formats:
        try:
            kvq_ops.get_format(name)
        except ValueError as error:
            parser.error(f"--formats: {error}")
    if not 1 <= args.tokens <= 8000:
        parser.error(f"--tokens must be from 1 to 8000, got {args.tokens}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console, facts = arguments(argv), Console(), machine()
    print(f"SmolLM2-135M-Instruct, decode step as an AOTInductor package\n{where(facts)}")
    exporter = Exporter(args, console)
    with TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        choices = product(args.formats, args.caches, args.batch)
        rows = [exporter.run(format, caches, batch, folder) for format, caches, batch in choices]
    print(f"\n{table(rows)}\n\n{where(facts)}")
    if args.json:
        figures = {"machine": facts, "rows": [asdict(row) for row in rows]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    missed = [row for row in rows if not row.holds]
    for row in missed:
        print(
            f"missed: {row.format}, {row.caches}, batch {row.batch}: "
            "further from eager than eager is from the plain cache"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
