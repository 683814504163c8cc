"""The ops: registers fakes, CUDA and what gradients do, and wraps each op with types.

``torch.ops.kvq.*`` are the same ops without the wrappers (in a build for the Hugging Face Hub, the namespace is its
own). Every cache tensor is written in place; parts and shapes are as ``kvq_ops.format`` says.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from . import cuda, meta
from ._ops import add_op_namespace_prefix, ops
from .schemas import SCHEMAS

__all__ = ["append", "attend", "cpu_isa"]

_LIBRARY = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "FRAGMENT")  # type: ignore[no-untyped-call]


def _refuse_cpu(name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"kvq::{name}: tensors must be on a GPU in a build without CPU kernels, got cpu")


def _define() -> None:
    """What the compiled library defines, in a build that has none: for CUDA all is Python."""
    for name, schema in SCHEMAS.items():
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, partial(_refuse_cpu, name), "CPU")  # type: ignore[no-untyped-call]


_COMPILED = hasattr(ops, "append")
if not _COMPILED:
    _define()
_APPEND = ops.append.default
_ATTEND = ops.attend.default
_ATTEND_LSE = ops.attend_lse.default
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset  # noqa: SLF001 the names that torch.library itself uses
_below_autograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001


def _refuse_gradient(op: Any) -> None:
    """Make a backward through op raise. Without an autograd kernel, backward would warn and give no gradient.

    This kernel costs 7 us a call, torch.library.register_autograd's 8; in C++ it would cost none, but the stable ABI
    cannot dispatch below autograd. Inference mode and the wrapper below pass it by."""
    name = f"kvq::{op._opname}"  # noqa: SLF001

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, keyset: Any, *arguments: Any) -> Any:
            return op.redispatch(keyset & _AFTER_AUTOGRAD, *arguments)

        @staticmethod
        def backward(*_: Any) -> NoReturn:
            raise RuntimeError(
                f"{name}: query must not need a gradient, got a backward pass; attention over a quantized cache is "
                "inference only: call it under torch.no_grad() or torch.inference_mode()"
            )

    def autograd(keyset: Any, query: Tensor, *arguments: Any) -> Any:
        if query.requires_grad and torch.is_grad_enabled():
            return Attend.apply(keyset, query, *arguments)  # type: ignore[no-untyped-call]
        return op.redispatch(keyset & _AFTER_AUTOGRAD, query, *arguments)

    _LIBRARY.impl(op, autograd, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _register_fake(fake: Any) -> None:
    def traced(*arguments: Any) -> Any:
        if arguments[0].device.type == "cuda":
            cuda.prepare(add_op_namespace_prefix)
        return fake(*arguments)

    torch.library.register_fake(add_op_namespace_prefix(fake.__name__), traced)


for _fake in (meta.append, meta.attend, meta.attend_lse):
    _register_fake(_fake)
cuda.register(_LIBRARY, {"append": _APPEND, "attend": _ATTEND, "attend_lse": _ATTEND_LSE})
for _op in (_ATTEND, _ATTEND_LSE):
    _refuse_gradient(_op)


def append(
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    format: str,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
) -> None:
    """Quantise key and value [B, Hkv, T, D] (fp32, bf16 or fp16, any strides) into the cache, in place.

    Row t of sequence b goes to position ``lengths[b] + t``; then lengths, int32 [B], grows by T. The parts, codes
    [B, Hkv, N, row bytes] and what else the format has, are as ``get_format(format).parts`` says; rows in full
    precision (``key_full``, ``value_full``) have the dtype of key. Past the capacity N the CPU raises and writes
    nothing; CUDA, which reads no lengths on the host, writes the rows that fit and leaves lengths at N + 1."""
    _APPEND(
        key_codes,
        key_scales,
        value_codes,
        value_scales,
        lengths,
        key,
        value,
        format,
        key_zeros,
        value_zeros,
        key_full,
        value_full,
    )


@overload
def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str,
    scale: float | None = None,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str,
    scale: float | None = None,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str,
    scale: float | None = None,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
    *,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attend(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    format: str,
    scale: float | None = None,
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
    key_full: Tensor | None = None,
    value_full: Tensor | None = None,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of query over the cache, in query's dtype and shape.

    query [B, Hq, D] or [B, Hq, T, D] (fp32, bf16 or fp16, any strides): the T newest positions of each sequence,
    causal among themselves; append their rows first. Hq is a multiple of Hkv. scale None is 1 / sqrt(D). A sequence
    of length 0 gives zeros. With return_lse also the log-sum-exp of the scaled logits, fp32 [B, Hq] or [B, Hq, T],
    -inf at length 0. Inference only: a backward pass raises."""
    op = _ATTEND_LSE if return_lse else _ATTEND
    parts = (key_codes, key_scales, value_codes, value_scales, lengths)
    arguments = (query, *parts, format, scale, key_zeros, value_zeros, key_full, value_full)
    if torch.compiler.is_compiling() or (query.requires_grad and torch.is_grad_enabled()):
        result: Tensor | tuple[Tensor, Tensor] = op(*arguments)
    else:
        with _below_autograd():
            result = op(*arguments)
    return result


def cpu_isa() -> str:
    """The instruction set that the CPU kernels use; ``KVQ_CPU_ISA`` forces one by name. Raises ``RuntimeError`` in a
    build without CPU kernels."""
    if not _COMPILED:
        raise RuntimeError("cpu_isa: the build must have CPU kernels, got one for CUDA")
    name: str = ops.cpu_isa()
    return name
