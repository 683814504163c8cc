"""What a rewrite did, attention by attention, in numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from ..table import table

__all__ = ["AttentionReport", "RewriteReport"]


@dataclass(frozen=True)
class AttentionReport:
    """One ``scaled_dot_product_attention`` of the program. What could not be told of a skipped one is "", () or 0.

    ``node`` and ``module`` say where it stands in the graph and in the model; ``reason`` is why it was skipped.
    ``caches`` are the plain buffers that it reads, key first, and ``parts`` the buffers that took their place.
    Per-token figures are of one sequence: ``values_per_token`` counts the cached numbers, keys and values, and
    ``bytes_per_token_before`` and ``_after`` what they take. A skipped attention costs after what it cost before.
    """

    node: str
    module: str
    reason: str = ""
    caches: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    batch: int = 0
    heads_q: int = 0
    heads_kv: int = 0
    head_dim: int = 0
    max_tokens: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    values_per_token: int = 0
    bytes_per_token_before: int = 0
    bytes_per_token_after: int = 0

    @property
    def rewritten(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class RewriteReport:
    """Every attention of a program in the graph's order, and the sums over them. ``str()`` makes a table."""

    format: str
    attentions: tuple[AttentionReport, ...]

    @property
    def rewritten(self) -> tuple[AttentionReport, ...]:
        return tuple(attention for attention in self.attentions if attention.rewritten)

    @property
    def skipped(self) -> tuple[AttentionReport, ...]:
        return tuple(attention for attention in self.attentions if not attention.rewritten)

    @property
    def bytes_before(self) -> int:
        return sum(attention.bytes_before for attention in self.attentions)

    @property
    def bytes_after(self) -> int:
        return sum(attention.bytes_after for attention in self.attentions)

    @property
    def values_per_token(self) -> int:
        return sum(attention.values_per_token for attention in self.attentions)

    @property
    def bytes_per_token_before(self) -> int:
        return sum(attention.bytes_per_token_before for attention in self.attentions)

    @property
    def bytes_per_token_after(self) -> int:
        return sum(attention.bytes_per_token_after for attention in self.attentions)

    def __str__(self) -> str:
        header = ["attention", "caches", "heads", "head_dim", "max_tokens", "bytes", "bytes a token", "outcome"]
        rows = [_row(attention, self.format) for attention in self.attentions]
        total = _change(self.bytes_before, self.bytes_after)
        per_token = _change(self.bytes_per_token_before, self.bytes_per_token_after)
        outcome = f"{len(self.rewritten)} of {len(self.attentions)} rewritten"
        rows.append(["all", "", "", "", "", total, per_token, outcome])
        return table(header, rows)


def _change(before: int, after: int) -> str:
    return f"{before:,} -> {after:,}"


def _row(attention: AttentionReport, format: str) -> list[str]:
    heads = f"{attention.heads_q}/{attention.heads_kv}" if attention.heads_q else ""
    return [
        attention.module or attention.node,
        ", ".join(attention.caches),
        heads,
        str(attention.head_dim or ""),
        str(attention.max_tokens or ""),
        _change(attention.bytes_before, attention.bytes_after),
        _change(attention.bytes_per_token_before, attention.bytes_per_token_after),
        f"skipped: {attention.reason}" if attention.reason else format,
    ]
