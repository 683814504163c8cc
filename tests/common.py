"""What tests share: formats with their tolerances, plain caches, attention in float64, comparisons of bits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from data import make
from torch import Tensor

import kvq_ops
from kvq_ops import FORMATS, QuantizedKVCache, get_format, reference

ROOT = Path(__file__).parents[1]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Tolerance:
    """Of a format: relative L2 error of attend against attention over the dequantised cache, by dtype of the query;
    error of lse against unquantised normal data, and against the dequantised cache on logits up to 10; relative L2
    error and cosine of attend on normal data at D = 256."""

    attend: dict[str, float]
    lse: float
    own_lse: float
    published: tuple[float, float] | None = None


_FAST = dict.fromkeys(DTYPES, 8e-3)
# Weights are integers of up to 15 bits against the largest of 64 tokens, sqrt(64) * 2^-16 / sqrt(3) of the output: 1e-4
# where one token dominates its block, half as much again from the query's own 16 bits (one scale a row or, for keys
# coded per channel, a row and block). Codes in groups leave weights 14 bits, and 4-bit offsets are taken by the least
# of a row, three times as far from its values as their mean is.
_BY_VALUE = {"row": 2e-4, "int8_kivi": 2e-4, "int4_kivi": 1e-3}
_BY_VALUE |= dict.fromkeys(["int4_g32", "int4_g64", "int4_hq", "int8_hq"], 5e-4)
# Where keys are in groups, a level times its mantissa takes 12 bits of the int32 in which logits are summed, so that
# queries of head dims from 128 on keep 16 bits less one for each doubling.
_GROUP_KEYS = 5e-4


def _tolerance(name: str) -> Tolerance:
    format = get_format(name)
    exact = _BY_VALUE["row" if not format.value.scheme else format.value.name]
    groups = format.key.coding("key") == "group"
    if groups:
        exact = math.hypot(exact, _GROUP_KEYS)
    # Beside the rounding of the output: 2^-11 / sqrt(3) and 2^-8 / sqrt(3) relative at most.
    attend = {"fp32": exact, "fp16": math.hypot(exact, 3.5e-4), "bf16": math.hypot(exact, 2e-3)}
    return Tolerance(attend, 1e-3 if format.key.bits == 8 else 5e-2, 3e-3 if groups else 1e-3)


FORMAT_NAMES = [*FORMATS, "int8/int4", "int4/int8", "int8_kivi/int4_hq", "int4_hq/int8_kivi", "int8/int4_hq/sinks3"]
FORMAT_NAMES += ["int4_g32/int8_hq", "int4_g64/int4_kivi", "int4_hq/sinks0", "int8_kivi/int4/sinks64"]
CODINGS = ["int8", "int4", "int4_g64", "int4_g32/int4_kivi", "int4/int8_hq/sinks3", "int8_kivi/int4"]
CODINGS += ["int4_kivi/int8_kivi", "int8_hq", "int4_hq"]
"""Each coding of each side once, for what is tried in many ways."""
IN_BLOCKS = [name for name in FORMAT_NAMES if get_format(name).key.key_block]
TOLERANCES = {name: _tolerance(name) for name in (*FORMAT_NAMES, *CODINGS)} | {
    "int8": Tolerance({"fp32": 2e-4, "fp16": 4e-4, "bf16": 2e-3}, 1e-3, 1e-3, (1.0e-2, 0.99995)),
    "int4": Tolerance(_FAST, 5e-2, 1e-3, (1.8e-1, 0.984)),
    "int8/int4": Tolerance(_FAST, 1e-3, 1e-3),
    "int4/int8": Tolerance(_FAST, 5e-2, 1e-3),
}


class Cache(NamedTuple):
    """The parts of a cache, those that ops need before those that some formats have."""

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    lengths: Tensor
    key_zeros: Tensor | None = None
    value_zeros: Tensor | None = None
    key_full: Tensor | None = None
    value_full: Tensor | None = None

    @property
    def needed(self) -> tuple[Tensor, ...]:
        return self[:5]

    @property
    def optional(self) -> tuple[Tensor | None, ...]:
        return self[5:]

    def each(self, function: Callable[[Tensor], Tensor]) -> Cache:
        """A cache of what function makes of each part."""
        return Cache(*(None if part is None else function(part) for part in self))

    def clone(self) -> Cache:
        return self.each(torch.clone)

    def sequence(self, b: int) -> Cache:
        return self.each(lambda part: part[b : b + 1])

    def tensors(self) -> list[Tensor]:
        return [part for part in self if part is not None]

    def named(self) -> dict[str, Tensor]:
        """The parts that there are, lengths apart."""
        return {name: part for name, part in self._asdict().items() if part is not None and name != "lengths"}


def append(cache: Cache, key: Tensor, value: Tensor, name: str, by: Callable[..., None] = kvq_ops.append) -> None:
    by(*cache.needed, key, value, name, *cache.optional)


def attend(query: Tensor, cache: Cache, name: str, scale: float | None = None, **keywords: Any) -> Any:
    return kvq_ops.attend(query, *cache.needed, name, scale, *cache.optional, **keywords)


def judge(query: Tensor, cache: Cache, name: str, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse by the reference."""
    return reference.attend(query, *cache.needed, name, scale, *cache.optional)


def empty(
    name: str, batch: int, heads_kv: int, head_dim: int, max_tokens: int, dtype: torch.dtype = torch.float32
) -> Cache:
    """A cache of length 0 whose unused rows would be noticed: floats NaN, codes no zeros. dtype is that of rows in
    full precision."""
    parts = get_format(name).parts(batch, heads_kv, head_dim, max_tokens, str(dtype).removeprefix("torch."))
    made = {}
    for part_name, part in parts.items():
        kind = getattr(torch, part.dtype)
        made[part_name] = torch.full(part.shape, math.nan if kind.is_floating_point else 85, dtype=kind)
    return Cache(**made, lengths=torch.zeros(batch, dtype=torch.int32))


