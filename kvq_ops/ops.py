"""The ops: loads the library, registers fakes, CUDA and what gradients do, and wraps each op with types.

``torch.ops.kvq.*`` are the same ops without the wrappers. Every cache tensor is written in place; parts and shapes
are as ``kvq_ops.format`` says.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from kvq_ops import cuda, meta, native

__all__ = ["append", "attend", "cpu_isa"]

native.load()

_APPEND = torch.ops.kvq.append.default
_ATTEND = torch.ops.kvq.attend.default
_ATTEND_LSE = torch.ops.kvq.attend_lse.default
_LIBRARY = torch.library.Library("kvq", "FRAGMENT")  # type: ignore[no-untyped-call]
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset  # noqa: SLF001 the names that torch.library itself uses
_below_autograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001


def _refuse_gradient(op: Any) -> None:
    """Make a backward through op raise. Without an autograd kernel, backward would warn and give no gradient.

    This kernel costs 7 us a call, torch.library.register_autograd's 8; in C++ it would cost none, but the stable ABI
    cannot dispatch below autograd. Inference mode and the wrapper below pass it by."""
    name = op.name().partition(".")[0]

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
            cuda.prepare()
        return fake(*arguments)

    torch.library.register_fake(f"kvq::{fake.__name__}", traced)


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
    """The instruction set that the CPU kernels use; ``KVQ_CPU_ISA`` forces one by name."""
    name: str = torch.ops.kvq.cpu_isa()
    return name
