"""OpenVINO's PagedAttention on the CPU plugin with u8 and u4 caches: what OpenVINO GenAI and Model Server run.

Keys are coded per channel in blocks of 32 tokens, values per token. The op appends the newest token inside the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import torch
from openvino import Model, Type, opset13
from openvino.op import _PagedAttentionExtension as PagedAttention

from benchmarks.common import Case, Contender, Geometry

VERSION = f"openvino {openvino.get_version()}"
BLOCK = 32
KEY_CACHE, VALUE_CACHE = 3, 4
PLAN = "past_lens", "subsequence_begins", "block_indices", "block_indices_begins"


def paged_model(geometry: Geometry, sequences: int) -> Any:
    """A model of one PagedAttention node; its inputs are those that :func:`request` sets, by position."""

    def parameter(name: str, kind: Any, rank: int, last: int = -1) -> Any:
        node = opset13.parameter([-1] * (rank - 1) + [last] if rank else [], kind, name)
        node.output(0).get_tensor().set_names({name})
        return node

    def constant(value: Any, dtype: Any) -> Any:
        return opset13.constant(np.array(value, dtype))

    heads_q, heads_kv, head_dim = geometry.heads_q, geometry.heads_kv, geometry.head_dim
    inputs = [
        parameter("query", Type.f32, 2, heads_q * head_dim),
        parameter("key", Type.f32, 2, heads_kv * head_dim),
        parameter("value", Type.f32, 2, heads_kv * head_dim),
        parameter("key_cache.0", Type.dynamic, 4),
        parameter("value_cache.0", Type.dynamic, 4),
        *(parameter(name, Type.i32, 1) for name in PLAN),
        parameter("max_context_len", Type.i32, 0),
    ]
    ints, floats = np.int32, np.float32
    tail = [  # sliding window, slopes, score aggregation, rotation, cache eviction, sinks: all off
        *(constant(head_dim**-0.5, floats), constant(0, ints), constant([], floats), inputs[-1]),
        *(constant([0] * sequences, ints), constant([], ints), constant([], ints), constant([], floats)),
        *(constant([], floats), constant(128, ints), constant(8, ints), constant(np.zeros((0, 0, 0, 0)), floats)),
        *(constant(0, ints), constant([], ints), constant([], ints), constant([], ints), constant([], ints)),
        *(constant([], np.uint8), constant([], ints)),
    ]
    node = PagedAttention([part.output(0) for part in inputs[:-1] + tail])
    facts = {"num_k_heads": heads_kv, "k_head_size": head_dim, "num_v_heads": heads_kv, "v_head_size": head_dim}
    for name, value in facts.items():
        node.get_rt_info()[name] = value
    return Model([opset13.result(node.output(0))], inputs, "attend")


class Cache:
    """Blocks of one compiled model in the layout that the plugin asks for."""

    def __init__(self, compiled: Any, blocks: int) -> None:
        self.raw, self.tensors = [], []
        for index in (KEY_CACHE, VALUE_CACHE):
            dims = [dim.get_length() if dim.is_static else -1 for dim in compiled.input(index).get_partial_shape()]
            kind = compiled.input(index).get_element_type()
            shape = openvino.Shape([blocks, *dims[1:]])
            raw = torch.zeros(int(np.prod(list(shape))) * kind.bitwidth // 8, dtype=torch.uint8).numpy()
            self.raw.append(raw)
            self.tensors.append(openvino.Tensor(raw.view(kind.to_dtype()) if kind.bitwidth >= 8 else raw, shape, kind))

    @property
    def nbytes(self) -> int:
        return sum(raw.nbytes for raw in self.raw)


def request(compiled: Any, cache: Cache, rows: list[torch.Tensor], past: int, sequences: int, blocks: int) -> Any:
    """An inference that appends ``rows`` (query, key, value: [tokens of all sequences, features]) and attends."""
    inference = compiled.create_infer_request()
    new = len(rows[0]) // sequences
    for index, part in enumerate(rows):
        inference.set_input_tensor(index, openvino.Tensor(np.ascontiguousarray(part.numpy())))
    inference.set_input_tensor(KEY_CACHE, cache.tensors[0])
    inference.set_input_tensor(VALUE_CACHE, cache.tensors[1])
    indices = np.arange(sequences + 1)
    plan = (np.full(sequences, past), indices * new, np.arange(sequences * blocks), indices * blocks, past + new)
    for index, part in enumerate(plan, VALUE_CACHE + 1):
        inference.set_input_tensor(index, openvino.Tensor(np.array(part, np.int32)))
    return inference


def contender(case: Case, bits: int) -> Contender:
    geometry = case.geometry
    config = {
        "KV_CACHE_PRECISION": f"u{bits}",
        "INFERENCE_NUM_THREADS": case.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    compiled = core.compile_model(paged_model(geometry, geometry.batch), "CPU", config)

    def flat(rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(1, 2).flatten(2).flatten(0, 1)

    # Filling as sequences of one block each costs no attention over the whole prompt.
    filled = geometry.batch * case.base_tokens // BLOCK
    filler = core.compile_model(paged_model(geometry, filled), "CPU", config)
    base = Cache(filler, filled)
    nothing = torch.zeros(filled * BLOCK, geometry.heads_q * geometry.head_dim)
    request(filler, base, [nothing, flat(case.key), flat(case.value)], 0, filled, 1).infer()

    newest = [case.query.flatten(1), case.key[:, :, -1].flatten(1), case.value[:, :, -1].flatten(1)]
    blocks = case.tokens // BLOCK
    first = Cache(compiled, geometry.batch * blocks)
    caches = [first, *(Cache(compiled, geometry.batch * blocks) for _ in range(case.copies(first.nbytes) - 1))]
    for cache in caches:
        for to, source in zip(cache.raw, base.raw, strict=True):
            to.reshape(geometry.batch, -1, source.size // geometry.batch)[:] = source.reshape(geometry.batch, 1, -1)
    requests = [request(compiled, cache, newest, case.tokens - 1, geometry.batch, blocks) for cache in caches]

    def result() -> np.ndarray:
        requests[0].infer()
        return requests[0].get_output_tensor(0).data.copy()

    calls = [inference.infer for inference in requests]
    keep = [compiled, caches]
    name = f"OpenVINO PagedAttention u{bits}"
    return Contender(name, bits, first.nbytes, calls, result, "appends inside the call", keep=keep)


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes  # the plugin's inference precision is fp32 here
    for bits in (8, 4):
        yield contender(case, bits)
