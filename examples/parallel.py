"""What the examples over several processes share: the group, a model of random weights, a decode judged against one
process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from examples.export_aoti import DecodeStep, generate
from examples.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, layers=2, heads_q=8, heads_kv=4, head_dim=32
)
PROMPT = torch.tensor([[3, 141, 59, 26, 53, 58]])
MAX_TOKENS = 256


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The group of ``torchrun`` and this process's device: NCCL where there is CUDA, else gloo."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def random_llama(device: torch.device) -> Llama:
    """The same weights in every process, of a size that keeps keys and values of order 1."""
    torch.manual_seed(0)
    model = Llama(CONFIG).requires_grad_(False).eval()
    model.embed_tokens.weight.mul_(0.02)
    for layer in model.layers:
        for weight in layer.self_attn.parameters():
            weight.normal_(std=weight.size(1) ** -0.5)
    return model.to(device)


@dataclass(frozen=True)
class Outcome:
    tokens: Tensor
    tokens_per_second: float
    error: float
    """Relative L2, of the logits."""


def compare_with_one(model: Llama, one: Llama, tokens: int) -> Outcome:
    """Decodes with the compiled ``model``, then feeds the same tokens to ``one``, which is whole, eagerly."""
    prompt = PROMPT.to(one.embed_tokens.weight.device)
    step = torch.compile(DecodeStep(model), fullgraph=True)
    generate(step, prompt[:, :1], 1)  # compiles
    model.reset_caches()
    got = generate(step, prompt, tokens)
    want = generate(DecodeStep(one), prompt, tokens, got.tokens)
    error = (got.logits.double() - want.logits.double()).norm() / want.logits.double().norm()
    return Outcome(got.tokens, got.tokens_per_second, float(error))


def arguments(program: str, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--format", default="int8_hq", help="of the caches; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="to generate; default: %(default)s")
    args = parser.parse_args(argv)
    if not 1 <= args.tokens <= MAX_TOKENS - PROMPT.size(1):
        parser.error(f"--tokens must be from 1 to {MAX_TOKENS - PROMPT.size(1)}, got {args.tokens}")
    return args


def report(outcome: Outcome, model: Llama, one: Llama) -> None:
    """One line of each rank."""
    held, whole = (sum(part.nbytes for cache in each.caches for part in cache.buffers()) for each in (model, one))
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    print(
        f"{rank}: {held:,} of {whole:,} cache bytes, {outcome.tokens_per_second:.1f} tokens/s, logits"
        f" {outcome.error:.1e} from one process, tokens {outcome.tokens[0, :8].tolist()} ...",
        flush=True,
    )
