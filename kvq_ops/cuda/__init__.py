"""The ops on CUDA tensors, by Triton kernels. Nothing here imports triton before a CUDA tensor is seen.

``append``, ``attend`` and ``attend_lse`` are what ``kvq_ops.ops`` registers for the dispatch key CUDA. They read no
data on the host, so lengths against capacity are not checked: an append past the capacity writes what fits and leaves
``lengths`` at capacity + 1, which attend takes for the capacity (:meth:`QuantizedKVCache.overflowed` tells), and query
tokens before a sequence's first give zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .. import checks

__all__ = ["append", "attend", "attend_lse", "prepare", "register"]

MIN_CAPABILITY = (8, 0)
"""Of tensor cores that multiply bf16, and of asynchronous copies."""


@cache
def _problem(device: torch.device) -> str | None:
    """What keeps kernels from running on device, or None."""
    if find_spec("triton") is None:
        return "be on the CPU unless the package triton is installed"
    if device.type == "cuda" and torch.cuda.is_available():  # fake tensors have a device that is not here
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            least, got = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
            return f"be on a GPU of compute capability {least} or newer, not {got}"
    return None


def _check_device(op: str, argument: str, tensor: Tensor) -> None:
    problem = _problem(tensor.device)
    if problem is not None:
        raise RuntimeError(f"{op}: {argument} must {problem}, got {tensor.device}")


def append(*arguments: Any, **keywords: Any) -> None:
    """``kvq::append`` over CUDA tensors."""
    checks.append("kvq::append", *arguments, **keywords)
    _check_device("kvq::append", "key_codes", _first(arguments, keywords, "key_codes"))
    from . import launch

    launch.append(*arguments, **keywords)


def attend(*arguments: Any, **keywords: Any) -> Tensor:
    """``kvq::attend`` over CUDA tensors."""
    return _attend("kvq::attend", False, arguments, keywords)[0]


def attend_lse(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """``kvq::attend_lse`` over CUDA tensors."""
    return _attend("kvq::attend_lse", True, arguments, keywords)


def _attend(op: str, lse: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, Tensor]:
    checks.attend(op, *arguments, **keywords)
    _check_device(op, "query", _first(arguments, keywords, "query"))
    from . import launch

    return launch.attend(lse, *arguments, **keywords)


def _first(arguments: tuple[Any, ...], keywords: dict[str, Any], name: str) -> Tensor:
    tensor: Tensor = arguments[0] if arguments else keywords[name]
    return tensor


@cache
def prepare(prefixed: Callable[[str], str]) -> None:
    """Tell torch's compile caches which kernels stand behind the ops: without, they would serve kernels of an older
    kvq_ops. To be called once CUDA tensors are traced; ``prefixed`` puts the namespace before an op's name."""
    if find_spec("triton") is None:
        return
    from torch._library.triton import triton_ops_to_kernels

    from .launch import KERNELS

    triton_ops_to_kernels.update({prefixed(name): kernels for name, kernels in KERNELS.items()})


def register(library: torch.library.Library, ops: dict[str, Any]) -> None:
    """The CUDA kernels of ops, by name, and how tracing takes them apart."""
    for name, function in (("append", append), ("attend", attend), ("attend_lse", attend_lse)):
        library.impl(ops[name], function, "CUDA")  # type: ignore[no-untyped-call]
        _decompose(ops[name].name(), function)


def _decompose(name: str, function: Callable[..., Any]) -> None:
    """Let compilation of CUDA tensors see the Triton launches inside of an op, as ``torch.library.triton_op`` does for
    ops that have no other backend: Inductor then calls the kernels itself, and a package by AOTInductor holds them. On
    other devices, and where torch.export keeps ops as they are, nothing changes. Of a torch that has no such rules the
    op stays opaque, which is right too."""
    try:
        from torch._functorch import config
        from torch._subclasses.fake_tensor import FakeTensor
        from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    except ImportError:
        return

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        keywords = kwargs or {}
        tensor = next(iter(args), None) if args else next(iter(keywords.values()))
        device = getattr(tensor, "device", None)
        whole = not getattr(config, "decompose_custom_triton_ops", False)
        if device is None or device.type != "cuda" or whole or _problem(device) is not None:
            return mode.__torch_dispatch__(op, types, args, keywords)
        if any(not issubclass(t, FakeTensor) and t not in (Tensor, FunctionalTensor) for t in types):
            return NotImplemented
        with mode:
            return function(*args, **keywords)

    try:
        torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule)
    except (AttributeError, RuntimeError):
        return
