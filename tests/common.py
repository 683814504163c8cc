"""What tests share: formats with their tolerances, plain caches, attention in float64, comparisons of bits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from data import make
from torch import Tensor

from kvq_ops import FORMATS, QuantizedKVCache, get_format, reference

ROOT = Path(__file__).parents[1]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Tolerance:
    """Of a format: relative L2 error of attend against attention over the dequantised cache, by dtype of the query;
    error of lse against unquantised data; relative L2 error and cosine of attend on normal data at D = 256."""

    attend: dict[str, float]
    lse: float
    published: tuple[float, float] | None = None


_EXACT = {"fp32": 2e-4, "fp16": 4e-4, "bf16": 2e-3}
_FAST = dict.fromkeys(DTYPES, 8e-3)
TOLERANCES = {
    "int8": Tolerance(_EXACT, 1e-3, (1.0e-2, 0.99995)),
    "int4": Tolerance(_FAST, 5e-2, (1.8e-1, 0.984)),
    "int8/int4": Tolerance(_FAST, 1e-3),
    "int4/int8": Tolerance(_FAST, 5e-2),
}
FORMAT_NAMES = [*FORMATS, "int8/int4", "int4/int8"]


class Cache(NamedTuple):
    """The parts of a cache in the order that ops take them."""

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    lengths: Tensor

    def clone(self) -> Cache:
        return Cache(*(part.clone() for part in self))


def empty(name: str, batch: int, heads_kv: int, head_dim: int, max_tokens: int) -> Cache:
    """A cache of length 0 whose unused rows would be noticed: scales NaN, codes no zeros."""
    parts = get_format(name).parts(batch, heads_kv, head_dim, max_tokens)
    rows = [
        torch.full(part.shape, math.nan if part.dtype == "float32" else 85, dtype=getattr(torch, part.dtype))
        for part in parts.values()
    ]
    return Cache(*rows, torch.zeros(batch, dtype=torch.int32))


def filled(name: str, key: Tensor, value: Tensor, lengths: list[int] | None = None, max_tokens: int = 0) -> Cache:
    """A cache by the reference: the first lengths[b] rows of key and value [B, Hkv, tokens, D]."""
    batch, heads_kv, tokens, head_dim = key.shape
    lengths = [tokens] * batch if lengths is None else lengths
    cache = empty(name, batch, heads_kv, head_dim, max(max_tokens, tokens))
    for b, length in enumerate(lengths):
        sequence = Cache(*(part[b : b + 1] for part in cache))
        reference.append(*sequence, key[b : b + 1, :, :length], value[b : b + 1, :, :length], name)
    return cache


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


def same_bits(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))


def assert_same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    differ = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not same_bits(a, b)]
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
        timeout=300,
        env=inherited | environment,
    )


# The module QuantizedKVCache: three sequences of these lengths.
RAGGED = [9, 4, 0]


def parts(cache: QuantizedKVCache) -> tuple[Tensor, ...]:
    return tuple(getattr(cache, name) for name in Cache._fields)


def in_use(cache: QuantizedKVCache) -> tuple[Tensor, ...]:
    """Everything that the cache holds, sequence by sequence."""
    held = cache.lengths.tolist()
    rows = [part[b, :, :length] for part in parts(cache)[:4] for b, length in enumerate(held)]
    return (*rows, cache.lengths)


def ragged(name: str = "int8", lengths: list[int] | None = None, max_tokens: int = 12, head_dim: int = 10):
    """A cache of three sequences of three heads; what lies past their lengths is noise."""
    lengths = RAGGED if lengths is None else lengths
    cache = QuantizedKVCache(3, 3, head_dim, max_tokens, format=name)
    _, key, value = make("normal", 3, 3, 3, head_dim, 9)
    for part, rows in zip(parts(cache), filled(name, key, value, lengths, max_tokens), strict=True):
        part.copy_(rows)
    return cache
