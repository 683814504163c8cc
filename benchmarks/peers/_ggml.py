"""ggml's flash attention through ctypes: one query a sequence over quantized caches. Shared by its two peers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common import Case, Contender

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
BITS = {"q8_0": (Q8_0, 8, 34), "q4_0": (Q4_0, 4, 18)}
"""Type, bits, and bytes of a block of 32 elements."""
PRECISION_F32 = 10


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Library:
    """The functions of one build of ggml."""

    def __init__(self, path: str) -> None:
        pointer, integer, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
        self.loaded = ctypes.CDLL(path)
        self.init = self.function("ggml_init", pointer, InitParams)
        self.free = self.function("ggml_free", None, pointer)
        self.tensor = self.function("ggml_new_tensor_4d", pointer, pointer, integer, *[long] * 4)
        self.data = self.function("ggml_get_data", pointer, pointer)
        self.nbytes = self.function("ggml_nbytes", ctypes.c_size_t, pointer)
        self.attend = self.function("ggml_flash_attn_ext", pointer, *[pointer] * 5, *[real] * 3)
        self.set_precision = self.function("ggml_flash_attn_ext_set_prec", None, pointer, integer)
        self.graph_overhead = self.function("ggml_graph_overhead", ctypes.c_size_t)
        self.tensor_overhead = self.function("ggml_tensor_overhead", ctypes.c_size_t)
        self.graph = self.function("ggml_new_graph", pointer, pointer)
        self.expand = self.function("ggml_build_forward_expand", None, pointer, pointer)
        chunk = integer, pointer, pointer, *[long] * 3, pointer
        self.quantize = self.function("ggml_quantize_chunk", ctypes.c_size_t, *chunk)
        self.set_threads = self.function("ggml_backend_cpu_set_n_threads", None, pointer, integer)
        self.compute = self.function("ggml_backend_graph_compute", integer, pointer, pointer)
        self.backend = self.function("ggml_backend_cpu_init", pointer)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(self.loaded, name)
        found.restype, found.argtypes = result, arguments
        return found

    def features(self) -> str:
        """The widest instruction set that the build uses."""
        names = ("avx512_vnni", "avx512", "avx_vnni", "avx2", "neon")
        has = (name for name in names if getattr(self.loaded, f"ggml_cpu_has_{name}", lambda: 0)())
        return next(has, "baseline")

    def pack(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows [B, Hkv, T, D] as quantized bytes [B, Hkv, T, row bytes]."""
        kind, _, block = BITS[name]
        rows = rows.contiguous()
        packed = torch.empty(*rows.shape[:-1], rows.shape[-1] // 32 * block, dtype=torch.uint8)
        self.quantize(kind, rows.data_ptr(), packed.data_ptr(), 0, rows[..., 0].numel(), rows.shape[-1], None)
        return packed


class Attention:
    """Graphs of one attention each over its own copy of the cache, in one ggml context (builds allow few contexts)."""

    def __init__(self, library: Library, case: Case, kind: int, packed: list[torch.Tensor], masked: bool) -> None:
        self.library, self.case, self.kind, self.packed, self.masked = library, case, kind, packed, masked
        copies = case.copies(sum(part.nbytes for part in packed))
        mask = 32 * case.tokens
        tensors = sum(part.nbytes for part in packed) + mask + 4 * case.query.nbytes
        room = copies * (tensors + library.graph_overhead() + 16 * library.tensor_overhead())
        self.context = library.init(InitParams(room, None, False))
        self.outputs = [self.attend() for _ in range(copies)]
        self.graphs = [self.graph(output) for output in self.outputs]

    def __del__(self) -> None:
        self.library.free(self.context)

    def tensor(self, kind: int, *shape: int) -> int:
        return int(self.library.tensor(self.context, kind, *shape))

    def filled(self, kind: int, source: torch.Tensor, *shape: int) -> int:
        tensor = self.tensor(kind, *shape)
        if self.library.nbytes(tensor) != source.nbytes:
            raise ValueError(f"ggml lays {shape} out in {self.library.nbytes(tensor)} bytes, not in {source.nbytes}")
        ctypes.memmove(self.library.data(tensor), source.data_ptr(), source.nbytes)
        return tensor

    def attend(self) -> int:
        geometry, tokens = self.case.geometry, self.case.tokens
        query = self.filled(F32, self.case.query, geometry.head_dim, 1, geometry.heads_q, geometry.batch)
        shape = geometry.head_dim, tokens, geometry.heads_kv, geometry.batch
        sides = [self.filled(self.kind, part, *shape) for part in self.packed]
        mask = None
        if self.masked:
            mask = self.tensor(F16, tokens, 16, 1, 1)
            ctypes.memset(self.library.data(mask), 0, self.library.nbytes(mask))
        output = self.library.attend(self.context, query, *sides, mask, geometry.head_dim**-0.5, 0.0, 0.0)
        if not self.masked:
            self.library.set_precision(output, PRECISION_F32)
        return int(output)

    def graph(self, output: int) -> int:
        graph = self.library.graph(self.context)
        self.library.expand(graph, output)
        return int(graph)

    def result(self, index: int) -> np.ndarray:
        address = ctypes.cast(self.library.data(self.outputs[index]), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self.case.query.numel(),)).copy()


def contenders(library: Library, case: Case, prefix: str, names: tuple[str, ...], masked: bool) -> Iterator[Contender]:
    """``masked``: the build wants a mask (all zero), as ik_llama.cpp does."""
    backend = library.backend()
    library.set_threads(backend, case.threads)
    for name in names:
        kind, bits, _ = BITS[name]
        packed = [case.tiled(library.pack(name, rows)) for rows in (case.key, case.value)]
        attention = Attention(library, case, kind, packed, masked)
        calls = [partial(library.compute, backend, graph) for graph in attention.graphs]

        def result(calls: list[Any] = calls, attention: Attention = attention) -> np.ndarray:
            calls[0]()
            return attention.result(0)

        nbytes = sum(part.nbytes for part in packed)
        yield Contender(f"{prefix} {name}", bits, nbytes, calls, result, keep=[attention])
