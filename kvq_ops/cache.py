"""One layer's quantized key-value cache as a module, so that a model holds it and torch.compile sees its buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from kvq_ops import checks, ops, reference
from kvq_ops.format import CacheFormat, SideFormat

__all__ = ["QuantizedKVCache"]

_SAVED = -1
"""In a move: the row that was put aside."""


class QuantizedKVCache(nn.Module):
    """Keys and values of one layer, quantised row by row as they are appended, read as they are.

    The parts are buffers, one tensor each, that no state_dict holds: ``key_codes``, ``key_scales``, ``value_codes``,
    ``value_scales`` (``kvq_ops.format`` says what is in them) and ``lengths``, int32 [batch], the tokens that each
    sequence holds. Writing happens in place and never moves a part, so a compiled step runs over the cache that it
    was given, and CUDA graphs may keep its addresses.

    Inside a compiled or exported model use :meth:`append`, :meth:`attend` and, between sequences, :meth:`reset`. Do no
    arithmetic of your own on ``lengths`` there: AOTInductor freezes a one-element buffer that an aten operator reads or
    writes (so ``reset`` has no place in an AOTInductor model of batch 1 either). The other methods read lengths on the
    host and belong between steps. After ``to_empty`` call :meth:`reset`.

    What an op refuses is a ``RuntimeError`` of the op; what this class refuses is a ``ValueError``, before anything is
    written.

    Args:
        batch: sequences, each with its own length.
        heads_kv: key-value heads; queries may have any multiple of them.
        head_dim: even, from 8 to 1024.
        max_tokens: capacity of each sequence; all memory is taken here.
        bits: 8 or 4, the row format ``int8`` or ``int4``, where ``format`` is None.
        format: a preset's name, ``<key>/<value>`` such as ``"int8/int4"``, or a :class:`CacheFormat`.
        dtype: of the parts in full precision that formats may have; ``int8`` and ``int4`` have none.
        device: where the parts lie.
    """

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    lengths: Tensor

    def __init__(
        self,
        batch: int,
        heads_kv: int,
        head_dim: int,
        max_tokens: int,
        bits: int = 8,
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
        parts = self.format.parts(batch, heads_kv, head_dim, max_tokens)
        for name, part in parts.items():
            tensor = torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device)
            self.register_buffer(name, tensor, persistent=False)
        self._part_names = tuple(parts)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int32, device=device), persistent=False)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write key and value, [batch, heads_kv, head_dim] or [batch, heads_kv, tokens, head_dim], after what each
        sequence holds: fp32, bf16 or fp16, any strides."""
        key = key.unsqueeze(2) if key.dim() == 3 else key
        value = value.unsqueeze(2) if value.dim() == 3 else value
        ops.append(*self._parts(), key, value, self._format_name)

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
        return ops.attend(query, *self._parts(), self._format_name, scale, return_lse=return_lse)

    def reset(self) -> None:
        """Empty every sequence, in place."""
        self.lengths.zero_()

    def truncate(self, lengths: int | Tensor) -> None:
        """Forget the newest tokens, in place: an int keeps at most that many of each sequence and lies in 0..longest;
        an int32 tensor [batch] gives the new lengths, each at most the current one."""
        kept = checks.truncate_lengths(lengths, self.lengths)
        self.lengths.copy_(torch.tensor(kept, dtype=torch.int32, device="cpu"))

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence index[b] was, in place: int64 or int32 [batch], any device, repeats and
        cycles allowed. Copies the tokens in use of the sequences that change, by way of one sequence of one part."""
        sources = checks.reorder_index(index, self.batch)
        lengths = self.lengths.tolist()
        new_lengths = torch.tensor([lengths[source] for source in sources], dtype=torch.int32, device="cpu")
        moves = list(_moves(sources))
        for name in self._part_names:
            part = getattr(self, name)
            saved = part[0, :, :0]
            for to, source in moves:
                if to == _SAVED:
                    saved = part[source, :, : lengths[source]].clone()
                    continue
                rows = saved if source == _SAVED else part[source, :, : lengths[source]]
                part[to, :, : rows.shape[1]] = rows
        self.lengths.copy_(new_lengths)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Keys and values as attend reads them, fp32 [batch, heads_kv, longest, head_dim], zeros past each length."""
        longest = int(self.lengths.max())
        past = torch.arange(longest, device=self.lengths.device) >= self.lengths[:, None]

        def read(codes: Tensor, scales: Tensor, side: SideFormat) -> Tensor:
            rows = reference.dequantize(codes[:, :, :longest], scales[:, :, :longest], side, self.head_dim)
            return rows.masked_fill_(past[:, None, :, None], 0.0)

        return (
            read(self.key_codes, self.key_scales, self.format.key),
            read(self.value_codes, self.value_scales, self.format.value),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, lengths included."""
        return sum(part.nbytes for part in self._parts())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence costs in this layer."""
        return self.format.bytes_per_token(self.heads_kv, self.head_dim)

    def save_state(self) -> dict[str, Any]:
        """A copy of what the cache holds: facts and, on the cache's device, tensors of the tokens in use alone (the
        sequences of a part one after another). ``torch.save`` writes it, ``torch.load(weights_only=True)`` reads it."""
        held = self.lengths.tolist()
        state = self._facts() | {"lengths": self.lengths.clone()}
        for name in self._part_names:
            part = getattr(self, name)
            state[name] = torch.cat([part[b, :, :length] for b, length in enumerate(held)], dim=1)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what :meth:`save_state` saw, bit for bit. Format, batch, heads_kv and head_dim must be the cache's;
        max_tokens may differ, as long as every sequence fits."""
        lengths = checks.state(state, self._facts(), self.format, self.max_tokens)
        for name in self._part_names:
            part = getattr(self, name)
            for b, rows in enumerate(state[name].split(lengths, dim=1)):
                part[b, :, : lengths[b]] = rows
        self.lengths.copy_(state["lengths"])

    def extra_repr(self) -> str:
        sizes = f"batch={self.batch}, heads_kv={self.heads_kv}, head_dim={self.head_dim}, max_tokens={self.max_tokens}"
        return f"{sizes}, format={self.format.name}, nbytes={self.nbytes}"

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.key_codes, self.key_scales, self.value_codes, self.value_scales, self.lengths

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

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call, no-any-return]


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
