"""Finds the two cache buffers of an attention, the one write to each, and everything that reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node

from .layout import CUTS, REPEAT, VIEWS, WRITERS, Trace, trace
from .program import Program, SkipError, arguments, shape

__all__ = ["Cache", "Match", "Write", "find_cache", "match_attention"]

aten = torch.ops.aten
_PUT = frozenset({aten.index_put_.default, aten.index_put.default})
_INDEX_COPY = frozenset({aten.index_copy_.default, aten.index_copy.default})
_HARMLESS = frozenset({aten._assert_tensor_metadata.default})  # noqa: SLF001
"""Reads that export itself adds; they go when the cache goes."""


@dataclass(frozen=True)
class Write:
    """One token's rows going into a cache at ``index``, a node or an int.

    ``rows`` broadcast to ``sizes`` and hold as many numbers as ``row``, the written tensor's shape with one token;
    ``labels[i]`` is the buffer's axis of its axis i (None where the size is 1)."""

    node: Node
    index: Any
    rows: Node
    sizes: tuple[int, ...]
    row: tuple[int, ...]
    labels: tuple[int | None, ...]


@dataclass(frozen=True)
class Cache:
    """One side of a cache: the buffer, the way from it to the attention, and which of its axes are batch, heads,
    tokens and head_dim (None where the buffer has no such axis, whose size then is 1)."""

    buffer: Node
    name: str
    tensor: Tensor
    dims: tuple[int | None, ...]
    group: int
    walked: Trace

    @property
    def sizes(self) -> tuple[int, ...]:
        """batch, heads_kv, max_tokens, head_dim."""
        return tuple(1 if dim is None else self.tensor.shape[dim] for dim in self.dims)


@dataclass(frozen=True)
class Match:
    """An attention that can be rewritten, once its position is proved."""

    attention: Node
    query: Node
    mask: Node | None
    scale: float | None
    key: Cache
    value: Cache
    key_write: Write
    value_write: Write

    @property
    def last_write(self) -> Node:
        return max(self.key_write.node, self.value_write.node)


def find_cache(program: Program, tensor: Node, side: str) -> Cache:
    """The cache buffer that ``tensor``, the attention's key or value, is read from."""
    walked = trace(tensor)
    name = program.name(walked.source)
    held = program.tensor(walked.source)
    if program.kind(walked.source) == InputKind.USER_INPUT:
        raise SkipError(f"its {side} cache is the input {name}, not a buffer")
    if held is None or program.kind(walked.source) == InputKind.PARAMETER:
        raise SkipError(f"its {side} comes from {name}, which is no buffer")
    axes = walked.axes
    if len(axes) != 4:
        raise SkipError(f"its {side} has {len(axes)} axes, not batch, heads, tokens and head_dim")
    repeats = [size for axis in axes for label, size in axis if label == REPEAT]
    places = [[label for label, _ in axis if label != REPEAT] for axis in axes]
    heads = [label for label, _ in axes[1]]
    if any(len(labels) > 1 for labels in places) or REPEAT in heads[:-1] or len(repeats) != heads.count(REPEAT):
        raise SkipError(
            f"its {side} is not [batch, heads, tokens, head_dim] of {name} with each head repeated in place"
        )
    left = [i for i, size in enumerate(held.shape) if size == 1 and [i] not in places]
    dims = [labels[0] if labels else left.pop(0) if left else None for labels in places]
    if left:
        raise SkipError(f"its {side} cache {name} has shape {list(held.shape)}, more axes than a cache has")
    if walked.extent is not None and walked.extent_axis != dims[2]:
        raise SkipError(f"its {side} reads a part of {name} that is not its first tokens")
    return Cache(walked.source, name, held, tuple(dims), repeats[0] if repeats else 1, walked)


def _find_writes(program: Program, cache: Cache, attention: Node) -> list[Node]:
    """The writes into a cache; raises where anything but the attention reads it."""
    chain, found, pending, seen = set(cache.walked.chain), [], [cache.buffer], {cache.buffer}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.target in WRITERS and user.args[0] is node:
                found.append(user)
            elif user is attention or user.target in _HARMLESS:
                continue
            elif user.target is aten.copy.default and user.args[0] is node:
                continue  # of a functional program: what is copied over, of which only shape and dtype count
            elif user.op == "output" and program.mutation_outputs.get(cache.name) is node:
                continue
            elif user not in chain and user.target not in VIEWS:
                raise SkipError(f"{user.name} reads the cache {cache.name} too")
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return found


def _check_readers(program: Program, cache: Cache, attention: Node) -> Node:
    """The one write into the cache, which everything that the attention reads comes after."""
    writes = _find_writes(program, cache, attention)
    if len(writes) != 1:
        raise SkipError(f"the cache {cache.name} is written {len(writes)} times in a step, not once")
    (write,) = writes
    late = [node for node in cache.walked.chain if node.target not in VIEWS and node is not write]
    functional = not write.target._schema.is_mutable  # type: ignore[union-attr]  # noqa: SLF001
    if any(node < write for node in (*late, attention)) or (functional and write not in cache.walked.chain):
        raise SkipError(f"it reads the cache {cache.name} before the step's token is written")
    if functional and program.mutation_outputs.get(cache.name) is not write:
        raise SkipError(f"the cache {cache.name} does not keep what is written")
    return write


