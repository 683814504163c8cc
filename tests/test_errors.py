"""One table of bad inputs, through the fake and through the CPU: the same text, and nothing written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from common import KNOWN_FORMATS as FORMATS
from common import Cache, assert_same_bits, empty
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

ATTENDS = ("kvq::attend", "kvq::attend_lse")
PARTS = Cache._fields
OPTIONAL = PARTS[5:]
QUERY_SHAPE = "query must have shape [batch, heads_q, head_dim] or [batch, heads_q, tokens, head_dim]"
CODES_LAYOUT = "key_codes must have 4 dimensions [batch, heads_kv, max_tokens, row bytes]"


def arguments(op: str, name: str = "int8") -> dict[str, Any]:
    """Good ones: B = 2, Hkv = 3, N = 6 or 140, D = 8, and T = 2 rows or Hq = 6 heads."""
    cache = empty(name, 2, 3, 8, 6 if name == "int8" else 140)
    cache.lengths.fill_(2)
    given: dict[str, Any] = dict(zip(PARTS, cache, strict=True)) | {"format": name}
    if op == "kvq::append":
        return given | {"key": torch.zeros(2, 3, 2, 8), "value": torch.zeros(2, 3, 2, 8)}
    return given | {"query": torch.zeros(2, 6, 8)}


def resized(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_zeros(shape)


def strided(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


# What is changed, by functions of the good arguments, and what is said. `query` and `key` share most of their entries.
Case = tuple[dict[str, Any], str]

FORMAT_CASES: dict[str, Case] = {
    "format": ({"format": "int2"}, f"format {FORMATS}, got 'int2'"),
    "format-empty": ({"format": ""}, f"format {FORMATS}, got ''"),
    **{
        f"format-{name}": ({"format": name}, f"format {FORMATS}, got '{name}'")
        for name in ["int8/int8/int8", "k8v4/int8", "int8/k8v4", "sinks4", "int8/sinks65", "int8/sinks04", "int8/sinks"]
    },
}

PART_CASES: dict[str, Case] = {
    "key_codes-tokens": (
        {"key_codes": lambda a: resized(a["key_codes"], 2, 3, 2**31, 0)},
        "key_codes must have at most 2147483647 tokens, got 2147483648",
    ),
    "key_codes-dim": ({"key_codes": lambda a: resized(a["key_codes"], 2, 3)}, f"{CODES_LAYOUT}, got [2, 3]"),
    "key_codes-dtype": ({"key_codes": lambda a: a["key_codes"].short()}, "key_codes must be int8, got int16"),
    "key_codes-of-int4": ({"format": "int4"}, "key_codes must be uint8, got int8"),
    "value_codes-of-int4": ({"format": "int8/int4"}, "value_codes must be uint8, got int8"),
    "key_codes-bytes": (
        {"format": "int4/int8", "key_codes": lambda a: a["key_codes"].byte()},
        "key_codes must have shape [2, 3, 6, 4], got [2, 3, 6, 8]",
    ),
    "key_codes-batch": (
        {"key_codes": lambda a: resized(a["key_codes"], 1, 3, 6, 8)},
        "key_codes must have shape [2, 3, 6, 8], got [1, 3, 6, 8]",
    ),
    "key_codes-stride": (
        {"key_codes": lambda a: strided(a["key_codes"])},
        "key_codes must be contiguous in its last dimension, got stride 2",
    ),
    "key_scales-dtype": ({"key_scales": lambda a: a["key_scales"].half()}, "key_scales must be float32, got float16"),
    "key_scales-shape": (
        {"key_scales": lambda a: resized(a["key_scales"], 2, 3, 5)},
        "key_scales must have shape [2, 3, 6], got [2, 3, 5]",
    ),
    "key_scales-dim": (
        {"key_scales": lambda a: resized(a["key_scales"], 2, 3, 6, 1)},
        "key_scales must have shape [2, 3, 6], got [2, 3, 6, 1]",
    ),
    "value_codes-dtype": ({"value_codes": lambda a: a["value_codes"].byte()}, "value_codes must be int8, got uint8"),
    "value_codes-tokens": (
        {"value_codes": lambda a: resized(a["value_codes"], 2, 3, 7, 8)},
        "value_codes must have shape [2, 3, 6, 8], got [2, 3, 7, 8]",
    ),
    "value_codes-stride": (
        {"value_codes": lambda a: a["value_codes"].transpose(2, 3).contiguous().transpose(2, 3)},
        "value_codes must be contiguous in its last dimension, got stride 6",
    ),
    "value_scales-dtype": (
        {"value_scales": lambda a: a["value_scales"].double()},
        "value_scales must be float32, got float64",
    ),
    "value_scales-shape": (
        {"value_scales": lambda a: resized(a["value_scales"], 2, 6)},
        "value_scales must have shape [2, 3, 6], got [2, 6]",
    ),
    "lengths-dtype": ({"lengths": lambda a: a["lengths"].long()}, "lengths must be int32, got int64"),
    "lengths-shape": ({"lengths": lambda a: resized(a["lengths"], 3)}, "lengths must have shape [2], got [3]"),
    "lengths-scalar": ({"lengths": lambda a: resized(a["lengths"])}, "lengths must have shape [2], got []"),
    "lengths-stride": (
        {"lengths": lambda a: strided(a["lengths"])},
        "lengths must be contiguous in its last dimension, got stride 2",
    ),
    **{
        f"{part}-device": ({part: lambda a, part=part: a[part].to("meta")}, f"{part} must be on cpu, got meta")
        for part in PARTS[:5]
    },
    **{
        f"{part}-given": ({part: lambda a: a["lengths"]}, f"{part} must be None for format int8, got a tensor")
        for part in OPTIONAL
    },
    "format-as-given": (
        {"format": "int8/int8", "key_full": lambda a: a["lengths"]},
        "key_full must be None for format int8/int8, got a tensor",
    ),
    "first-of-two-parts": (
        {"value_codes": lambda a: a["value_codes"].byte(), "key_scales": lambda a: a["key_scales"].half()},
        "key_scales must be float32, got float16",
    ),
}

ATTEND_CASES: dict[str, Case] = {
    "query-dim-2": ({"query": lambda a: resized(a["query"], 2, 3)}, f"{QUERY_SHAPE}, got [2, 3]"),
    "query-dim-5": ({"query": lambda a: resized(a["query"], 2, 6, 1, 1, 8)}, f"{QUERY_SHAPE}, got [2, 6, 1, 1, 8]"),
    "query-float64": (
        {"query": lambda a: a["query"].double()},
        "query must be float32, bfloat16 or float16, got float64",
    ),
    "query-int8": ({"query": lambda a: a["query"].char()}, "query must be float32, bfloat16 or float16, got int8"),
    "query-complex": (
        {"query": lambda a: a["query"].to(torch.complex64)},
        "query must be float32, bfloat16 or float16, got complex64",
    ),
    **{
        f"query-d{head_dim}": (
            {"query": lambda a, head_dim=head_dim: resized(a["query"], 2, 6, head_dim)},
            f"query must have an even head_dim from 8 to 1024, got {head_dim}",
        )
        for head_dim in (0, 6, 7, 9, 1025, 1026)
    },
    "query-other-head_dim": (
        {"query": lambda a: resized(a["query"], 2, 6, 10)},
        "key_codes must have shape [2, 3, 6, 10], got [2, 3, 6, 8]",
    ),
    "query-other-batch": (
        {"query": lambda a: resized(a["query"], 4, 6, 8)},
        "key_codes must have shape [4, 3, 6, 8], got [2, 3, 6, 8]",
    ),
    "query-heads": (
        {"query": lambda a: resized(a["query"], 2, 5, 8)},
        "query must have a multiple of the cache's heads_kv heads, got 5 (heads_kv 3)",
    ),
    "no-heads": (
        {"key_codes": lambda a: resized(a["key_codes"], 2, 0, 6, 8)},
        "key_codes must have at least 1 head, got 0",
    ),
    **{
        f"scale-{scale}": ({"scale": scale}, f"scale must be finite, got {said}")
        for scale, said in [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (1e300, "inf"), (-4e38, "-inf")]
    },
    "format-first": (
        {"format": "int2", "query": lambda a: resized(a["query"], 2, 3)},
        f"format {FORMATS}, got 'int2'",
    ),
    "query-before-parts": (
        {"key_codes": lambda a: resized(a["key_codes"], 2, 3), "query": lambda a: a["query"].double()},
        "query must be float32, bfloat16 or float16, got float64",
    ),
    "parts-before-scale": ({"scale": math.nan, "format": "int4"}, "key_codes must be uint8, got int8"),
}

APPEND_CASES: dict[str, Case] = {
    "key-dim": (
        {"key": lambda a: resized(a["key"], 2, 3, 8)},
        "key must have shape [batch, heads_kv, tokens, head_dim], got [2, 3, 8]",
    ),
    "key-dtype": ({"key": lambda a: a["key"].double()}, "key must be float32, bfloat16 or float16, got float64"),
    "key-head_dim": (
        {"key": lambda a: resized(a["key"], 2, 3, 2, 7)},
        "key must have an even head_dim from 8 to 1024, got 7",
    ),
    "key-heads": (
        {"key": lambda a: resized(a["key"], 2, 2, 2, 8), "value": lambda a: resized(a["value"], 2, 2, 2, 8)},
        "key_codes must have shape [2, 2, 6, 8], got [2, 3, 6, 8]",
    ),
    "value-dtype": ({"value": lambda a: a["value"].half()}, "value must be float32 like key, got float16"),
    "value-shape": (
        {"value": lambda a: resized(a["value"], 2, 3, 1, 8)},
        "value must have shape [2, 3, 2, 8] like key, got [2, 3, 1, 8]",
    ),
    "value_codes-overlap": (
        {"value_codes": lambda a: a["value_codes"][:1].expand(2, 3, 6, 8)},
        "value_codes must not overlap itself, got strides [0, 48, 8, 1]",
    ),
    "key_scales-overlap": (
        {"key_scales": lambda a: a["key_scales"][:, :1].expand(2, 3, 6)},
        "key_scales must not overlap itself, got strides [18, 0, 1]",
    ),
    "value-device": ({"value": lambda a: a["value"].to("meta")}, "value must be on cpu, got meta"),
    "key_codes-before-value": (
        {"key_codes": lambda a: resized(a["key_codes"], 2, 3), "value": lambda a: a["value"].half()},
        f"{CODES_LAYOUT}, got [2, 3]",
    ),
    "value-before-parts": (
        {"format": "int4", "value": lambda a: a["value"].half()},
        "value must be float32 like key, got float16",
    ),
}

# The cases below change good arguments of the format at the head of their names. int8_kivi has every part.
MORE_PART_CASES: dict[str, Case] = {
    **{
        f"int8_kivi {part}-none": ({part: None}, f"{part} must be a tensor for format int8_kivi, got None")
        for part in OPTIONAL
    },
    **{
        f"int8_kivi {part}-device": (
            {part: lambda a, part=part: a[part].to("meta")},
            f"{part} must be on cpu, got meta",
        )
        for part in OPTIONAL
    },
    **{
        f"int8_kivi {part}-stride": (
            {part: lambda a, part=part: strided(a[part])},
            f"{part} must be contiguous in its last dimension, got stride 2",
        )
        for part in ("key_scales", "key_zeros", "key_full", "value_full")
    },
    **{
        f"int8_kivi {part}-shape": (
            {part: lambda a, part=part: a[part][:, :, :-1]},
            f"{part} must have shape {shape}, got {other}",
        )
        for part, shape, other in [
            ("key_scales", "[2, 3, 4, 8]", "[2, 3, 3, 8]"),
            ("key_zeros", "[2, 3, 4, 8]", "[2, 3, 3, 8]"),
            ("value_zeros", "[2, 3, 140]", "[2, 3, 139]"),
            ("key_full", "[2, 3, 68, 8]", "[2, 3, 67, 8]"),
            ("value_full", "[2, 3, 4, 8]", "[2, 3, 3, 8]"),
        ]
    },
    **{
        f"int8_kivi {part}-dtype": (
            {part: lambda a, part=part: a[part].half()},
            f"{part} must be float32, got float16",
        )
        for part in ("key_scales", "key_zeros", "value_scales", "value_zeros")
    },
    "int4_hq value_zeros-given": (
        {"value_zeros": lambda a: a["lengths"]},
        "value_zeros must be None for format int4_hq, got a tensor",
    ),
    "int4_hq key_scales-dtype": (
        {"key_scales": lambda a: a["key_scales"].float()},
        "key_scales must be bfloat16, got float32",
    ),
    "int4_hq key_scales-shape": (
        {"key_scales": lambda a: a["key_scales"][:, :, 0]},
        "key_scales must have shape [2, 3, 2, 8], got [2, 3, 8]",
    ),
    "int4_hq key_full-shape": (
        {"key_full": lambda a: a["key_full"][:, :, :68]},
        "key_full must have shape [2, 3, 132, 8], got [2, 3, 68, 8]",
    ),
    "int4_hq value_scales-dtype": (
        {"value_scales": lambda a: a["value_scales"].char()},
        "value_scales must be uint8, got int8",
    ),
    "int4_g32 key_scales-shape": (
        {"key_scales": lambda a: a["key_scales"].transpose(2, 3)},
        "key_scales must have shape [2, 3, 2, 140], got [2, 3, 140, 2]",
    ),
    "int4_g32 key_scales-stride": (
        {"key_scales": lambda a: strided(a["key_scales"])},
        "key_scales must be contiguous in its last dimension, got stride 2",
    ),
    "int8/int4/sinks3 key_full-none": (
        {"key_full": None},
        "key_full must be a tensor for format int8/int4/sinks3, got None",
    ),
    "int8/int4/sinks3 value_full-shape": (
        {"value_full": lambda a: resized(a["value_full"], 2, 3, 4, 8)},
        "value_full must have shape [2, 3, 3, 8], got [2, 3, 4, 8]",
    ),
    "int8_kivi first-of-two-parts": (
        {"key_full": None, "value_zeros": lambda a: a["value_zeros"].half()},
        "value_zeros must be float32, got float16",
    ),
    "int8_kivi lengths-before-zeros": (
        {"key_zeros": None, "lengths": lambda a: a["lengths"].long()},
        "lengths must be int32, got int64",
    ),
}
MORE_ATTEND_CASES: dict[str, Case] = {
    "int8_kivi key_full-dtype": (
        {"key_full": lambda a: a["key_full"].to(torch.int8)},
        "key_full must be float32, bfloat16 or float16, got int8",
    ),
    "int8_kivi value_full-dtype": (
        {"value_full": lambda a: a["value_full"].double()},
        "value_full must be float32, bfloat16 or float16, got float64",
    ),
    "int8_kivi value_full-like-key_full": (
        {"value_full": lambda a: a["value_full"].half()},
        "value_full must be float32 like key_full, got float16",
    ),
}
MORE_APPEND_CASES: dict[str, Case] = {
    "int8_kivi key-like-key_full": (
        {"key": lambda a: a["key"].bfloat16(), "value": lambda a: a["value"].bfloat16()},
        "key must be float32 like key_full, got bfloat16",
    ),
    "int8_kivi key-like-value_full": (
        {"value_full": lambda a: a["value_full"].half()},
        "key must be float16 like value_full, got float32",
    ),
    "int8_kivi key_full-dtype": (
        {"key_full": lambda a: a["key_full"].to(torch.int8)},
        "key must be int8 like key_full, got float32",
    ),
    **{
        f"int8_kivi {part}-overlap": (
            {part: lambda a, part=part: a[part][:, :1].expand(2, 3, *a[part].shape[2:])},
            f"{part} must not overlap itself, got strides {strides}",
        )
        for part, strides in [
            ("key_zeros", "[96, 0, 8, 1]"),
            ("value_zeros", "[420, 0, 1]"),
            ("key_full", "[1632, 0, 8, 1]"),
            ("value_full", "[96, 0, 8, 1]"),
        ]
    },
}

TABLE = [
    pytest.param(op, name.rpartition(" ")[0] or "int8", *case, id=f"{op.removeprefix('kvq::')}-{name}")
    for op, cases in [
        ("kvq::append", FORMAT_CASES | APPEND_CASES | PART_CASES | MORE_PART_CASES | MORE_APPEND_CASES),
        *((op, FORMAT_CASES | ATTEND_CASES | PART_CASES | MORE_PART_CASES | MORE_ATTEND_CASES) for op in ATTENDS),
    ]
    for name, case in cases.items()
]


def changed(op: str, base: str, changes: dict[str, Any]) -> dict[str, Any]:
    given = arguments(op, base)
    return given | {name: change(given) if callable(change) else change for name, change in changes.items()}


def call(op: str, given: dict[str, Any]) -> Any:
    return getattr(torch.ops.kvq, op.removeprefix("kvq::"))(**given)


def tensors(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


def refusal(op: str, given: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call(op, given)
    return str(error.value)


@pytest.mark.parametrize("base", sorted({case.values[1] for case in TABLE}))
@pytest.mark.parametrize("op", ["kvq::append", *ATTENDS])
def test_good_arguments_pass(op, base):
    """Else the table would show nothing."""
    call(op, arguments(op, base))
    with FakeTensorMode() as mode:
        given = arguments(op, base)
        call(op, given | {name: mode.from_tensor(x) for name, x in tensors(given).items()})


@pytest.mark.parametrize(("op", "base", "changes", "said"), TABLE)
def test_cpu(op, base, changes, said):
    given = changed(op, base, changes)
    before = {name: x.clone() for name, x in tensors(given).items() if x.device.type == "cpu"}
    assert refusal(op, given) == f"{op}: {said}"
    assert_same_bits(tuple(given[name] for name in before), tuple(before.values()))


@pytest.mark.parametrize(("op", "base", "changes", "said"), TABLE)
def test_fake(op, base, changes, said):
    given = changed(op, base, changes)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in tensors(given).items()}
        assert refusal(op, given | fakes) == f"{op}: {said}"


@pytest.mark.parametrize(("op", "base", "changes", "said"), [case for case in TABLE if "device" not in case.id])
def test_meta(op, base, changes, said):
    """Where every tensor is on one device."""
    given = changed(op, base, changes)
    metas = {name: x.new_empty_strided(x.shape, x.stride(), device="meta") for name, x in tensors(given).items()}
    assert refusal(op, given | metas) == f"{op}: {said}"


@pytest.mark.parametrize(
    ("lengths", "tokens", "said"),
    [
        ([2, 70], 1, "lengths must lie in 0..6, got 70 at 1"),
        ([-1, 2], 1, "lengths must lie in 0..6, got -1 at 0"),
        ([2, 7], 9, "lengths must lie in 0..6, got 7 at 1"),
        ([4, 2], 4, "query must have at most as many tokens as each sequence holds, got 4 (length 2 at 1)"),
        ([0, 6], 7, "query must have at most as many tokens as each sequence holds, got 7 (length 6 at 1)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ATTENDS)
def test_what_only_the_data_says(op, lengths, tokens, said):
    """test_append.py has append's."""
    given = arguments(op) | {"lengths": torch.tensor(lengths, dtype=torch.int32)}
    given["query"] = resized(given["query"], 2, 6, tokens, 8)
    assert refusal(op, given) == f"{op}: {said}"
