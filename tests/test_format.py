"""The byte layout: facts typed by hand, against kvq_ops.format, the reference and the op."""

from __future__ import annotations

import pytest
import torch
from common import FORMAT_NAMES, Cache, empty

import kvq_ops
from kvq_ops import FORMATS, CacheFormat, SideFormat, get_format, reference
from kvq_ops.format import Part


def test_presets():
    assert sorted(FORMATS) == ["int4", "int8"]
    assert FORMATS["int8"] == CacheFormat(SideFormat(8), SideFormat(8))
    assert FORMATS["int4"] == CacheFormat(SideFormat(4), SideFormat(4))


@pytest.mark.parametrize(("bits", "limit", "dtype"), [(8, 127, "int8"), (4, 7, "uint8")])
def test_side(bits, limit, dtype):
    side = SideFormat(bits)
    assert (side.name, side.limit, side.codes_dtype) == (f"int{bits}", limit, dtype)


@pytest.mark.parametrize("bits", [0, 2, 5, 16, None])
def test_side_refuses(bits):
    with pytest.raises(ValueError, match=f"^SideFormat: bits must be 4 or 8, got {bits}$"):
        SideFormat(bits)


@pytest.mark.parametrize(
    ("name", "heads_kv", "head_dim", "count"),
    [
        ("int8", 1, 256, 520),
        ("int4", 1, 256, 264),
        ("int8/int4", 1, 256, 392),
        ("int4/int8", 1, 256, 392),
        ("int8", 8, 128, 2112),
        ("int4", 8, 128, 1088),
        ("int8", 3, 64, 408),
        ("int4", 2, 10, 36),
    ],
)
def test_bytes_per_token(name, heads_kv, head_dim, count):
    assert get_format(name).bytes_per_token(heads_kv, head_dim) == count


@pytest.mark.parametrize(("name", "count"), [("int8", 2 * 4 * 16 * 208 + 8), ("int4", 2 * 4 * 16 * 108 + 8)])
def test_bytes_needed(name, count):
    assert get_format(name).bytes_needed(batch=2, heads_kv=4, head_dim=100, max_tokens=16) == count


def test_parts():
    assert get_format("int8/int4").parts(2, 3, 10, 7) == {
        "key_codes": Part((2, 3, 7, 10), "int8"),
        "key_scales": Part((2, 3, 7), "float32"),
        "value_codes": Part((2, 3, 7, 5), "uint8"),
        "value_scales": Part((2, 3, 7), "float32"),
    }


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_names(name):
    named = get_format(name)
    assert named.name == name
    assert get_format(named) is named


def test_equal_sides_have_one_name():
    assert get_format("int8/int8") == FORMATS["int8"]
    assert get_format("int8/int8").name == "int8"


@pytest.mark.parametrize("name", ["int2", "", "int8/", "/int8", "int8/int4/int8", "INT8", "int8 ", 8, None])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="must be one of int4, int8 or <key>/<value> of them, got ") as error:
        get_format(name)
    assert str(error.value).endswith(f"got {name!r}")


GOLDEN = [
    pytest.param(
        "int8",
        [127, -127, 63.5, 0.5, -0.5, 1.5, 2.5, 0],
        1.0,
        [127, -127, 64, 0, 0, 2, 2, 0],
        id="int8-ties-to-even",
    ),
    pytest.param(
        "int8",
        [1, 2, 3, 4, 5, 6, 7, -8],
        0.06299212574958801,
        [16, 32, 48, 64, 79, 95, 111, -127],
        id="int8-scale-below-1",
    ),
    pytest.param("int8", [0.0] * 8, 0.0, [0] * 8, id="int8-zeros"),
    pytest.param(
        "int4",
        [7, -7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3, -3],
        1.0,
        [0x8F, 0x61, 0x68, 0xBA, 0x5A],
        id="int4-ties-to-even",
    ),
    pytest.param("int4", [0.0] * 10, 0.0, [0x88] * 5, id="int4-zeros"),
    pytest.param("int4", [14, -14, 0, 0, 0, 0, 0, 2], 2.0, [0x8F, 0x81, 0x88, 0x98], id="int4-scale-2"),
]


def append_row(name: str, row: list[float]) -> Cache:
    cache = empty(name, 1, 1, len(row), 1)
    rows = torch.tensor(row, dtype=torch.float32).view(1, 1, 1, -1)
    kvq_ops.append(*cache, rows, rows, name)
    return cache


@pytest.mark.parametrize(("name", "row", "scale", "codes"), GOLDEN)
def test_golden_rows(name, row, scale, codes):
    got_codes, got_scale = reference.quantize(torch.tensor(row, dtype=torch.float32), FORMATS[name].key)
    assert (got_codes.tolist(), got_scale.item()) == (codes, scale)
    cache = append_row(name, row)
    assert cache.key_codes.flatten().tolist() == cache.value_codes.flatten().tolist() == codes
    assert cache.key_scales.item() == cache.value_scales.item() == scale


@pytest.mark.parametrize(
    ("head_dim", "code", "byte", "high"),
    [
        (8, 0, 0, False),
        (8, 4, 0, True),
        (10, 4, 4, False),
        (10, 5, 0, True),
        (64, 31, 31, False),
        (64, 32, 0, True),
        (64, 63, 31, True),
        (80, 63, 31, True),
        (80, 64, 32, False),
        (80, 71, 39, False),
        (80, 72, 32, True),
        (80, 79, 39, True),
        (100, 64, 32, False),
        (100, 81, 49, False),
        (100, 82, 32, True),
        (100, 99, 49, True),
        (128, 64, 32, False),
        (128, 96, 32, True),
        (128, 127, 63, True),
        (1024, 1023, 511, True),
    ],
)
def test_place_of_a_nibble(head_dim, code, byte, high):
    row = [0.0] * head_dim
    row[code] = 7.0
    bytes_of_row = [0x88] * (head_dim // 2)
    bytes_of_row[byte] = 0xF8 if high else 0x8F
    assert append_row("int4", row).value_codes.flatten().tolist() == bytes_of_row
    codes = torch.tensor(row, dtype=torch.int8)
    assert reference.pack(codes).tolist() == bytes_of_row
    assert torch.equal(reference.unpack(torch.tensor(bytes_of_row, dtype=torch.uint8), head_dim), codes)
