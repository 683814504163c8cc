"""onnxruntime's com.microsoft.GroupQueryAttention on the CPU over int8 and int4 caches.

Past and present share one buffer. Scales are static inputs, per tensor or per channel. The op appends the newest token
inside the timed call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from onnxruntime import OrtValue

from benchmarks.common import Case, Contender, Geometry

VERSION = f"onnxruntime {onnxruntime.__version__}"
POOL_SPIN = 0.1
"""Its workers spin for 2^20 pauses after a run: up to about 60 ms."""


@dataclass(frozen=True)
class Quantization:
    bits: int
    kind: str

    @property
    def limit(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Codes in the op's layout (4 bit: even channel in the low nibble, offset 8) and the scales as its input."""
        dims = (0, 1, 2, 3) if self.kind == "PER_TENSOR" else (0, 2)
        scale = rows.abs().amax(dims, keepdim=True) / self.limit
        codes = (rows / scale).round_().clamp_(-self.limit, self.limit).to(torch.int8)
        if self.bits == 4:
            codes = (codes + 8).view(torch.uint8)
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return codes, scale.flatten().numpy()


def session(geometry: Geometry, quantization: Quantization, threads: int) -> Any:
    """A session of one GroupQueryAttention node."""
    heads_q, heads_kv, head_dim = geometry.heads_q, geometry.heads_kv, geometry.head_dim
    codes = TensorProto.INT8 if quantization.bits == 8 else TensorProto.UINT8
    scales = [1] if quantization.kind == "PER_TENSOR" else [heads_kv * head_dim]
    cache = ["batch", heads_kv, "tokens", "row"]
    inputs = {
        "query": (TensorProto.FLOAT, ["batch", 1, heads_q * head_dim]),
        "key": (TensorProto.FLOAT, ["batch", 1, heads_kv * head_dim]),
        "value": (TensorProto.FLOAT, ["batch", 1, heads_kv * head_dim]),
        "past_key": (codes, cache),
        "past_value": (codes, cache),
        "seqlens_k": (TensorProto.INT32, ["batch"]),
        "total": (TensorProto.INT32, []),
        "key_scale": (TensorProto.FLOAT, scales),
        "value_scale": (TensorProto.FLOAT, scales),
    }
    outputs = {
        "output": (TensorProto.FLOAT, ["batch", 1, heads_q * head_dim]),
        "present_key": (codes, cache),
        "present_value": (codes, cache),
    }
    names = list(inputs)
    node = helper.make_node(
        "GroupQueryAttention",
        [*names[:7], *[""] * 5, *names[7:]],
        list(outputs),
        domain="com.microsoft",
        num_heads=heads_q,
        kv_num_heads=heads_kv,
        scale=head_dim**-0.5,
        k_quant_type=quantization.kind,
        v_quant_type=quantization.kind,
        kv_cache_bit_width=quantization.bits,
    )
    infos = [[helper.make_tensor_value_info(name, *of) for name, of in group.items()] for group in (inputs, outputs)]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attend", *infos), opset_imports=opsets)
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def contender(case: Case, quantization: Quantization) -> Contender:
    def value(tensor: Any) -> Any:
        return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor))

    geometry, run = case.geometry, session(case.geometry, quantization, case.threads)
    codes, scales = zip(*map(quantization.quantize, (case.key, case.value)), strict=True)
    full = [case.tiled(part).numpy() for part in codes]
    newest = [rows[:, :, -1].reshape(geometry.batch, 1, -1).numpy() for rows in (case.key, case.value)]
    output = value(np.zeros((geometry.batch, 1, geometry.heads_q * geometry.head_dim), np.float32))
    small = {
        "query": value(case.query.reshape(geometry.batch, 1, -1).numpy()),
        "key": value(newest[0]),
        "value": value(newest[1]),
        "seqlens_k": value(np.full(geometry.batch, case.tokens - 1, np.int32)),
        "total": value(np.array(case.tokens, np.int32)),
        "key_scale": value(scales[0]),
        "value_scale": value(scales[1]),
    }
    nbytes = sum(part.nbytes for part in full)
    keep: list[Any] = [small, output]
    calls = []
    for _ in range(case.copies(nbytes)):
        binding, parts = run.io_binding(), [value(part) for part in full]
        for name, tensor in small.items():
            binding.bind_ortvalue_input(name, tensor)
        for side, part in zip(("key", "value"), parts, strict=True):
            binding.bind_ortvalue_input(f"past_{side}", part)
            binding.bind_ortvalue_output(f"present_{side}", part)
        binding.bind_ortvalue_output("output", output)
        keep.append(parts)
        calls.append(lambda binding=binding: run.run_with_iobinding(binding))

    def result() -> np.ndarray:
        calls[0]()
        return output.numpy()

    kind = quantization.kind.lower().replace("_", "-")
    name = f"onnxruntime GQA int{quantization.bits} {kind}"
    return Contender(name, quantization.bits, nbytes, calls, result, "appends inside the call", POOL_SPIN, keep)


def make(case: Case, query_dtypes: list[torch.dtype]) -> Iterator[Contender]:
    del query_dtypes  # this op takes fp32 queries on the CPU
    for bits in (8, 4):
        for kind in ("PER_TENSOR", "PER_CHANNEL"):
            yield contender(case, Quantization(bits, kind))
