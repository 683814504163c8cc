"""The floor: a streaming read of as many bytes as the int8 and int4 caches hold, rotated like them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import bandwidth
from benchmarks.common import Case, Contender

VERSION = "streaming read, bandwidth.c"
LIBRARY = bandwidth.library()
SCALE_BYTES = 4


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes
    for bits in (8, 4):
        nbytes = case.geometry.cache_bytes(case.tokens, bits, SCALE_BYTES)
        stride = -(-nbytes // bandwidth.ALIGNMENT) * bandwidth.ALIGNMENT
        memory = bandwidth.arena(stride * case.copies(nbytes))
        calls = [
            partial(LIBRARY.kvq_read, memory.data_ptr() + at, nbytes, case.threads)
            for at in range(0, len(memory), stride)
        ]
        yield Contender(f"floor int{bits}", bits, nbytes, calls, keep=[memory])