def filled(name: str, key: Tensor, value: Tensor, lengths: list[int] | None = None, max_tokens: int = 0) -> Cache:
    """A cache by the reference: the first lengths[b] rows of key and value [B, Hkv, tokens, D]."""
    batch, heads_kv, tokens, head_dim = key.shape
    lengths = [tokens] * batch if lengths is None else lengths
    cache = empty(name, batch, heads_kv, head_dim, max(max_tokens, tokens), key.dtype)
    for b, length in enumerate(lengths):
        rows = key[b : b + 1, :, :length], value[b : b + 1, :, :length]
        append(cache.sequence(b), *rows, name, reference.append)
    return cache


def in_full(name: str, side: str, token: int, length: int) -> bool:
    """Whether a row of a sequence of so many tokens is kept as it came."""
    format = get_format(name)
    return token < format.sinks or (side == "key" and token >= format.frozen(length))


def dequantized(cache: Cache, name: str, head_dim: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each sequence as attend reads them."""
    return [
        reference.dequantize_cache(name, {part: x[b] for part, x in cache.named().items()}, head_dim, length)
        for b, length in enumerate(cache.lengths.tolist())
    ]


def attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int] | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Float64 attention by a mask: query [B, Hq, T, D], the T newest tokens of the lengths[b] rows of key and value
    [B, Hkv, tokens, D]. Returns out and lse."""
    batch, heads_q, tokens, head_dim = query.shape
    rows = key.shape[2]
    group = heads_q // key.shape[1]
    held = torch.tensor([rows] * batch if lengths is None else lengths)
    last = held[:, None] - tokens + torch.arange(tokens)  # [B, T], the newest row that a query token sees
    hidden = torch.arange(rows) > last[:, :, None]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    logits = query.double() @ key.transpose(-1, -2) * (1 / math.sqrt(head_dim) if scale is None else scale)
    logits = logits.masked_fill(hidden[:, None], -math.inf)
    out = logits.softmax(-1).nan_to_num(0.0) @ value
    return out, logits.logsumexp(-1)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and 0 differs from -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def same_bits(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))


def assert_same_bits(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    names = got._fields if isinstance(got, Cache) else range(len(got))
    differ = [name for name, a, b in zip(names, got, want, strict=True) if not same_bits(a, b)]
    assert differ == []


def run_python(source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another process that runs source, with tests/ importable and nothing of this run's pytest about it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env=inherited | environment,
    )


KNOWN_FORMATS = "must be one of int4, int4_g32, int4_g64, int4_hq, int4_kivi, int8, int8_hq, int8_kivi, k8v4"
KNOWN_FORMATS += " or <key>/<value> of them"
"""What every refusal of a format's name says."""

# The module QuantizedKVCache: three sequences of these lengths, and longer ones: behind a round of the ring, with a
# block of 64 and one of 32 tokens just full, of sinks alone.
RAGGED = [9, 4, 0]
LONG = [197, 68, 3]
LONG_TOKENS = 200


def parts(cache: QuantizedKVCache) -> Cache:
    return Cache(*(getattr(cache, name) for name in Cache._fields))


def used_slots(name: str, part: str, length: int) -> list[int]:
    """Rows of key_full or value_full that hold something of a sequence of so many tokens: sinks, and the newest two
    blocks of keys that are coded per channel."""
    format = get_format(name)
    rows = list(range(min(length, format.sinks)))
    ring = 2 * format.key.key_block
    if part == "key_full" and ring:
        newest = range(max(format.sinks, length - ring), length)
        rows += sorted(format.sinks + (token - format.sinks) % ring for token in newest)
    return rows


def by_rows(cache: Cache, name: str) -> dict[str, Tensor]:
    """The parts, each with its tokens, blocks or slots in the third dimension."""
    axes = {part_name: part.axis for part_name, part in get_format(name).parts(1, 1, 64, 1).items()}
    return {part_name: part.movedim(axes[part_name], 2) for part_name, part in cache.named().items()}


def in_use(cache: QuantizedKVCache | Cache, name: str | None = None) -> list[Tensor]:
    """Everything that the cache holds, sequence by sequence, and its lengths."""
    if isinstance(cache, QuantizedKVCache):
        name, cache = cache.format.name, parts(cache)
    assert name is not None
    format, rows = get_format(name), []
    for b, length in enumerate(cache.lengths.tolist()):
        coded = {"key": format.frozen(length), "value": length}
        for part_name, part in by_rows(cache, name).items():
            side, _, kind = part_name.partition("_")
            if kind == "full":
                rows.append(part[b, :, used_slots(name, part_name, length)])
            elif kind != "codes" and side == "key" and format.key.key_block:
                rows.append(part[b, :, : max(0, length - format.sinks) // format.key.key_block])
            else:
                rows.append(part[b, :, format.sinks : max(format.sinks, coded[side])])
    return [*rows, cache.lengths]


def ragged(name: str = "int8", lengths: list[int] | None = None, max_tokens: int = 12, head_dim: int = 10):
    """A cache of three sequences of three heads; what lies past their lengths is noise."""
    lengths = RAGGED if lengths is None else lengths
    cache = QuantizedKVCache(3, 3, head_dim, max_tokens, format=name, dtype=torch.float32)
    _, key, value = make("normal", 3, 3, 3, head_dim, max(9, *lengths))
    for part, rows in zip(parts(cache), filled(name, key, value, lengths, max_tokens), strict=True):
        if part is not None:
            part.copy_(rows)
    return cache
