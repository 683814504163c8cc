"""One layer's quantized cache behind transformers' interface of a cache layer."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from ... import ops
from ...cache import QuantizedKVCache
from ...format import CacheFormat
from .padding import assert_no_padding, new_tokens

__all__ = ["CachedKeyValue", "KVQLayer", "PlainLayer", "crop_count"]


def crop_count(owner: str, tokens_to_remove: int) -> int:
    """How many of the newest tokens go: transformers hands a number that is negative or 0."""
    count = int(tokens_to_remove)
    if count > 0:
        requirement = "be negative or 0, the number of tokens to remove"
        raise ValueError(f"{owner}.crop: tokens_to_remove must {requirement}, got {count}")
    return -count


class _Sequences:
    """A layer whose sequences can be chosen anew, by :meth:`_select`."""

    is_initialized: bool
    batch_size: int

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, into new tensors."""
        if self.is_initialized:
            self._select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the sequences ``indices``, in that order, in new tensors. Indices are what transformers takes: a tensor
        or a list, negative ones and masks among them. Raises ``ValueError`` for one that is no sequence."""
        if not self.is_initialized:
            return
        batch = self.batch_size
        if isinstance(indices, Tensor):
            indices = indices.cpu()
        try:
            index = torch.arange(batch)[indices].reshape(-1)
        except (IndexError, TypeError):
            method = f"{type(self).__name__}.batch_select_indices"
            raise ValueError(f"{method}: indices must lie in {-batch}..{batch - 1}, got {indices!r}") from None
        self._select(index)

    def _select(self, index: Tensor) -> None:
        """The sequences ``index``, int64 on the CPU, into new tensors."""
        raise NotImplementedError


class CachedKeyValue:
    """What :meth:`KVQLayer.update` hands a model in place of keys and values: the layer, and the new rows, which the
    attention function appends once it knows which of them are padding. Any other use is refused."""

    def __init__(self, layer: KVQLayer, key: Tensor, value: Tensor) -> None:
        self.layer = layer
        self.new: tuple[Tensor, Tensor] | None = (key, value)
        self.rows: list[int] | None = None

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None) -> Tensor:
        """Append the new rows, at the first call, and attend: query [batch, heads_q, tokens, head_dim], the output
        [batch, tokens, heads_q, head_dim], zeros at padding. Layers that share keys and values call it each."""
        layer = self.layer
        if self.new is not None:
            self.rows = layer.own_rows(mask, query.shape[2])
            layer.append(*self.new, self.rows)
            self.new = None
        out = layer.attend(query, self.rows, scale, sinks)
        if layer.offloads:
            layer.settle()
        return out.transpose(1, 2).contiguous()

    def to(self, device: Any, **_: Any) -> CachedKeyValue:
        """Models that share keys and values between layers bring them to where the query is."""
        if torch.device(device) != self.layer.device:
            self.refuse(f".to({device}) of it, from {self.layer.device},")
        return self

    def refuse(self, use: str) -> NoReturn:
        raise ValueError(
            f"KVQCache: the model must hand what update returns to the attention implementation 'kvq' as it is, got "
            f"{use} in model type {self.layer.model_type!r}: call model.set_attn_implementation('kvq') first; a model "
            "that has no such implementations, or looks into keys and values itself, is not supported"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse(f".{name} of it")

    def __getitem__(self, _: Any) -> Any:
        return self.refuse("an index into it")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        for argument in [*args, *(kwargs or {}).values()]:
            if isinstance(argument, cls):
                return argument.refuse(f"{getattr(func, '__name__', func)} of it")
        return NotImplemented


class KVQLayer(_Sequences, CacheLayerMixin):
    """A layer of a transformers cache over a :class:`kvq_ops.QuantizedKVCache`, allocated at the first update (never as
    inference tensors, so that a cache may be filled under ``torch.inference_mode`` and reset or cropped outside).

    ``cache`` holds each sequence's own tokens; ``padding``, int64 [batch], counts what came before them at the left;
    ``seen``, int64 without dimensions, counts positions as transformers does: each sequence's length and padding
    together. It is a tensor of its own, since Inductor may take an aten read of the cache's ``lengths`` to after an
    append that advances them.

    Args:
        max_cache_len: tokens of each sequence.
        format: of the cache.
        model_type: named in refusals.
        offloads: the cache offloads this layer after each update; that waits until attention has run.
        siblings: an object that the layers of one cache share; they see the same positions, so what one of them has
            proved of a mask holds for all.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False

    cache: QuantizedKVCache
    padding: Tensor
    seen: Tensor

    def __init__(
        self,
        max_cache_len: int,
        format: CacheFormat,
        *,
        model_type: str = "unknown",
        offloads: bool = False,
        siblings: object = None,
    ) -> None:
        super().__init__()
        self.max_cache_len, self.format, self.siblings = max_cache_len, format, siblings or object()
        self.model_type, self.offloads, self._waits = model_type, offloads, False

    def __repr__(self) -> str:
        return f"KVQLayer(max_cache_len={self.max_cache_len}, format={self.format.name})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for key_states and value_states [batch, heads_kv, any, head_dim], in their dtype, on their device.

        Raises ``ValueError`` where key and value differ in head_dim, where a size or the dtype is one that no cache
        has, and in compiled code."""
        if torch.compiler.is_compiling():
            raise ValueError(
                "KVQCache: the cache must be allocated before compiled code fills it, got an empty one: let the prompt "
                "go through eager, or call early_initialization"
            )
        if value_states.shape[-1] != key_states.shape[-1]:
            raise ValueError(
                f"KVQCache: value must have head_dim {key_states.shape[-1]} like key, got {value_states.shape[-1]} "
                f"(model type {self.model_type!r})"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads_kv, _, head_dim = key_states.shape
        with torch.inference_mode(False):
            counts = torch.zeros(batch, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
            self._take(self._allocate(batch, heads_kv, head_dim), *counts)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[CachedKeyValue, CachedKeyValue]:
        """Take new rows [batch, heads_kv, tokens, head_dim]; the attention function appends them, in the dtype of the
        first key (under autocast, keys and values come in different ones)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        if self.offloads:
            self._waits = True
        new = CachedKeyValue(self, key_states, value_states)
        return new, new

    def own_rows(self, mask: Tensor | None, tokens: int) -> list[int] | None:
        """How many of the newest positions are each sequence's own tokens; None where all are.

        In compiled code there is no host read: it is asserted that all are and that the mask shows all that is held."""
        if mask is None:
            return None
        if torch.compiler.is_compiling():
            assert_no_padding(mask, self.seen - self.padding, tokens)
            return None
        # Layers of one model share the mask: the first proves it, and again when it comes a second time.
        proved: tuple[object, set[int], list[int]] | None = getattr(mask, "_kvq_proved", None)
        if proved is None or proved[0] is not self.siblings or id(self) in proved[1]:
            proved = self.siblings, set(), new_tokens(mask, self.cache.lengths, int(self.seen), tokens)
            mask._kvq_proved = proved  # type: ignore[attr-defined]  # noqa: SLF001
        proved[1].add(id(self))
        rows = proved[2]
        return None if all(count == tokens for count in rows) else rows

    def append(self, key: Tensor, value: Tensor, rows: list[int] | None) -> None:
        """Append key and value [batch, heads_kv, tokens, head_dim], of sequence b its last ``rows[b]``."""
        tokens = key.shape[2]
        if rows is None:
            self.cache.append(key, value)
            self.seen.add_(tokens)
            return
        for first, last, count in _runs(rows):
            own_key, own_value = (new[first:last, :, tokens - count :] for new in (key, value))
            ops.append(key=own_key, value=own_value, format=self.format.name, **self._sequences(first, last))
        self.padding.add_(tokens - torch.tensor(rows, device=self.padding.device))
        self.seen.add_(tokens)

    def attend(self, query: Tensor, rows: list[int] | None, scale: float | None, sinks: Tensor | None) -> Tensor:
        """Attention of query [batch, heads_q, tokens, head_dim], like it; zeros where a query is padding. ``sinks``
        [heads_q] are logits that take part in the softmax and bring no value."""
        if rows is None:
            if sinks is None:
                return self.cache.attend(query, scale=scale)
            return _with_sinks(*self.cache.attend(query, scale=scale, return_lse=True), sinks)
        out, tokens = torch.zeros_like(query, memory_format=torch.contiguous_format), query.shape[2]
        for first, last, count in _runs(rows):
            own, parts = query[first:last, :, tokens - count :], self._sequences(first, last)
            found, lse = ops.attend(own, format=self.format.name, scale=scale, return_lse=True, **parts)
            out[first:last, :, tokens - count :] = found if sinks is None else _with_sinks(found, lse, sinks)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Positions that a mask covers, and where they start: always the capacity, so that shapes stay as they are."""
        del query_length
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | Tensor:
        """Positions that were seen, padding included: 0, or an int64 tensor without dimensions once allocated."""
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    @property
    def nbytes(self) -> int:
        """Bytes of all parts; 0 before the first update."""
        return self.cache.nbytes + self.padding.nbytes + self.seen.nbytes if self.is_initialized else 0

    def reset(self) -> None:
        """Empty every sequence, in place."""
        if self.is_initialized:
            self.cache.reset()
            self.padding.zero_()
            self.seen.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` positions of every sequence, in place.

        Raises ``ValueError`` for a positive number, and where the format cannot go back so far (see
        :meth:`kvq_ops.QuantizedKVCache.truncate`)."""
        count = crop_count("KVQLayer", tokens_to_remove)
        if not count or not self.is_initialized:
            return
        lengths = self.cache.lengths
        kept = (lengths - count).clamp(min=0)
        self.cache.truncate(kept)
        self.seen.sub_(count).clamp_(min=0)
        self.padding.copy_(self.seen - kept)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence beam_idx[b] was, in place."""
        if self.is_initialized:
            self.cache.reorder(beam_idx)
            self.padding.copy_(self.padding[beam_idx.to(self.padding.device)])

    def offload(self) -> None:
        """Move every part to the CPU; between update and attention that waits until attention has run."""
        if self.is_initialized and not self._waits:
            self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring every part back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    def settle(self) -> None:
        """Attention has run: the offload that waited."""
        self._waits = False
        self.offload()

    def _allocate(self, batch: int, heads_kv: int, head_dim: int) -> QuantizedKVCache:
        return QuantizedKVCache(
            batch, heads_kv, head_dim, self.max_cache_len, format=self.format, dtype=self.dtype, device=self.device
        )

    def _take(self, cache: QuantizedKVCache, padding: Tensor, seen: Tensor) -> None:
        self.cache, self.batch_size, self.num_heads = cache, cache.batch, cache.heads_kv
        self.padding, self.seen = padding.to(self.device), seen.to(self.device)
        if self.device.type == "cuda":
            for counts in (self.padding, self.seen):
                torch._dynamo.mark_static_address(counts, guard=False)  # noqa: SLF001

    def _select(self, index: Tensor) -> None:
        old = self.cache
        with torch.inference_mode(False):
            new = self._allocate(len(index), old.heads_kv, old.head_dim)
            index = index.to(old.lengths.device)
            for name, part in old.named_buffers():
                torch.index_select(part, 0, index, out=getattr(new, name))
            self._take(new, self.padding[index], self.seen)

    def _move(self, device: torch.device) -> None:
        if self.cache.lengths.device != device:
            self.cache.to(device)

    def _sequences(self, first: int, last: int) -> dict[str, Any]:
        """The parts of neighbouring sequences, by name."""
        return {name: part[first:last] for name, part in self.cache.named_buffers()}


class PlainLayer(_Sequences, StaticLayer):
    """transformers' static layer with what it lacks: a layer that stays in full precision, and can all that the
    quantized ones can."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        count = crop_count("PlainLayer", tokens_to_remove)
        if self.is_initialized:
            self.cumulative_length.sub_(count).clamp_(min=0)

    def _select(self, index: Tensor) -> None:
        index = index.to(self.device)
        self.keys: Tensor = self.keys[index]
        self.values: Tensor = self.values[index]
        self.batch_size = len(index)


def _runs(rows: list[int]) -> list[tuple[int, int, int]]:
    """Neighbouring sequences with as many own tokens, as (first, last + 1, count); those with none left out."""
    starts = [b for b in range(len(rows)) if b == 0 or rows[b] != rows[b - 1]]
    return [
        (first, last, rows[first]) for first, last in zip(starts, [*starts[1:], len(rows)], strict=True) if rows[first]
    ]


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention whose softmax has one more logit a head: what the others had, exp(lse), is now exp(lse) + exp(sink)."""
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * share[..., None]).to(out.dtype)