def _put_index(write: Node, given: dict[str, Any]) -> tuple[Any, int]:
    indices = given["indices"]
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(used) != 1 or given["accumulate"] or used[0][1].meta["val"].dtype in (torch.bool, torch.uint8):
        raise SkipError(f"{write.name} writes by several indices, by a mask or by adding, not one row")
    return used[0][1], used[0][0]


def _cut_of(write: Node, view: Node) -> tuple[Node, Any, int]:
    """What ``cache[..., p : p + 1, ...].copy_(rows)`` and its kin cut: the base, the position and the axis."""
    given = arguments(view)
    if view.target not in CUTS | {aten.select.int} or given.get("step", 1) != 1:
        raise SkipError(f"{write.name} does not write one token's rows by their position")
    base = given["self" if "self" in given else "input"]
    return base, given["index"] if view.target is aten.select.int else given["start"], given["dim"]


def _parse_write(write: Node, cache: Cache) -> Write:
    given = arguments(write)
    base, index, dim = given["self"], given.get("index"), given.get("dim", 0)
    rows: Any = given.get("source", given.get("src"))
    if write.target in _PUT:
        rows = given["values"]
        index, dim = _put_index(write, given)
        sizes = (*shape(base)[:dim], *shape(index), *shape(base)[dim + 1 :])
    elif write.target is aten.copy_.default:
        sizes = shape(base)
        base, index, dim = _cut_of(write, base)
    else:
        sizes = shape(rows)
        index = given["start"] if write.target is aten.slice_scatter.default else index
        if given.get("step", 1) != 1:
            raise SkipError(f"{write.name} does not write one token's rows by their position")
        if rows.target is aten.copy.default:
            rows = rows.args[1]
    walked = trace(base)
    if any(len(axis) > 1 or any(label == REPEAT for label, _ in axis) for axis in walked.axes) or (
        walked.extent is not None
    ):
        raise SkipError(f"{write.name} writes into a reshaped view of {cache.name}")
    dim %= len(walked.axes)
    labels = tuple(axis[0][0] if axis else None for axis in walked.axes)
    if labels[dim] != cache.dims[2]:
        raise SkipError(f"{write.name} writes along another axis of {cache.name} than the tokens")
    row = (*shape(base)[:dim], 1, *shape(base)[dim + 1 :])
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) != math.prod(row):
        raise SkipError(f"{write.name} writes more than one token's rows")
    return Write(write, 0 if index is None else index, rows, sizes, row, labels)


def _check_storage(program: Program, cache: Cache) -> None:
    """A buffer that shares memory with another that is used cannot be taken away alone."""
    held = program.storages[cache.tensor.untyped_storage().data_ptr()]
    shared = [program.name(node) for node in held if node is not cache.buffer]
    if shared:
        raise SkipError(f"the cache {cache.name} shares its memory with {', '.join(sorted(shared))}")


def _check_between(program: Program, first: Write, second: Write) -> None:
    """Rows are read where the later write stands: nothing may change them, or the index, in between."""
    start, end = sorted((first.node, second.node), key=program.order.__getitem__)
    read = {node for write in (first, second) for node in (write.rows, write.index) if isinstance(node, Node)}
    roots = frozenset(root for node in read for root in program.roots[node])
    for node, mutated in program.mutators.items():
        if start < node < end and mutated & roots:
            raise SkipError(f"{node.name} changes the step's rows or position between the writes of key and value")


def _check_call(given: dict[str, Any], key: Cache, value: Cache) -> None:
    """What the attention itself asks."""
    query = shape(given["query"])
    if len(query) != 4 or not all(isinstance(size, int) for size in query):
        raise SkipError(f"its query has shape {list(query)}, not four fixed sizes [batch, heads, 1, head_dim]")
    if query[2] != 1:
        raise SkipError(f"its query has {query[2]} tokens, not 1")
    if given["dropout_p"] != 0:
        raise SkipError(f"it drops out with probability {given['dropout_p']}")
    if given["is_causal"]:
        raise SkipError("is_causal=True lets a query of one token see the first row alone")
    if not isinstance(given["scale"], (float, int, type(None))):
        raise SkipError("its scale is computed in the program")
    if key.buffer is value.buffer:
        raise SkipError(f"key and value are read from one buffer, {key.name}")
    if key.sizes != value.sizes or key.group != value.group or key.tensor.dtype != value.tensor.dtype:
        raise SkipError(f"{key.name} and {value.name} differ in their sizes, repeats or dtypes")
    batch, heads_kv, _, head_dim = key.sizes
    if query[0] != batch or query[3] != head_dim:
        raise SkipError(f"its query has shape {list(query)}, but the cache has batch {batch} and head_dim {head_dim}")
    expanded = heads_kv * key.group
    if query[1] % expanded or not (given["enable_gqa"] or expanded in (1, query[1])):
        raise SkipError(f"its query has {query[1]} heads, its key {expanded}")
    if key.tensor.device != value.tensor.device or given["query"].meta["val"].device != key.tensor.device:
        raise SkipError("its query and its caches lie on several devices")


def match_attention(program: Program, attention: Node, key: Cache, value: Cache) -> Match:
    """The attention with the writes into its caches; raises :class:`SkipError` with the reason."""
    given = arguments(attention)
    _check_call(given, key, value)
    writes = []
    for cache in (key, value):
        write = _check_readers(program, cache, attention)
        _check_storage(program, cache)
        writes.append(_parse_write(write, cache))
    _check_between(program, *writes)
    mask = given["attn_mask"]
    scale = None if given["scale"] is None else float(given["scale"])
    return Match(attention, given["query"], mask, scale, key, value, *writes)
