"""ik_llama.cpp's CPU flash attention from the ik-llama-cpp-python wheel."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import torch

from benchmarks.common import Case, Contender
from benchmarks.peers import _ggml

PACKAGE = importlib.metadata.distribution("ik-llama-cpp-python")
LIBRARY = _ggml.Library(str(PACKAGE.locate_file("ik_llama_cpp/lib/libggml.so")))
VERSION = f"ik-llama-cpp-python {PACKAGE.version}, {LIBRARY.features()} build"


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes  # ggml takes fp32 queries
    yield from _ggml.contenders(LIBRARY, case, "ik_llama.cpp", ("q8_0", "q4_0"), masked=True)
