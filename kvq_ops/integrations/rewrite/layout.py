"""Which axis of a cache buffer ends up where, through views, repeats and casts.

An axis of a tensor is a product of factors, slowest first: a factor is an axis of the buffer, by its number, or the
repeat of heads. Factors of size 1 are dropped, for they may stand anywhere. So ``expand`` and ``reshape`` of heads,
``repeat_interleave`` and any order of axes come out the same, and a repeat in another order does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .program import SkipError, arguments, shape, target_name

__all__ = ["REPEAT", "VIEWS", "WRITERS", "Trace", "trace"]

aten = torch.ops.aten

REPEAT = -1
"""The factor that counts the query heads of one KV head."""
DYNAMIC = 0
"""The size of a token axis that was cut at the position."""

Factor = tuple[int, int]
Axes = tuple[tuple[Factor, ...], ...]

WRITERS = frozenset(
    {
        aten.index_copy_.default,
        aten.index_copy.default,
        aten.index_put_.default,
        aten.index_put.default,
        aten.copy_.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
    }
)
"""What may write a row into a cache; the functional ones return the new cache."""
CUTS = frozenset({aten.slice.Tensor, aten.narrow.default})
VIEWS = CUTS | {
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.movedim.int,
    aten.permute.default,
    aten.select.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
"""Results that share the buffer's memory whatever its strides are."""
SAME = frozenset(
    {
        aten._to_copy.default,  # noqa: SLF001
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.to.device,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.type_as.default,
    }
)
RESHAPES = frozenset(
    {
        aten._unsafe_view.default,  # noqa: SLF001
        aten.flatten.using_ints,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass
class Trace:
    """The way from a placeholder to a tensor: ``chain``, last call first, and where its axes went.

    ``extent`` is the node (or int) that a token axis was cut at, ``start`` always 0."""

    source: Node
    axes: Axes
    chain: list[Node] = field(default_factory=list)
    extent: Any = None
    extent_axis: int | None = None


def _size(size: Any) -> int:
    return size if isinstance(size, int) else DYNAMIC


def _axis(label: int, size: Any) -> tuple[Factor, ...]:
    return () if isinstance(size, int) and size == 1 else ((label, _size(size)),)


def _regroup(axes: Axes, sizes: tuple[Any, ...], node: Node) -> Axes:
    """The same factors in the same order, cut into axes of these sizes."""
    factors = [factor for axis in axes for factor in axis]
    grouped = []
    for size in sizes:
        axis: list[Factor] = []
        if not isinstance(size, int):
            if not factors or factors[0][1] != DYNAMIC:
                raise SkipError(f"{node.name} reshapes the cache's tokens")
            axis.append(factors.pop(0))
        product = 1
        while isinstance(size, int) and product != size:
            if not factors or factors[0][1] == DYNAMIC or product > size:
                raise SkipError(f"{node.name} reshapes the cache across its axes")
            product *= factors[0][1]
            axis.append(factors.pop(0))
        grouped.append(tuple(axis))
    return tuple(grouped)


def _expanded(axes: Axes, sizes: tuple[Any, ...]) -> Axes:
    wide: Axes = ((),) * (len(sizes) - len(axes)) + axes
    return tuple(axis or _axis(REPEAT, size) for axis, size in zip(wide, sizes, strict=True))


def _permuted(axes: Axes, node: Node) -> Axes:
    given, dims = arguments(node), list(range(len(axes)))
    if node.target is aten.permute.default:
        dims = list(given["dims"])
    elif node.target is aten.transpose.int:
        first, second = given["dim0"], given["dim1"]
        dims[first], dims[second] = dims[second], dims[first]
    else:
        source, destination = given["source"] % len(dims), given["destination"] % len(dims)
        dims.insert(destination, dims.pop(source))
    return tuple(axes[dim] for dim in dims)


def _repeated(axes: Axes, node: Node) -> Axes:
    given = arguments(node)
    if node.target is aten.repeat_interleave.self_int:
        dim, repeats = given["dim"], given["repeats"]
        if dim is None or not isinstance(repeats, int):
            raise SkipError(f"{node.name} repeats the cache in an unknown way")
        return tuple(axis + _axis(REPEAT, repeats) if i == dim % len(axes) else axis for i, axis in enumerate(axes))
    wide: Axes = ((),) * (len(given["repeats"]) - len(axes)) + axes
    return tuple(_axis(REPEAT, count) + axis for axis, count in zip(wide, given["repeats"], strict=True))


_Change = Callable[[Axes, Node], Axes]
_CHANGES: dict[Any, _Change] = dict.fromkeys(SAME, lambda axes, _: axes)
_CHANGES |= dict.fromkeys(RESHAPES, lambda axes, node: _regroup(axes, shape(node), node))
_CHANGES |= dict.fromkeys((aten.permute.default, aten.transpose.int, aten.movedim.int), _permuted)
_CHANGES |= dict.fromkeys((aten.repeat_interleave.self_int, aten.repeat.default), _repeated)
_CHANGES[aten.expand.default] = lambda axes, node: _expanded(axes, shape(node))


def _cut(walked: Trace, node: Node) -> None:
    """A slice that keeps everything changes nothing; one of the first tokens leaves its end to be proved."""
    given = arguments(node)
    dim = given["dim"] % len(walked.axes)
    start, size = given["start"] or 0, shape(given["self" if "self" in given else "input"])[dim]
    if node.target is aten.slice.Tensor:
        end, step = given["end"], given["step"]
    else:
        end, step = given["length"], 1
    if isinstance(start, int) and start == 0 and step == 1:
        kept = shape(node)[dim]
        if isinstance(kept, int) and isinstance(size, int) and kept == size:
            return
        if isinstance(end, Node) and walked.extent is None and len(walked.axes[dim]) == 1:
            ((label, _),) = walked.axes[dim]
            walked.extent, walked.extent_axis = end, label
            walked.axes = (*walked.axes[:dim], ((label, DYNAMIC),), *walked.axes[dim + 1 :])
            return
    raise SkipError(f"{node.name} reads a part of the cache that is not its first tokens")


def trace(node: Node) -> Trace:
    """Back from ``node`` to the placeholder that it is a view, a repeat or a cast of, through writes in between."""
    chain = []
    while node.op != "placeholder":
        if node.op != "call_function" or not (node.target in _CHANGES or node.target in CUTS or node.target in WRITERS):
            what = "a part of a larger buffer" if node.target is aten.select.int else f"what {target_name(node)} gives"
            raise SkipError(f"it reads {what} ({node.name}), not a cache buffer of its own")
        chain.append(node)
        node = node.all_input_nodes[0] if node.target not in WRITERS else _written(node)
    walked = Trace(node, tuple(_axis(i, size) for i, size in enumerate(shape(node))), chain)
    for step in reversed(chain):
        if step.target in CUTS:
            _cut(walked, step)
        elif step.target not in WRITERS:
            walked.axes = _CHANGES[step.target](walked.axes, step)
    return walked


def _written(node: Node) -> Node:
    written = node.args[0]
    assert isinstance(written, Node)
    return written
