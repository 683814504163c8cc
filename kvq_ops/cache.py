"""One layer's quantized key-value cache as a module, so that a model holds it and torch.compile sees its buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from . import checks, ops, reference
from .format import CacheFormat

__all__ = ["QuantizedKVCache"]

_REQUIRED = ("key_codes", "key_scales", "value_codes", "value_scales")
_OPTIONAL = ("key_zeros", "value_zeros", "key_full", "value_full")
_SAVED = -1
"""In a move: the row that was put aside."""


class QuantizedKVCache(nn.Module):
    """Keys and values of one layer, quantised as they are appended, read as they are.

    The parts are buffers, one tensor each, that no state_dict holds: ``key_codes``, ``key_scales``, ``value_codes``,
    ``value_scales``, those of ``key_zeros``, ``value_zeros``, ``key_full`` and ``value_full`` that the format has, else
    None (``kvq_ops.format`` says what is in them), and ``lengths``, int32 [batch], the tokens that each sequence
    holds. Writing happens in place and never moves a part, so a compiled step runs over the cache that it was given,
    and CUDA graphs may keep its addresses.

    Inside a compiled or exported model use :meth:`append`, :meth:`attend` and, between sequences, :meth:`reset`. Do no
    arithmetic of your own on ``lengths`` there, take positions as an input: Inductor may move an aten operator that
    reads it before :meth:`append` to after it, and AOTInductor freezes a one-element buffer that one reads or writes
    (so ``reset`` has no place in an AOTInductor model of batch 1 either). The other methods read lengths on the
    host and belong between steps. After ``to_empty`` call :meth:`reset`.

    What an op refuses is a ``RuntimeError`` of the op; what this class refuses is a ``ValueError``, before anything is
    written.

    Args:
        batch: sequences, each with its own length.
        heads_kv: key-value heads; queries may have any multiple of them.
        head_dim: even, from 8 to 1024.
        max_tokens: capacity of each sequence; all memory is taken here.
        bits: 8 (by default) or 4, the row format ``int8`` or ``int4``, where ``format`` is None.
        format: a preset's name, ``<key>/<value>`` such as ``"int8/int4"``, or a :class:`CacheFormat`.
        dtype: of the rows that some formats keep in full precision (``key_full``, ``value_full``): what the keys and
            values that are appended have.
        device: where the parts lie.
    """

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    key_zeros: Tensor | None
    value_zeros: Tensor | None
    key_full: Tensor | None
    value_full: Tensor | None
    lengths: Tensor

    def __init__(
        self,
        batch: int,
        heads_kv: int,
        head_dim: int,
        max_tokens: int,
        bits: int | None = None,
        *,
        format: str | CacheFormat | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.format = checks.cache_format(bits, format)
        checks.cache_sizes(batch, heads_kv, head_dim, max_tokens, dtype)
        self.batch, self.heads_kv, self.head_dim, self.max_tokens = batch, heads_kv, head_dim, max_tokens
        self.dtype = dtype
        self._format_name = self.format.name
        self._parts = self.format.parts(batch, heads_kv, head_dim, max_tokens, str(dtype).removeprefix("torch."))
        for name in (*_REQUIRED, *_OPTIONAL):
            part, tensor = self._parts.get(name), None
            if part is not None:
                tensor = torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device)
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int32, device=device), persistent=False)
        self._mark_static()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write key and value, [batch, heads_kv, head_dim] or [batch, heads_kv, tokens, head_dim], after what each
        sequence holds: fp32, bf16 or fp16, any strides."""
        key = key.unsqueeze(2) if key.dim() == 3 else key
        value = value.unsqueeze(2) if value.dim() == 3 else value
        ops.append(
            self.key_codes,
            self.key_scales,
            self.value_codes,
            self.value_scales,
            self.lengths,
            key,
            value,
            self._format_name,
            self.key_zeros,
            self.value_zeros,
            self.key_full,
            self.value_full,
        )

    @overload
    def attend(self, query: Tensor, *, scale: float | None = None, return_lse: Literal[False] = False) -> Tensor: ...

    @overload
    def attend(
        self, query: Tensor, *, scale: float | None = None, return_lse: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, query: Tensor, *, scale: float | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of query, [batch, heads_q, head_dim] or [batch, heads_q, tokens, head_dim], over what each sequence
        holds, its newest tokens being the query's own; see :func:`kvq_ops.attend`."""
        return ops.attend(
            query,
            self.key_codes,
            self.key_scales,
            self.value_codes,
            self.value_scales,
            self.lengths,
            self._format_name,
            scale,
            self.key_zeros,
            self.value_zeros,
            self.key_full,
            self.value_full,
            return_lse=return_lse,
        )

    def reset(self) -> None:
        """Empty every sequence, in place."""
        self.lengths.zero_()

    def overflowed(self) -> bool:
        """Whether an append found no room in some sequence and dropped what did not fit: a host read. On CUDA such a
        sequence holds its first max_tokens tokens and its length is max_tokens + 1, until :meth:`reset` or
        :meth:`truncate`; on the CPU append raises instead. (A capacity of 2^31 - 1 leaves no number to tell by.)"""
        return bool((self.lengths > self.max_tokens).any())

    def truncate(self, lengths: int | Tensor) -> None:
        """Forget the newest tokens, in place: an int keeps at most that many of each sequence and lies in 0..longest;
        an int32 tensor [batch] gives the new lengths, each at most the current one.

        Exact, as if the tokens had never been appended. Where keys are coded per channel, a block of them cannot be
        opened again: the newest two blocks are held in full precision as well, so that cutting back by up to a block
        is always possible, further back only to where a block ends, and anything else is refused."""
        kept = checks.truncate_lengths(lengths, self._held())
        if self.format.key.key_block:
            self._forget_keys(kept)
        self.lengths.copy_(torch.tensor(kept, dtype=torch.int32, device="cpu"))

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence index[b] was, in place: int64 or int32 [batch], any device, repeats and
        cycles allowed. Copies the tokens in use of the sequences that change, by way of one sequence of one part."""
        sources = checks.reorder_index(index, self.batch)
        told = self.lengths.tolist()
        lengths = [min(length, self.max_tokens) for length in told]
        new_lengths = torch.tensor([told[source] for source in sources], dtype=torch.int32, device="cpu")
        moves = list(_moves(sources))
        for name in self._parts:
            part, used = self._by_sequence(name), self._rows_in_use(name, lengths)
            saved = part[0][:0]
            for to, source in moves:
                if to == _SAVED:
                    saved = part[source][: used[source]].clone()
                    continue
                rows = saved if source == _SAVED else part[source][: used[source]]
                part[to][: len(rows)] = rows
        self.lengths.copy_(new_lengths)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Keys and values as attend reads them, fp32 [batch, heads_kv, longest, head_dim], zeros past each length."""
        held = self._held()
        shape = (self.batch, self.heads_kv, max(held), self.head_dim)
        key, value = torch.zeros(2, *shape, device=self.lengths.device)
        for b, length in enumerate(held):
            parts = {name: getattr(self, name)[b] for name in self._parts}
            key[b, :, :length], value[b, :, :length] = reference.dequantize_cache(
                self.format, parts, self.head_dim, length
            )
        return key, value

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, lengths included."""
        return self.lengths.nbytes + sum(part.nbytes for part in self._parts.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence costs in this layer, in the long run."""
        return self.format.bytes_per_token(self.heads_kv, self.head_dim)

    def save_state(self) -> dict[str, Any]:
        """A copy of what the cache holds: facts and, on the cache's device, tensors of the rows in use alone (the
        sequences of a part one after another). ``torch.save`` writes it, ``torch.load(weights_only=True)`` reads it.
        Refused after an append that found no room (:meth:`overflowed`): the state would not tell what is missing."""
        held = checks.saved_lengths(self.lengths, self.max_tokens)
        state = self._facts() | {"lengths": self.lengths.clone()}
        for name in self._parts:
            part, used = self._by_sequence(name), self._rows_in_use(name, held)
            rows = torch.cat([part[b][:count] for b, count in enumerate(used)])
            state[name] = rows.movedim(0, self._parts[name].axis - 1).contiguous()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what :meth:`save_state` saw, bit for bit. Format, batch, heads_kv and head_dim must be the cache's;
        max_tokens may differ, as long as every sequence fits."""
        lengths = checks.state(state, self._facts(), self.format, self._parts, self.max_tokens)
        for name in self._parts:
            part, used = self._by_sequence(name), self._rows_in_use(name, lengths)
            given = state[name].movedim(self._parts[name].axis - 1, 0)
            for b, rows in enumerate(given.split(used)):
                part[b][: used[b]] = rows
        self.lengths.copy_(state["lengths"])

    def extra_repr(self) -> str:
        sizes = f"batch={self.batch}, heads_kv={self.heads_kv}, head_dim={self.head_dim}, max_tokens={self.max_tokens}"
        return f"{sizes}, format={self.format.name}, nbytes={self.nbytes}"

    def _by_sequence(self, name: str) -> Tensor:
        """A view of a part whose second dimension counts what ``Part.axis`` does."""
        part: Tensor = getattr(self, name)
        return part.movedim(self._parts[name].axis, 1)

    def _rows_in_use(self, name: str, lengths: list[int]) -> list[int]:
        return [self.format.rows_in_use(self._parts[name], length) for length in lengths]

    def _forget_keys(self, kept: list[int]) -> None:
        """Refuses lengths whose unfinished block is not held in full precision; overwrites the slots of the tokens that
        go with NaN, so that a later cut knows which rows are no longer there."""
        full, held, format = self.key_full, self._held(), self.format
        assert full is not None
        ring = 2 * format.key.key_block

        def slots(first: int, last: int) -> list[int]:
            return [format.sinks + (token - format.sinks) % ring for token in range(first, last)]

        for b, (new, length) in enumerate(zip(kept, held, strict=True)):
            unfinished = slots(format.frozen(new), new)
            there = format.frozen(new) >= length - ring
            if new < length and unfinished:
                rows = full[b, :, unfinished].movedim(1, 0).flatten(1)
                checks.truncate_exact(format, new, b, there and not bool(rows.isnan().all(1).any()))
        for b, (new, length) in enumerate(zip(kept, held, strict=True)):
            full[b, :, slots(max(new, format.sinks, length - ring), length)] = torch.nan

    def _held(self) -> list[int]:
        """The tokens of each sequence, on the host."""
        held: list[int] = self.lengths.clamp(max=self.max_tokens).tolist()
        return held

    def _mark_static(self) -> None:
        """Let CUDA graphs take the parts where they lie: a compiled step whose inputs they are writes them, and torch
        captures no graph that writes inputs which may move."""
        if self.lengths.device.type == "cuda":
            for name in ("lengths", *self._parts):
                torch._dynamo.mark_static_address(getattr(self, name), guard=False)  # noqa: SLF001

    def _facts(self) -> dict[str, Any]:
        return {
            "version": checks.STATE_VERSION,
            "format": self.format.name,
            "batch": self.batch,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedKVCache:
        """Let ``.to`` and its kin move the parts, never convert them: their dtypes and strides are the format's."""

        def move(part: Tensor) -> Tensor:
            moved = fn(part)
            kept = moved.dtype == part.dtype and moved.stride() == part.stride()
            return moved if kept else part.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        self._mark_static()
        return self


def _moves(sources: list[int]) -> Iterator[tuple[int, int]]:
    """Copies (to, source) that, done in order, turn rows b into rows sources[b]: none goes over a row still needed.

    A cycle goes by way of one row put aside: (_SAVED, source) saves it, (to, _SAVED) brings it back."""
    pending = {to: source for to, source in enumerate(sources) if to != source}
    readers = Counter(pending.values())
    free = [to for to in pending if not readers[to]]
    while pending:
        if free:
            to = free.pop()
            source = pending.pop(to)
            yield to, source
            readers[source] -= 1
            if not readers[source] and source in pending:
                free.append(source)
            continue
        # Nothing but cycles is left: each row is read once.
        first = to = next(iter(pending))
        yield _SAVED, first
        while (source := pending.pop(to)) != first:
            yield to, source
            to = source
        yield to, _SAVED
