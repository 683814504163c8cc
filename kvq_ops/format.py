"""What a quantized cache looks like in memory: every shape, dtype and byte count derives from here.

A :class:`CacheFormat` names how keys and how values are coded, each by a :class:`SideFormat`, and how many of the first
tokens (attention sinks) stay as they came. Presets carry a name (``int8``, ``int4_hq``, ``k8v4``); any key side goes
with any value side, written ``<key>/<value>`` (``int8/int4``), with ``/sinks<n>`` where their number is not the usual.
``docs/formats.md`` draws the bytes and says when to choose which.

Codings, for tokens after the sinks:

- ``row``: a row, one token of one head, has one fp32 scale, absmax / limit (kv-quant-attn, cpu-attn).
- ``group``: a row in groups of 32 or 64 channels whose scales are 4-bit multiples of one power of two. Token is the
  last dimension of these scales, so that a vector load yields those of neighbouring tokens.
- ``channel``: a block of tokens freezes when it is full, each channel of it with an offset and a scale (KIVI, tract).
- ``token``: a row has one fp32 offset and one fp32 scale (KIVI, tract).

Byte order of 4-bit codes. A row is cut into blocks of 64 codes, 32 bytes each; the low nibble of byte ``i`` of a
block holds code ``i``, its high nibble code ``32 + i``. What is left over (``r = head_dim % 64`` codes, ``r / 2``
bytes) is split the same way: low nibble ``i``, high nibble ``r / 2 + i``. A nibble stores ``code + 8``. So a vector
load of whole bytes yields two runs of neighbouring channels, and groups of 32 or 64 channels stay whole.

This module uses the standard library only: build scripts and documentation read it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

__all__ = [
    "FORMATS",
    "LEVELS",
    "MAX_HEAD_DIM",
    "MAX_SINKS",
    "MAX_TOKENS",
    "MIN_HEAD_DIM",
    "NIBBLE_BLOCK",
    "SCHEMA_VERSION",
    "SCHEMES",
    "CacheFormat",
    "Part",
    "SideFormat",
    "get_format",
]

SCHEMA_VERSION = 1
"""Of the ops' schemas and of the bytes: rises with every change of either, and travels in compiled models."""
MIN_HEAD_DIM = 8
MAX_HEAD_DIM = 1024
MAX_TOKENS = 2**31 - 1
"""Of one sequence: lengths are int32."""
MAX_SINKS = 64
SINKS = 4
"""Of formats whose keys are coded per channel, unless said otherwise."""
NIBBLE_BLOCK = 64
"""Codes in one block of the 4-bit byte order."""
LEVELS = (-127, -99, -78, -60, -45, -31, -18, -6, 6, 18, 31, 45, 60, 78, 99, 127)
"""What the 4-bit codes -8..7 of coding ``group`` stand for. Closer together in the middle, where the values of a group
of N(0, 1) are: 8 % less error than sixteen equal steps."""
LENGTH_BYTES = 4
"""int32, one a sequence."""

