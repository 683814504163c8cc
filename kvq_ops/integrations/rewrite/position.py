"""Proves that a step writes row ``position`` and sees rows 0..position and no other.

Row index, mask and extent are functions of one number, the position: an input, or a counter that the program keeps.
There are only max_tokens positions, so the proof is by trying each: the few calls between the position and these values
are run on every one. Whatever spells the mask (comparisons, a triangle indexed by the position, ``where``, additive
masks of any dtype), it holds or it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from .match import Match
from .program import Program, SkipError, target_name

__all__ = ["Prover"]

HIDDEN = -3e4
"""What an additive mask must put at most on a hidden row: under it exp gives 0 unless logits spread as far. float16's
least number, -65504, lies below."""

Check = Callable[[Any, int], str | None]
"""Says what is wrong with a value at a position."""


@dataclass(frozen=True)
class Use:
    """A value that is read at ``at``, and what it must be."""

    node: Node
    at: int
    check: Check
    purpose: str


def _number(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(value) if value.numel() == 1 and not value.is_floating_point() else None
    return value if isinstance(value, int) else None


def _is_row(value: Any, position: int) -> str | None:
    got = _number(value)
    return None if got == position else f"the row that it writes at position {position} is {got}"


def _is_extent(value: Any, position: int) -> str | None:
    got = _number(value)
    return None if got == position + 1 else f"it reads {got} rows at position {position}, not {position + 1}"


def _is_uniform(value: Any, _: int) -> str | None:
    return "the numbers of its position come to differ" if bool((value != value.flatten()[0]).any()) else None


def _is_causal(rows: int | None) -> Check:
    """Of a mask over ``rows`` rows; None where it covers the rows up to the position alone."""

    def check(mask: Any, position: int) -> str | None:
        width = position + 1 if rows is None else rows
        if mask.shape[-1] not in (1, width):
            return f"its mask covers {mask.shape[-1]} of {width} rows at position {position}"
        seen = torch.arange(width, device=mask.device) <= position
        holds = mask == seen if mask.dtype == torch.bool else torch.where(seen, mask == 0, mask <= HIDDEN)
        return None if bool(holds.all()) else f"its mask is not causal: it is wrong at position {position}"

    return check


class Prover:
    """Remembers proofs by their calls, for a model's layers ask the same."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.verdicts: dict[tuple[Any, ...], str | None] = {}

    def prove(self, match: Match) -> None:
        """Raises :class:`SkipError` with what is wrong."""
        rows = match.key.sizes[2]
        uses, constants = self._uses(match, rows)
        for value, check, purpose in constants:
            if wrong := check(value, 0) or check(value, 1):
                raise SkipError(f"{purpose} does not follow a position: {wrong}")
        if not uses:
            raise SkipError("its row and its mask do not follow a position")
        calls = self._calls(uses)
        position = self._position(calls, uses)
        if isinstance(position.meta["val"], Tensor) and position.meta["val"].numel() > 1:
            uses += self._counter(position)
            calls = self._calls(uses)
            position = self._position(calls, uses)
        places = [(*self._place(calls, use), use.purpose) for use in uses]
        key = (*self._signature(calls, position), *places, rows)
        if key not in self.verdicts:
            self.verdicts[key] = self._try_all(calls, position, uses, rows)
        if wrong := self.verdicts[key]:
            raise SkipError(wrong)

    def _uses(self, match: Match, rows: int) -> tuple[list[Use], list[tuple[Any, Check, str]]]:
        """The values to prove: those of nodes, and constants."""
        order, end = self.program.order, self.program.order[match.attention]
        wanted: list[tuple[Any, int, Check, str]] = []
        for write in (match.key_write, match.value_write):
            wanted += [(write.index, order[at], _is_row, "row") for at in (write.node, match.last_write)]
        extents = [cache.walked.extent for cache in (match.key, match.value)]
        wanted += [(extent, end, _is_extent, "extent") for extent in extents if extent is not None]
        cut = None not in extents
        if any(extent is None for extent in extents) and any(extent is not None for extent in extents):
            raise SkipError("it reads all rows of one side and a part of the other")
        if match.mask is None and not cut:
            raise SkipError(f"it has no mask: it sees all {rows} rows, written or not")
        if match.mask is not None:
            wanted.append((match.mask, end, _is_causal(None if cut else rows), "mask"))
        uses = [Use(*want) for want in wanted if isinstance(want[0], Node)]
        return uses, [(value, check, purpose) for value, _, check, purpose in wanted if not isinstance(value, Node)]

    def _counter(self, position: Node) -> list[Use]:
        """A counter of several numbers, at the end of the step."""
        end = len(self.program.order)
        last = self.program.mutation_outputs.get(self.program.name(position), position)
        return [Use(last, end, _is_uniform, "counter")]

    def _calls(self, uses: list[Use]) -> list[Node]:
        """Everything that the used values depend on, writes in place included, in the program's order."""
        program, last = self.program, max(use.at for use in uses)
        needed: set[Node] = set()
        pending = [use.node for use in uses]
        while pending:
            while pending:
                node = pending.pop()
                if node not in needed:
                    needed.add(node)
                    pending.extend(node.all_input_nodes)
            roots = {root for node in needed for root in program.roots[node]}
            pending = [
                node
                for node, mutated in program.mutators.items()
                if node not in needed and mutated & roots and program.order[node] < last
            ]
        return sorted(needed, key=program.order.__getitem__)

    def _position(self, calls: list[Node], uses: list[Use]) -> Node:
        """The one placeholder that is no constant: an integer, one number."""
        program = self.program
        inputs = [
            node
            for node in calls
            if node.op == "placeholder"
            and (program.kind(node) == InputKind.USER_INPUT or node in program.changed)
            and not self._is_scratch(node)
        ]
        for node in calls:
            if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
                if isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001
                    raise SkipError(f"its row or mask depends on the subgraph {node.name}")
            elif node.op == "call_function" and torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
                raise SkipError(f"its row or mask depends on the random {target_name(node)}")
        rows = self._calls([use for use in uses if use.purpose == "row"])
        found = [node for node in inputs if node in rows]
        others = [program.name(node) for node in inputs if node not in found]
        if len(found) != 1:
            names = ", ".join(program.name(node) for node in found) or "nothing that changes"
            raise SkipError(f"the row that it writes depends on {names}, not on one position")
        if others:
            raise SkipError(
                f"its mask depends on {', '.join(others)}, not on the position {program.name(found[0])} alone"
            )
        (position,) = found
        value = position.meta["val"]
        if isinstance(value, Tensor):
            self._check_tensor(position, value)
        elif not isinstance(value, (int, torch.SymInt)):
            raise SkipError(f"its position {program.name(position)} is no integer")
        return position

    def _is_scratch(self, node: Node) -> bool:
        """A buffer that a step overwrites before it reads it says nothing of the steps before."""
        first = min(node.users, key=self.program.order.__getitem__)
        alone = self.program.kind(node) != InputKind.USER_INPUT and len(self.program.storages[self._storage(node)]) == 1
        return alone and first.target is torch.ops.aten.copy_.default and first.args[0] is node

    def _storage(self, node: Node) -> int:
        held = self.program.tensor(node)
        return held.untyped_storage().data_ptr() if held is not None else 0

    def _check_tensor(self, position: Node, value: Tensor) -> None:
        name, held = self.program.name(position), self.program.tensor(position)
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise SkipError(f"its position {name} is no integer")
        if not all(isinstance(size, int) for size in value.shape) or value.numel() == 0:
            raise SkipError(f"its position {name} has no fixed shape")
        if value.numel() > 1 and (held is None or bool((held != held.flatten()[0]).any())):
            raise SkipError(f"its position {name} has {value.numel()} numbers, which may differ")

    def _signature(self, calls: list[Node], position: Node) -> tuple[Any, ...]:
        """The calls with what they take, nodes by their place: equal for equal computations over equal constants."""
        place = {node: i for i, node in enumerate(calls)}
        lines = []
        for node in calls:
            if node is position:
                value = node.meta["val"]
                lines.append(f"position {(value.dtype, value.shape) if isinstance(value, Tensor) else 'int'}")
            elif node.op != "call_function":
                lines.append(f"{node.op} {node.target}")
            else:
                taken = map_arg((node.args, node.kwargs), lambda given: f"%{place[given]}")
                lines.append(f"{target_name(node) if hasattr(node.target, 'tags') else node.target} {taken}")
        return tuple(lines)

    def _place(self, calls: list[Node], use: Use) -> tuple[int, int]:
        """Which call's value is used, and after how many of the calls."""
        return calls.index(use.node), sum(self.program.order[node] < use.at for node in calls)

    def _try_all(self, calls: list[Node], position: Node, uses: list[Use], rows: int) -> str | None:
        for number in range(rows):
            try:
                values = self._run(calls, position, uses, number)
            except Exception as error:  # any call of the user's program
                return f"its row or mask cannot be computed at position {number}: {error}"
            for use, value in zip(uses, values, strict=True):
                if wrong := use.check(value, number):
                    return wrong
        for number in (rows, rows + 1):
            try:
                values = self._run(calls, position, uses, number)
            except Exception:  # refused there, as it should be
                continue
            for use, value in zip(uses, values, strict=True):
                got = _number(value)
                if use.purpose == "row" and got is not None and -rows <= got < rows:
                    return f"it writes position {number} into row {got % rows}: a ring, which a quantized cache is not"
        return None

    def _run(self, calls: list[Node], position: Node, uses: list[Use], number: int) -> list[Any]:
        """The used values, each as it is where it is read."""
        program = self.program
        found: dict[Use, Any] = {}
        values: dict[Node, Any] = {}
        with torch.no_grad():
            for node in calls:
                at = program.order[node]
                found.update({use: _kept(values[use.node]) for use in uses if use not in found and use.at < at})
                if node is position:
                    value = node.meta["val"]
                    tensor = isinstance(value, Tensor)
                    held = program.tensor(node)
                    device = held.device if held is not None else value.device if tensor else None
                    values[node] = (
                        torch.full(value.shape, number, dtype=value.dtype, device=device) if tensor else number
                    )
                elif node.op == "placeholder":
                    values[node] = _kept(program.tensor(node)) if node in program.changed else program.tensor(node)
                elif node.op == "get_attr":
                    values[node] = getattr(program.module, str(node.target))
                else:
                    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [found.get(use, values[use.node]) for use in uses]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
