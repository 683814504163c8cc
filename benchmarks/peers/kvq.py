"""kvq_ops: torch.ops.kvq.attend over int8 and int4 caches, filled by torch.ops.kvq.append."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import kvq_ops
from benchmarks.common import Case, Contender, result_of

VERSION = f"kvq_ops {kvq_ops.__version__} on {kvq_ops.cpu_isa()}"


def cache(case: Case, name: str) -> tuple[list[torch.Tensor], int]:
    """The parts of a full cache of the case in the order of the ops' arguments, and the bytes that attend reads."""
    shape = case.geometry.batch, case.geometry.heads_kv, case.geometry.head_dim
    plan = kvq_ops.get_format(name).parts(*shape, case.base_tokens).values()
    parts = [torch.zeros(part.shape, dtype=getattr(torch, part.dtype)) for part in plan]
    lengths = torch.zeros(case.geometry.batch, dtype=torch.int32)
    torch.ops.kvq.append(*parts, lengths, case.key, case.value, name)
    full = [case.tiled(part) for part in parts]
    return full, sum(part.nbytes for part in full)


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    lengths = torch.full((case.geometry.batch,), case.tokens, dtype=torch.int32)
    for name, bits in (("int8", 8), ("int4", 4)):
        parts, nbytes = cache(case, name)
        copies = [parts, *([part.clone() for part in parts] for _ in range(case.copies(nbytes) - 1))]
        for dtype in query_dtypes:
            query = case.query.to(dtype)
            calls = [partial(torch.ops.kvq.attend, query, *copy, lengths, name) for copy in copies]
            suffix = "" if dtype == torch.float32 else f" q={str(dtype).removeprefix('torch.')}"
            yield Contender(f"kvq {name}{suffix}", bits, nbytes, calls, result_of(calls[0]))