_ITEM_BYTES = {"int8": 1, "uint8": 1, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Scheme:
    """How both sides are coded: ``key_block`` tokens freeze together (0: ``key`` is coded row by row)."""

    key: str
    value: str
    key_block: int = 0
    group: int = 0
    rotated: bool = False


SCHEMES = {
    "": Scheme(key="row", value="row"),
    "g32": Scheme(key="group", value="group", group=32),
    "g64": Scheme(key="group", value="group", group=64),
    "kivi": Scheme(key="channel", value="token", key_block=32),
    "hq": Scheme(key="channel", value="group", key_block=64, group=32, rotated=True),
}
"""By the suffix of a side's name. ``rotated``: the values of ``hq`` go through a Hadamard transform first."""


@dataclass(frozen=True)
class Part:
    """One tensor of a cache: its shape, the name of its torch dtype, and what dimension ``axis`` counts: ``token``,
    ``block`` (of tokens that freeze together) or ``slot`` (rows in full precision)."""

    shape: tuple[int, ...]
    dtype: str
    rows: str = "token"
    axis: int = 2

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class SideFormat:
    """How one side of the cache, keys or values, is coded: ``bits`` a code, by one of ``SCHEMES``."""

    bits: int
    scheme: str = ""

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise ValueError(f"SideFormat: bits must be 4 or 8, got {self.bits!r}")
        if self.scheme not in SCHEMES:
            known = ", ".join(repr(scheme) for scheme in SCHEMES)
            raise ValueError(f"SideFormat: scheme must be one of {known}, got {self.scheme!r}")
        if self.scheme in ("g32", "g64") and self.bits != 4:
            raise ValueError(f"SideFormat: bits must be 4 with scheme {self.scheme!r}, got {self.bits}")

    @property
    def name(self) -> str:
        return f"int{self.bits}" + (f"_{self.scheme}" if self.scheme else "")

    @property
    def limit(self) -> int:
        """Largest code of coding ``row``: codes lie in ``-limit..limit``. The others use all codes from
        ``-limit - 1`` on."""
        return (1 << (self.bits - 1)) - 1

    @property
    def codes_dtype(self) -> str:
        return "int8" if self.bits == 8 else "uint8"

    def coding(self, side: str) -> str:
        """``row``, ``group``, ``channel`` or ``token``, for ``side`` ``key`` or ``value``."""
        scheme = SCHEMES[self.scheme]
        return scheme.key if side == "key" else scheme.value

    @property
    def key_block(self) -> int:
        """Tokens whose keys freeze together, 0 where each row is coded by itself."""
        return SCHEMES[self.scheme].key_block

    @property
    def group(self) -> int:
        """Channels that share a scale, where the coding is ``group``."""
        return SCHEMES[self.scheme].group

    def rotated(self, side: str) -> bool:
        """Whether rows are coded after a Hadamard transform."""
        return side == "value" and SCHEMES[self.scheme].rotated

    @property
    def key_scales_dtype(self) -> str:
        """Of coding ``channel``."""
        return "bfloat16" if self.scheme == "hq" else "float32"

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one token of one head."""
        return head_dim * self.bits // 8

    def groups(self, head_dim: int) -> list[tuple[int, int]]:
        """Where each group of a row starts and ends. A block of 64 codes is two groups of 32, or one of 64; of what
        is left over, ``r`` codes, 4-bit groups of 32 are the halves that share bytes, and 8-bit ones the first 32 and
        the rest."""
        found = []
        for start in range(0, head_dim, NIBBLE_BLOCK):
            size = min(NIBBLE_BLOCK, head_dim - start)
            middle = size if self.group == NIBBLE_BLOCK else size // 2 if self.bits == 4 else min(size, 32)
            found += [(start, start + middle), (start + middle, start + size)]
        return [(start, end) for start, end in found if start < end]

    def parts(
        self, side: str, batch: int, heads_kv: int, head_dim: int, max_tokens: int, sinks: int
    ) -> dict[str, Part]:
        """The tensors of this side by suffix: ``codes``, ``scales`` and perhaps ``zeros``."""
        rows = (batch, heads_kv, max_tokens)
        found = {"codes": Part((*rows, self.row_bytes(head_dim)), self.codes_dtype)}
        coding = self.coding(side)
        if coding == "channel":
            blocks = (batch, heads_kv, max(1, (max_tokens - sinks) // self.key_block), head_dim)
            found["scales"] = Part(blocks, self.key_scales_dtype, "block")
            found["zeros"] = Part(blocks, "float32", "block")
        elif coding == "group":
            planes = 1 + ceil(len(self.groups(head_dim)) / 2)
            found["scales"] = Part((batch, heads_kv, planes, max_tokens), "uint8", axis=3)
        else:
            found["scales"] = Part(rows, "float32")
            if coding == "token":
                found["zeros"] = Part(rows, "float32")
        return found


_SIDES = {
    side.name: side
    for side in (SideFormat(bits, scheme) for scheme in SCHEMES for bits in (4, 8) if bits == 4 or scheme[:1] != "g")
}


@dataclass(frozen=True)
class CacheFormat:
    """How a cache is coded: ``key`` and ``value``, each a :class:`SideFormat` or its name; the first ``sinks`` tokens
    stay in full precision (None: 4 where keys are coded per channel, else 0)."""

    key: SideFormat
    value: SideFormat
    sinks: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for side in ("key", "value"):
            given = getattr(self, side)
            coding = _SIDES.get(given) if isinstance(given, str) else given
            if not isinstance(coding, SideFormat):
                known = " or ".join(sorted(_SIDES))
                raise ValueError(f"CacheFormat: {side} must be a SideFormat or {known}, got {given!r}")
            object.__setattr__(self, side, coding)
        if self.sinks is None:
            object.__setattr__(self, "sinks", self._usual_sinks)
        if type(self.sinks) is not int or not 0 <= self.sinks <= MAX_SINKS:
            raise ValueError(f"CacheFormat: sinks must be from 0 to {MAX_SINKS}, got {self.sinks!r}")

    @property
    def _usual_sinks(self) -> int:
        return SINKS if self.key.key_block else 0

    @property
    def name(self) -> str:
        """The string that ops take: a preset's name, else one word where both sides are alike, else
        ``<key>/<value>``; ``/sinks<n>`` after it where their number is not the usual."""
        plain = CacheFormat(self.key, self.value)
        name = next((name for name, preset in FORMATS.items() if preset == plain), "")
        name = name or (self.key.name if self.key == self.value else f"{self.key.name}/{self.value.name}")
        return name if self.sinks == plain.sinks else f"{name}/sinks{self.sinks}"

    @property
    def key_slots(self) -> int:
        """Rows of ``key_full``: the sinks, and a ring of the newest two blocks where keys are coded per channel: the
        block that is being filled, and the one before, so that it can be cut back."""
        return self.sinks + 2 * self.key.key_block

    def parts(
        self, batch: int, heads_kv: int, head_dim: int, max_tokens: int, dtype: str = "bfloat16"
    ) -> dict[str, Part]:
        """Every tensor of one layer's cache but ``lengths``, in the order of the ops' arguments: ``key_codes``
        [batch, heads_kv, max_tokens, row bytes], ``key_scales``, the same of ``value``, then those of ``key_zeros``,
        ``value_zeros``, ``key_full``, ``value_full`` that the format has. ``dtype`` is that of the last two."""
        sizes = (batch, heads_kv, head_dim, max_tokens, self.sinks)
        found = {
            f"{side}_{suffix}": part
            for side in ("key", "value")
            for suffix, part in getattr(self, side).parts(side, *sizes).items()
        }
        for side, slots in (("key", self.key_slots), ("value", self.sinks)):
            if slots:
                found[f"{side}_full"] = Part((batch, heads_kv, slots, head_dim), dtype, "slot")
        order = ["key_codes", "key_scales", "value_codes", "value_scales"]
        order += ["key_zeros", "value_zeros", "key_full", "value_full"]
        return {name: found[name] for name in order if name in found}

    def frozen(self, length: int) -> int:
        """Of a sequence of ``length`` tokens, the first token whose key is not coded yet."""
        block = self.key.key_block
        if not block or length <= self.sinks:
            return length
        return self.sinks + (length - self.sinks) // block * block

    def rows_in_use(self, part: Part, length: int) -> int:
        """How much of dimension ``part.axis`` a sequence of ``length`` tokens fills."""
        if part.rows == "block":
            return max(0, length - self.sinks) // self.key.key_block
        return length if part.rows == "token" else part.shape[part.axis]

    def bits_per_value(self, head_dim: int) -> float:
        """Of a coded token, everything that describes it included; sinks and rows in full precision apart."""
        return 8 * self._token_bytes(head_dim) / (2 * head_dim)

    def _token_bytes(self, head_dim: int) -> float:
        per = {"token": 1, "block": max(1, self.key.key_block)}
        parts = self.parts(1, 1, head_dim, self.sinks + max(1, self.key.key_block))
        return sum(part.nbytes / part.shape[part.axis] / per[part.rows] for part in parts.values() if part.rows in per)

    def bytes_per_token(self, heads_kv: int, head_dim: int) -> int:
        """Bytes that one more token costs in the long run: one sequence, one layer, keys and values with all that
        describes them."""
        return ceil(heads_kv * self._token_bytes(head_dim))

    def bytes_needed(self, batch: int, heads_kv: int, head_dim: int, max_tokens: int, dtype: str = "bfloat16") -> int:
        """Bytes of one layer's cache, ``lengths`` included: what :class:`QuantizedKVCache` allocates. ``dtype`` is
        that of the rows in full precision, where the format has them."""
        parts = self.parts(batch, heads_kv, head_dim, max_tokens, dtype)
        return sum(part.nbytes for part in parts.values()) + batch * LENGTH_BYTES


FORMATS: dict[str, CacheFormat] = {}
"""The presets by name."""
FORMATS |= {name: CacheFormat(side, side) for name, side in _SIDES.items()}
FORMATS["k8v4"] = CacheFormat(_SIDES["int8"], _SIDES["int4_hq"])


def get_format(name: str | CacheFormat) -> CacheFormat:
    """The format called ``name`` (a preset or ``<key>/<value>``, perhaps with ``/sinks<n>``); a :class:`CacheFormat`
    passes through.

    Raises ``ValueError`` for a name that is none."""
    if isinstance(name, CacheFormat):
        return name
    if isinstance(name, str):
        words, sinks = name.split("/"), None
        if len(words) > 1 and words[-1].startswith("sinks"):
            digits = words.pop()[len("sinks") :]
            sinks = int(digits) if digits in map(str, range(MAX_SINKS + 1)) else -1
        preset = FORMATS.get(words[0]) if len(words) == 1 else None
        if preset is None and len(words) == 2 and all(word in _SIDES for word in words):
            preset = CacheFormat(_SIDES[words[0]], _SIDES[words[1]])
        if preset is not None and (sinks is None or 0 <= sinks <= MAX_SINKS):
            return preset if sinks is None else CacheFormat(preset.key, preset.value, sinks)
    known, got = ", ".join(sorted(FORMATS)), f"'{name}'" if isinstance(name, str) else repr(name)
    raise ValueError(f"format must be one of {known} or <key>/<value> of them, got {got}")
