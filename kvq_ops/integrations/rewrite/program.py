"""An exported program as the rewrite reads it: what a placeholder stands for, what aliases what, what changes what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import GraphModule, Node

__all__ = ["SDPA", "Program", "SkipError", "arguments", "shape", "target_name"]

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
_MAY_ALIAS = frozenset({aten.type_as.default})
"""Ops that may return their input although their schema does not say so."""
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class SkipError(Exception):
    """An attention stays as it is; the text says why."""


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, defaults filled in; of other calls by position."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(enumerate(node.args)) | node.kwargs  # type: ignore[return-value]
    values = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    names = [argument.name for argument in schema.arguments]
    return values | dict(zip(names, node.args, strict=False)) | node.kwargs


def shape(node: Node) -> tuple[Any, ...]:
    """Sizes of a node's tensor: ints, or ``torch.SymInt`` where they are not fixed."""
    return tuple(node.meta["val"].shape)


def target_name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.name  # noqa: SLF001


def _has_mutation(module: GraphModule) -> bool:
    return any(
        node.target._schema.is_mutable  # noqa: SLF001
        for part in module.modules()
        if isinstance(part, GraphModule)
        for node in part.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001
    )


class Program:
    """Facts of one exported program, each looked up once. Nothing here changes the program."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.module = exported.graph_module
        self.nodes = list(exported.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.specs: dict[str, InputSpec] = {
            spec.arg.name: spec for spec in exported.graph_signature.input_specs if hasattr(spec.arg, "name")
        }
        self.roots: dict[Node, frozenset[Node]] = {}
        self.mutators: dict[Node, frozenset[Node]] = {}
        """Calls that write in place, and the roots of what they write."""
        self.storages: dict[int, list[Node]] = {}
        """Used placeholders by the memory of what they hold."""
        for node in self.nodes:
            self.roots[node] = self._roots_of(node)
            if mutated := self._mutated_by(node):
                self.mutators[node] = mutated
        (output,) = (node for node in self.nodes if node.op == "output")
        outputs = output.args[0]
        assert isinstance(outputs, (tuple, list))
        self.mutation_outputs: dict[str, Node] = {
            str(spec.target): value
            for spec, value in zip(exported.graph_signature.output_specs, outputs, strict=True)
            if spec.kind == OutputKind.BUFFER_MUTATION and isinstance(value, Node)
        }
        """Of a functional program: a buffer's name and the value that it takes at the end."""
        written = frozenset(root for roots in self.mutators.values() for root in roots)
        self.changed = {
            node
            for node in self.nodes
            if node.op == "placeholder"
            and (self.roots[node] & written or self.specs[node.name].target in self.mutation_outputs)
        }
        """Placeholders that a step changes."""

    def attentions(self) -> list[Node]:
        return [node for node in self.nodes if node.op == "call_function" and node.target is SDPA]

    def hidden_attentions(self) -> Iterator[Node]:
        """Attentions inside subgraphs, such as those of ``torch.cond`` or of a gradient mode."""
        for module in self.module.modules():
            if isinstance(module, GraphModule) and module is not self.module:
                yield from module.graph.find_nodes(op="call_function", target=SDPA)

    def kind(self, placeholder: Node) -> InputKind:
        return self.specs[placeholder.name].kind

    def name(self, placeholder: Node) -> str:
        """The buffer's or parameter's name in the model; an input's own."""
        return self.specs[placeholder.name].target or placeholder.name

    def tensor(self, placeholder: Node) -> Tensor | None:
        """What a parameter, buffer or constant holds; None of an input."""
        spec = self.specs[placeholder.name]
        if spec.kind not in _STATE or spec.target is None:
            return None
        held = self.exported.state_dict.get(spec.target)
        held = self.exported.constants.get(spec.target) if held is None else held
        return held if isinstance(held, Tensor) else None

    def _roots_of(self, node: Node) -> frozenset[Node]:
        """The nodes whose memory this one's tensor may be."""
        if node.op == "placeholder" and (held := self.tensor(node)) is not None and node.users and held.numel():
            shared = self.storages.setdefault(held.untyped_storage().data_ptr(), [])
            shared.append(node)
            return frozenset(shared[:1])
        if node.op != "call_function":
            return frozenset({node})
        aliased: list[Node] = []
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
            schema = node.target._schema  # noqa: SLF001
            if node.target in _MAY_ALIAS:
                aliased = [arg for arg in node.args[:1] if isinstance(arg, Node)]
            elif any(result.alias_info is not None for result in schema.returns):
                given = arguments(node)
                named = [argument.name for argument in schema.arguments if argument.alias_info is not None]
                aliased = [given[name] for name in named if isinstance(given.get(name), Node)]
        elif getattr(node.target, "__name__", "") == "getitem":
            aliased = [arg for arg in node.args[:1] if isinstance(arg, Node)]
        return frozenset(root for arg in aliased for root in self.roots[arg]) or frozenset({node})

    def _mutated_by(self, node: Node) -> frozenset[Node]:
        if node.op != "call_function":
            return frozenset()
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
            schema, given = node.target._schema, arguments(node)  # noqa: SLF001
            written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            values = [given.get(name) for name in written]
        else:
            modules = [
                getattr(self.module, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"
            ]
            hidden = any(isinstance(module, GraphModule) and _has_mutation(module) for module in modules)
            values = list(node.all_input_nodes) if hidden else []
        return frozenset(root for value in values if isinstance(value, Node) for root in self.roots[value])
