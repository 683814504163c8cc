"""Caches over several devices: heads by rank (tensor parallel), or tokens by rank (context parallel).

Importing this module registers how DTensor shards ``kvq::append``, ``kvq::attend`` and ``kvq::attend_lse``; nothing
else of kvq_ops imports ``torch.distributed``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ParallelStyle

from .._ops import ops
from ..cache import QuantizedKVCache
from ..format import CacheFormat

__all__ = ["HeadParallel", "TokenParallelCache", "local_heads", "merge_attention"]

_HEADS = Shard(1)
_SEQUENCES = Shard(0)


def local_heads(heads_kv: int, ranks: int) -> int:
    """KV heads of each rank. Raises ``ValueError`` where they do not divide: a head is never split, and query heads
    would meet the wrong ones."""
    if heads_kv % ranks:
        raise ValueError(f"heads_kv must be a multiple of the ranks, got {heads_kv} heads over {ranks} ranks")
    return heads_kv // ranks


# ------------------------------------------------------------------------------------------------------ tensor parallel


class HeadParallel(ParallelStyle):
    """For ``parallelize_module``: a :class:`QuantizedKVCache` keeps the KV heads of its rank alone and is emptied.

    Goes with ``ColwiseParallel`` query, key and value projections, whose outputs are local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantizedKVCache):
            raise ValueError(f"HeadParallel: module must be a QuantizedKVCache, got {type(module).__name__}")
        heads_kv = local_heads(module.heads_kv, device_mesh.size())
        sizes = (module.batch, heads_kv, module.head_dim, module.max_tokens)
        QuantizedKVCache.__init__(  # in place: parallelize_module keeps the module
            module, *sizes, format=module.format, dtype=module.dtype, device=module.lengths.device
        )
        return module


def _placement(op: str, parts: dict[str, Any]) -> Placement:
    """Where the cache lies. It is never moved: an append into a copy would be lost, and a copy costs all of it."""
    key_codes = parts["key_codes"]
    if len(key_codes.placements) != 1:
        raise RuntimeError(f"{op}: key_codes must lie on a mesh of one dimension, got {len(key_codes.placements)}")
    placement: Placement = key_codes.placements[0]
    if placement not in (_HEADS, _SEQUENCES, Replicate()):
        raise RuntimeError(f"{op}: key_codes must be sharded over sequences or heads or replicated, got {placement}")
    for name, spec in parts.items():
        expected = Replicate() if name == "lengths" and placement == _HEADS else placement
        if spec.placements[0] != expected:
            raise RuntimeError(
                f"{op}: {name} must be {expected} where key_codes is {placement}, got {spec.placements[0]}"
            )
    if placement == _HEADS:
        local_heads(key_codes.shape[1], key_codes.mesh.size())
    return placement


def _rule(op: Any) -> None:
    arguments = op._schema.arguments  # noqa: SLF001 the only way to the names
    rows = ("query", "key", "value")

    def rule(*given: Any) -> list[tuple[list[Placement | None], list[Placement | None]]]:
        tensors = {
            argument.name: spec
            for argument, spec in zip(arguments, given, strict=False)
            if "Tensor" in str(argument.type) and spec is not None
        }
        placement = _placement(op.name(), {name: spec for name, spec in tensors.items() if name not in rows})
        inputs = [
            None
            if argument.name not in tensors
            else Replicate()
            if argument.name == "lengths" and placement == _HEADS
            else placement
            for argument, _ in zip(arguments, given, strict=False)
        ]
        return [([placement] * len(op._schema.returns), inputs)]  # noqa: SLF001

    register_sharding(op)(rule)


for _op in (ops.append.default, ops.attend.default, ops.attend_lse.default):
    _rule(_op)


# ----------------------------------------------------------------------------------------------------- context parallel


def merge_attention(out: Tensor, lse: Tensor, group: ProcessGroup) -> Tensor:
    """Attention over what all ranks hold, from each rank's ``attend(..., return_lse=True)``: fp32 sums, in out's dtype.

    Two all-reduces of functional collectives, so that a compiled graph keeps them: the largest lse, then the weighted
    outputs with their weights. A rank that holds nothing (lse -inf) adds nothing; where all do, the output is zero."""
    largest = funcol.all_reduce(lse, "max", group)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - largest)).unsqueeze(-1)
    both = funcol.all_reduce(torch.cat([out.float() * weight, weight], dim=-1), "sum", group)
    total = both[..., -1:]
    merged: Tensor = both[..., :-1] / torch.where(total == 0, 1.0, total)
    return merged.to(out.dtype)


class TokenParallelCache(nn.Module):
    """One layer's cache with its tokens dealt to the ranks of a group, ``stripe`` neighbouring ones at a time; for
    decoding, one token a step.

    Every rank is given every key, value and query. Whose turn it is follows from ``positions``, int32 [batch], the
    tokens of each sequence on all ranks together, on the device: one graph serves all ranks and steps. A rank whose
    turn it is not writes the row as well and takes back the length, so the next row goes over it; hence one row more
    than its share. Beside append and attend, :meth:`reset`; what ``cache`` holds is this rank's share.

    Args:
        max_tokens: capacity of each sequence on all ranks together.
        group: the ranks.
        stripe: tokens that stay together; the rest are :class:`QuantizedKVCache`'s.
    """

    positions: Tensor

    def __init__(
        self,
        batch: int,
        heads_kv: int,
        head_dim: int,
        max_tokens: int,
        *,
        group: ProcessGroup,
        stripe: int = 64,
        format: str | CacheFormat = "int8",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(stripe, bool) or not isinstance(stripe, int) or stripe < 1:
            raise ValueError(f"TokenParallelCache: stripe must be a positive int, got {stripe!r}")
        self.group, self.rank, self.ranks, self.stripe = group, group.rank(), group.size(), stripe
        share = -(-max_tokens // (stripe * self.ranks)) * stripe
        self.cache = QuantizedKVCache(
            batch, heads_kv, head_dim, min(share, max_tokens) + 1, format=format, dtype=dtype, device=device
        )
        self.register_buffer("positions", torch.zeros(batch, dtype=torch.int32, device=device), persistent=False)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write one row [batch, heads_kv, head_dim] or [batch, heads_kv, 1, head_dim], on the rank whose turn it is."""
        if key.dim() == 4 and key.shape[2] != 1:
            raise ValueError(f"TokenParallelCache.append: key must have 1 token, got {key.shape[2]}")
        turn = self.positions // self.stripe % self.ranks
        self.cache.append(key, value)
        self.cache.lengths.sub_((turn != self.rank).to(torch.int32))
        self.positions.add_(1)

    def attend(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention of one query token, [batch, heads_q, head_dim] or [batch, heads_q, 1, head_dim], over what all
        ranks hold: the same on each."""
        if query.dim() == 4 and query.shape[2] != 1:
            raise ValueError(f"TokenParallelCache.attend: query must have 1 token, got {query.shape[2]}")
        out, lse = self.cache.attend(query, scale=scale, return_lse=True)
        return merge_attention(out, lse, self.group)

    def reset(self) -> None:
        """Empty every sequence, in place; on every rank."""
        self.positions.zero_()
        self.cache.reset()
