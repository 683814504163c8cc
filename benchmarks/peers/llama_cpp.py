"""llama.cpp's CPU flash attention from the xllamacpp wheel, whose extension module exports ggml."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import torch

from benchmarks.common import Case, Contender
from benchmarks.peers import _ggml

PACKAGE = importlib.metadata.distribution("xllamacpp")
LIBRARY = _ggml.Library(str(PACKAGE.locate_file("xllamacpp/xllamacpp.abi3.so")))
VERSION = f"xllamacpp {PACKAGE.version}, {LIBRARY.features()} build"


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes  # ggml takes fp32 queries
    yield from _ggml.contenders(LIBRARY, case, "llama.cpp", ("q8_0", "q4_0"), masked=False)
