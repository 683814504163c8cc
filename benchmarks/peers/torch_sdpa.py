"""torch's scaled_dot_product_attention with enable_gqa over a plain fp32 or bf16 cache: what a torch user has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import Case, Contender, result_of

VERSION = f"torch {torch.__version__}"


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes  # the query has the cache's dtype
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        query = case.query[:, :, None].to(dtype)
        parts = [case.tiled(case.key.to(dtype)), case.tiled(case.value.to(dtype))]
        nbytes = sum(part.nbytes for part in parts)
        copies = [parts, *([part.clone() for part in parts] for _ in range(case.copies(nbytes) - 1))]
        calls = [partial(scaled_dot_product_attention, query, key, value, enable_gqa=True) for key, value in copies]
        yield Contender(f"torch SDPA {name}", 8 * dtype.itemsize, nbytes, calls, result_of(calls[0]))
