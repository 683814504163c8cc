"""Swaps the caches of matched attentions in a copy of the program; the program itself is only read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._export.verifier import TrainingIRVerifier
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    TensorArgument,
)
from torch.fx import GraphModule, Node

from ..._ops import ops
from ...format import CacheFormat, Part
from .match import Cache, Match, Write
from .program import Program

__all__ = ["Surgeon", "format_parts"]

aten = torch.ops.aten
_APPEND = ops.append.default
_ATTEND = ops.attend.default
_CODED = ("key_codes", "key_scales", "value_codes", "value_scales")
"""The parts that ops take by position; a format's others they take by name."""
_SCALARS = frozenset({aten.item.default, aten._local_scalar_dense.default})  # noqa: SLF001
_TOLD = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")


def format_parts(format: CacheFormat, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Part]:
    """The parts of one layer's cache: ``sizes`` are batch, heads_kv, max_tokens and head_dim, ``dtype`` the plain
    cache's, for parts in full precision."""
    batch, heads_kv, max_tokens, head_dim = sizes
    return format.parts(batch, heads_kv, head_dim, max_tokens, str(dtype).removeprefix("torch."))


class Surgeon:
    """A program in the making. State that a step changes is copied, parameters are shared with the original."""

    def __init__(self, program: Program, format: CacheFormat) -> None:
        source = program.exported
        self.source, self.format = program, format
        self.graph = torch.fx.Graph()
        self.copies: dict[Node, Node] = {}
        output = self.graph.graph_copy(source.graph, self.copies, return_output_node=True)
        assert isinstance(output, tuple)
        self.output = self.graph.output(output[0])
        self.output.meta = copy.copy(output[1].meta)
        self.module = GraphModule(source.graph_module, self.graph)
        self.module.meta.update(source.graph_module.meta)
        self.inputs = {spec.arg.name: spec for spec in source.graph_signature.input_specs}
        self.state, self.constants = dict(source.state_dict), dict(source.constants)
        self.removed: set[str] = set()
        self.renamed: dict[str, str] = {}

    def swap(self, match: Match) -> tuple[str, ...]:
        """Put append and attend where the writes and the attention were; the names of the new buffers."""
        attention = self.copies[match.attention]
        tensors = _filled(match, self.format)
        parts = {name: self._add_buffer(match.key, name, tensor) for name, tensor in tensors.items()}
        coded = [parts.pop(name) for name in _CODED]
        with self.graph.inserting_before(self.copies[match.last_write]):
            key, value = (self._rows(cache, write, attention) for cache, write in self._sides(match))
            lengths = self._lengths(match, attention)
            self._call(_APPEND, (*coded, lengths, key, value, self.format.name), parts, attention)
        with self.graph.inserting_before(attention):
            query = self.copies[match.query]
            arguments = (query, *coded, lengths, self.format.name, match.scale)
            attended = self._call(_ATTEND, arguments, parts, attention)
        attention.replace_all_uses_with(attended)
        self.renamed[attention.name] = attended.name
        self.graph.erase_node(attention)
        for cache in (match.key, match.value):
            self._remove(cache)
        return tuple(self.inputs[node.name].target or "" for node in (*coded, *parts.values()))

    def finish(self) -> ExportedProgram:
        """The new program, of calls that nothing uses any more swept. It has calls that write in place."""
        source = self.source.exported
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.module.recompile()
        memo: dict[int, Any] = {}
        outputs = [
            copy.deepcopy(spec)
            for spec in source.graph_signature.output_specs
            if not (spec.kind == OutputKind.BUFFER_MUTATION and spec.target in self.removed)
        ]
        calls = copy.deepcopy(source.module_call_graph)
        signatures = [call.signature for call in calls if call.signature is not None]
        told = [spec.arg for spec in outputs] + [
            argument for signature in signatures for argument in (*signature.inputs, *signature.outputs)
        ]
        for argument in told:
            if isinstance(argument, TensorArgument):
                argument.name = self.renamed.get(argument.name, argument.name)
        names = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        inputs = [copy.deepcopy(self.inputs[name]) for name in names]
        return ExportedProgram(
            root=self.module,
            graph=self.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=self._owned(self.state, memo),
            range_constraints=copy.deepcopy(source.range_constraints),
            module_call_graph=calls,
            example_inputs=source.example_inputs,
            constants=self._owned(self.constants, memo),
            verifiers=[TrainingIRVerifier],
        )

    @staticmethod
    def _sides(match: Match) -> tuple[tuple[Cache, Write], tuple[Cache, Write]]:
        return (match.key, match.key_write), (match.value, match.value_write)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], near: Node) -> Node:
        """A call with the fake value and the whereabouts that export would have noted."""
        node = self.graph.call_function(target, args, dict(kwargs))
        given = torch.fx.node.map_arg((args, dict(kwargs)), lambda argument: argument.meta["val"])
        with near.meta["val"].fake_mode, torch.no_grad():
            node.meta["val"] = target(*given[0], **given[1])
        node.meta |= {name: near.meta[name] for name in _TOLD if name in near.meta}
        return node

    def _rows(self, cache: Cache, write: Write, near: Node) -> Node:
        """What the step writes, as [batch, heads_kv, 1, head_dim] in the cache's dtype."""
        rows = self.copies[write.rows]
        if tuple(rows.meta["val"].shape) != write.sizes:
            rows = self._call(aten.expand.default, (rows, list(write.sizes)), {}, near)
        if rows.meta["val"].dtype != cache.tensor.dtype:
            rows = self._call(aten.to.dtype, (rows, cache.tensor.dtype), {}, near)
        if write.sizes != write.row:
            rows = self._call(aten.reshape.default, (rows, list(write.row)), {}, near)
        wanted = [write.labels.index(dim) for dim in cache.dims if dim in write.labels and dim is not None]
        order = [axis for axis in range(len(write.row)) if axis not in wanted] + wanted
        if order != sorted(order):
            rows = self._call(aten.permute.default, (rows, order), {}, near)
        batch, heads_kv, _, head_dim = cache.sizes
        if tuple(rows.meta["val"].shape) != (batch, heads_kv, 1, head_dim):
            rows = self._call(aten.reshape.default, (rows, [batch, heads_kv, 1, head_dim]), {}, near)
        return rows

    def _lengths(self, match: Match, near: Node) -> Node:
        """int32 [batch] of the step's position, memory of its own: append counts it up."""
        index, device, batch = match.key_write.index, match.key.tensor.device, match.key.sizes[0]
        if index.op == "call_function" and index.target in _SCALARS:
            index = index.args[0]
        index = self.copies[index]
        if not isinstance(index.meta["val"], Tensor):
            fixed = {"dtype": torch.int32, "device": device}
            return self._call(aten.full.default, ([batch], index), fixed, near)
        if index.meta["val"].dim() != 1:
            index = self._call(aten.reshape.default, (index, [1]), {}, near)
        narrow = self._call(aten.to.device, (index, device, torch.int32), {}, near)
        return self._call(aten.repeat.default, (narrow, [batch]), {}, near)

    def _add_buffer(self, cache: Cache, part: str, tensor: Tensor) -> Node:
        """A placeholder before the plain cache's, of the same persistence and in the same module."""
        old = self.copies[cache.buffer]
        stem = f"{cache.name.rpartition('.')[0]}.kvq_{part}".removeprefix(".")
        taken = self.state.keys() | self.constants.keys()
        name = next(name for i in range(len(taken) + 1) if (name := f"{stem}_{i}" if i else stem) not in taken)
        persistent = bool(self.inputs[old.name].persistent)
        (self.state if persistent else self.constants)[name] = tensor
        with self.graph.inserting_before(old):
            node = self.graph.placeholder("b_" + name.replace(".", "_"))
        node.target = node.name
        node.meta["val"] = old.meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)
        self.inputs[node.name] = InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent)
        return node

    def _remove(self, cache: Cache) -> None:
        """Take away a plain buffer with all that still reads or writes it."""
        buffer = self.copies[cache.buffer]
        name = cache.name
        if name in self.source.mutation_outputs:
            signature = self.source.exported.graph_signature.output_specs
            kept = [
                spec.target
                for spec in signature
                if spec.kind != OutputKind.BUFFER_MUTATION or spec.target not in self.removed
            ]
            values = list(self.output.args[0])
            del values[kept.index(name)]
            self.output.args = (tuple(values),)
        self.removed.add(name)
        self._erase_users(buffer)
        self._drop(cache.tensor)

    def _drop(self, tensor: Tensor) -> None:
        """Forget the tensor under every name that it has, those of placeholders that nothing uses among them."""
        storage = tensor.untyped_storage().data_ptr()
        for held in (self.state, self.constants):
            for name in [name for name, other in held.items() if _storage(other) == storage]:
                del held[name]
                self.removed.add(name)
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users and self.inputs[node.name].target in self.removed:
                del self.inputs[node.name]
                self.graph.erase_node(node)

    def _owned(self, state: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        """What a step changes as copies, which share memory among each other as the originals do."""
        changed = {_storage(self.source.tensor(node)) for node in self.source.changed}
        return {
            name: copy.deepcopy(held, memo) if _storage(held) in changed - {None} else held
            for name, held in state.items()
        }

    def _erase_users(self, node: Node) -> None:
        for user in list(node.users):
            self._erase_users(user)
            if user in node.users:
                self.graph.erase_node(user)


def _storage(held: Any) -> int | None:
    return held.untyped_storage().data_ptr() if isinstance(held, Tensor) else None


def _filled(match: Match, format: CacheFormat) -> dict[str, Tensor]:
    """New parts that hold what the plain caches hold, up to the last row that is not zero."""
    batch, device = match.key.sizes[0], match.key.tensor.device
    described = format_parts(format, match.key.sizes, match.key.tensor.dtype)
    parts = {
        name: torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device)
        for name, part in described.items()
    }
    key, value = (_canonical(cache) for cache in (match.key, match.value))
    used = ((key != 0) | (value != 0)).any(-1).any(0).any(0).nonzero()
    if used.numel():
        rows = int(used.max()) + 1
        lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        coded = [parts[name] for name in _CODED]
        others = {name: part for name, part in parts.items() if name not in _CODED}
        _APPEND(*coded, lengths, key[:, :, :rows], value[:, :, :rows], format.name, **others)
    return parts


def _canonical(cache: Cache) -> Tensor:
    """The plain cache as [batch, heads_kv, max_tokens, head_dim]."""
    wanted = [dim for dim in cache.dims if dim is not None]
    return cache.tensor.detach().permute(wanted).reshape(cache.sizes)
