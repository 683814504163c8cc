"""What a quantized cache looks like in memory: every shape, dtype and byte count derives from here.

A :class:`CacheFormat` names how keys and how values are coded, each by a :class:`SideFormat`. Presets carry a
name (``int8``, ``int4``); any key side goes with any value side, written ``<key>/<value>`` (``int8/int4``).

Row formats (kv-quant-attn, cpu-attn): one token of one head is one row of ``head_dim`` codes with one fp32 scale,
``absmax / limit``; a code is ``round(x / scale)``, ties to even, clamped to ``-limit..limit`` (127 or 7).

Byte order of 4-bit codes. A row is cut into blocks of 64 codes, 32 bytes each; the low nibble of byte ``i`` of a
block holds code ``i``, its high nibble code ``32 + i``. What is left over (``r = head_dim % 64`` codes, ``r / 2``
bytes) is split the same way: low nibble ``i``, high nibble ``r / 2 + i``. A nibble stores ``code + 8``. So a vector
load of whole bytes yields two runs of neighbouring channels, and groups of 32 or 64 channels stay whole.

This module uses the standard library only: build scripts and documentation read it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = [
    "FORMATS",
    "MAX_HEAD_DIM",
    "MAX_TOKENS",
    "MIN_HEAD_DIM",
    "NIBBLE_BLOCK",
    "CacheFormat",
    "Part",
    "SideFormat",
    "get_format",
]

MIN_HEAD_DIM = 8
MAX_HEAD_DIM = 1024
MAX_TOKENS = 2**31 - 1
"""Of one sequence: lengths are int32."""
NIBBLE_BLOCK = 64
"""Codes in one block of the 4-bit byte order."""
LENGTH_BYTES = 4
"""int32, one a sequence."""

_ITEM_BYTES = {"int8": 1, "uint8": 1, "float32": 4, "int32": 4}


@dataclass(frozen=True)
class Part:
    """One tensor of a cache: its shape and the name of its torch dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class SideFormat:
    """How one side of the cache, keys or values, is coded: ``bits`` a code, one scale a row."""

    bits: int

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise ValueError(f"SideFormat: bits must be 4 or 8, got {self.bits!r}")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def limit(self) -> int:
        """Largest code: codes lie in ``-limit..limit``."""
        return (1 << (self.bits - 1)) - 1

    @property
    def codes_dtype(self) -> str:
        return "int8" if self.bits == 8 else "uint8"

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one token of one head."""
        return head_dim * self.bits // 8

    def parts(self, batch: int, heads_kv: int, head_dim: int, max_tokens: int) -> dict[str, Part]:
        """The tensors of this side by suffix: ``codes`` and ``scales``."""
        rows = (batch, heads_kv, max_tokens)
        return {
            "codes": Part((*rows, self.row_bytes(head_dim)), self.codes_dtype),
            "scales": Part(rows, "float32"),
        }


_SIDES = {side.name: side for side in (SideFormat(4), SideFormat(8))}


@dataclass(frozen=True)
class CacheFormat:
    """How a cache is coded: ``key`` and ``value``, each a :class:`SideFormat` or its name."""

    key: SideFormat
    value: SideFormat

    def __post_init__(self) -> None:
        for side in ("key", "value"):
            given = getattr(self, side)
            coding = _SIDES.get(given) if isinstance(given, str) else given
            if not isinstance(coding, SideFormat):
                known = " or ".join(sorted(_SIDES))
                raise ValueError(f"CacheFormat: {side} must be a SideFormat or {known}, got {given!r}")
            object.__setattr__(self, side, coding)

    @property
    def name(self) -> str:
        """The string that ops take: one word where both sides are alike, else ``<key>/<value>``."""
        return self.key.name if self.key == self.value else f"{self.key.name}/{self.value.name}"

    def parts(self, batch: int, heads_kv: int, head_dim: int, max_tokens: int) -> dict[str, Part]:
        """Every tensor of one layer's cache but ``lengths``: ``key_codes`` [batch, heads_kv, max_tokens, row bytes],
        ``key_scales`` [batch, heads_kv, max_tokens], and the same of ``value``."""
        sides = {"key": self.key, "value": self.value}
        return {
            f"{side}_{suffix}": part
            for side, coding in sides.items()
            for suffix, part in coding.parts(batch, heads_kv, head_dim, max_tokens).items()
        }

    def bytes_per_token(self, heads_kv: int, head_dim: int) -> int:
        """Bytes that one more token costs: one sequence, one layer, keys and values with their scales."""
        return sum(part.nbytes for part in self.parts(1, heads_kv, head_dim, 1).values())

    def bytes_needed(self, batch: int, heads_kv: int, head_dim: int, max_tokens: int) -> int:
        """Bytes of one layer's cache, ``lengths`` included: what :class:`QuantizedKVCache` allocates."""
        parts = self.parts(batch, heads_kv, head_dim, max_tokens)
        return sum(part.nbytes for part in parts.values()) + batch * LENGTH_BYTES


FORMATS = {name: CacheFormat(side, side) for name, side in _SIDES.items()}
"""The presets by name."""


def get_format(name: str | CacheFormat) -> CacheFormat:
    """The format called ``name`` (a preset or ``<key>/<value>``); a :class:`CacheFormat` passes through.

    Raises ``ValueError`` for a name that is none."""
    if isinstance(name, CacheFormat):
        return name
    key, slash, value = name.partition("/") if isinstance(name, str) else ("", "", "")
    if key in _SIDES and (value in _SIDES if slash else True):
        return CacheFormat(_SIDES[key], _SIDES[value if slash else key])
    known, got = ", ".join(sorted(FORMATS)), f"'{name}'" if isinstance(name, str) else repr(name)
    raise ValueError(f"format must be one of {known} or <key>/<value> of them, got {got}")
