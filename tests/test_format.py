"""The byte layout: facts typed by hand, against kvq_ops.format, the reference and the op."""

from __future__ import annotations

import pytest
import torch
from common import FORMAT_NAMES, KNOWN_FORMATS, Cache, append, empty

from kvq_ops import FORMATS, CacheFormat, SideFormat, get_format, reference
from kvq_ops.format import Part


def test_presets():
    assert list(FORMATS) == [
        *("int4", "int8", "int4_g32", "int4_g64", "int4_kivi", "int8_kivi", "int4_hq", "int8_hq", "k8v4")
    ]
    assert FORMATS["int8"] == CacheFormat(SideFormat(8), SideFormat(8), 0)
    assert FORMATS["int4_g64"] == CacheFormat(SideFormat(4, "g64"), SideFormat(4, "g64"), 0)
    assert FORMATS["int4_kivi"] == CacheFormat(SideFormat(4, "kivi"), SideFormat(4, "kivi"), 4)
    assert FORMATS["int8_hq"] == CacheFormat("int8_hq", "int8_hq") == CacheFormat("int8_hq", "int8_hq", 4)
    assert FORMATS["k8v4"] == CacheFormat("int8", "int4_hq", 0)


@pytest.mark.parametrize(("bits", "limit", "dtype"), [(8, 127, "int8"), (4, 7, "uint8")])
def test_side(bits, limit, dtype):
    side = SideFormat(bits)
    assert (side.name, side.limit, side.codes_dtype) == (f"int{bits}", limit, dtype)


@pytest.mark.parametrize(
    ("name", "key", "value", "key_block", "group", "rotated", "scales"),
    [
        ("int8", "row", "row", 0, 0, False, "float32"),
        ("int4", "row", "row", 0, 0, False, "float32"),
        ("int4_g32", "group", "group", 0, 32, False, "float32"),
        ("int4_g64", "group", "group", 0, 64, False, "float32"),
        ("int8_kivi", "channel", "token", 32, 0, False, "float32"),
        ("int4_kivi", "channel", "token", 32, 0, False, "float32"),
        ("int8_hq", "channel", "group", 64, 32, True, "bfloat16"),
        ("int4_hq", "channel", "group", 64, 32, True, "bfloat16"),
    ],
)
def test_codings(name, key, value, key_block, group, rotated, scales):
    side = get_format(name).key
    assert (side.name, side.bits) == (name, int(name[3]))
    assert (side.coding("key"), side.coding("value")) == (key, value)
    assert (side.key_block, side.group, side.rotated("key"), side.rotated("value")) == (
        key_block,
        group,
        False,
        rotated,
    )
    assert side.key_scales_dtype == scales


@pytest.mark.parametrize("bits", [0, 2, 5, 16, None, True, 8.0])
def test_side_refuses(bits):
    with pytest.raises(ValueError, match=f"^SideFormat: bits must be 4 or 8, got {bits}$"):
        SideFormat(bits)


def test_schemes_refuse():
    known = "'', 'g32', 'g64', 'kivi', 'hq'"
    with pytest.raises(ValueError, match=f"^SideFormat: scheme must be one of {known}, got 'g16'$"):
        SideFormat(4, "g16")
    with pytest.raises(ValueError, match=r"^SideFormat: bits must be 4 with scheme 'g32', got 8$"):
        SideFormat(8, "g32")


@pytest.mark.parametrize("sinks", [-1, 65, 1.0, True, "4"])
def test_sinks_refuse(sinks):
    with pytest.raises(ValueError, match=f"^CacheFormat: sinks must be from 0 to 64, got {sinks!r}$"):
        CacheFormat("int8", "int8", sinks)


def test_sides_refuse():
    known = "int4 or int4_g32 or int4_g64 or int4_hq or int4_kivi or int8 or int8_hq or int8_kivi"
    with pytest.raises(ValueError, match=f"^CacheFormat: value must be a SideFormat or {known}, got 'k8v4'$"):
        CacheFormat("int8", "k8v4")
    with pytest.raises(ValueError, match=f"^CacheFormat: key must be a SideFormat or {known}, got 8$"):
        CacheFormat(8, "int8")


@pytest.mark.parametrize(
    ("name", "head_dim", "groups"),
    [
        ("int4_g32", 8, [(0, 4), (4, 8)]),
        ("int4_g32", 30, [(0, 15), (15, 30)]),
        ("int4_g32", 64, [(0, 32), (32, 64)]),
        ("int4_g32", 100, [(0, 32), (32, 64), (64, 82), (82, 100)]),
        ("int4_hq", 80, [(0, 32), (32, 64), (64, 72), (72, 80)]),
        ("int8_hq", 8, [(0, 8)]),
        ("int8_hq", 32, [(0, 32)]),
        ("int8_hq", 34, [(0, 32), (32, 34)]),
        ("int8_hq", 80, [(0, 32), (32, 64), (64, 80)]),
        ("int8_hq", 100, [(0, 32), (32, 64), (64, 96), (96, 100)]),
        ("int4_g64", 10, [(0, 10)]),
        ("int4_g64", 64, [(0, 64)]),
        ("int4_g64", 100, [(0, 64), (64, 100)]),
    ],
)
def test_groups(name, head_dim, groups):
    assert get_format(name).value.groups(head_dim) == groups


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
        ("int8_kivi", 1, 256, 256 * 5 // 4 + 256 + 8),  # keys: 8 bits and a pair of fp32 for 32 tokens
        ("int4_kivi", 1, 256, 128 + 64 + 128 + 8),
        ("int8_hq", 1, 256, 256 + 24 + 256 + 5),  # keys: fp32 and bf16 for 64 tokens; values: a byte and 8 nibbles
        ("int4_hq", 1, 256, 128 + 24 + 128 + 5),
        ("int4_hq", 4, 64, 4 * (32 + 6 + 32 + 2)),
        ("int4_g32", 1, 256, 2 * (128 + 5)),
        ("int4_g64", 1, 256, 2 * (128 + 3)),
        ("k8v4", 1, 256, 260 + 133),
        ("int4_hq", 1, 80, 40 + 8 + 40 + 3),  # 7.5 bytes of keys' scales, rounded up
    ],
)
def test_bytes_per_token(name, heads_kv, head_dim, count):
    assert get_format(name).bytes_per_token(heads_kv, head_dim) == count


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("int8", "bfloat16", 2 * 4 * 80 * 208 + 8),
        ("int4", "bfloat16", 2 * 4 * 80 * 108 + 8),
        # Keys, scales and offsets of 2 blocks of 32, 4 + 64 rows of keys, 4 of values.
        ("int8_kivi", "float32", 8 * (80 * 200 + 2 * 100 * 8 + 80 * 8 + 72 * 400) + 8),
        ("int8_kivi", "float16", 8 * (80 * 200 + 2 * 100 * 8 + 80 * 8 + 72 * 200) + 8),
        ("int4_hq", "bfloat16", 8 * (80 * 100 + 1 * 100 * 6 + 80 * 3 + (4 + 128 + 4) * 200) + 8),
        ("int4_hq/sinks0", "bfloat16", 8 * (80 * 100 + 1 * 100 * 6 + 80 * 3 + 128 * 200) + 8),
        ("int8/sinks5", "float32", 8 * (80 * 208 + 2 * 5 * 400) + 8),
    ],
)
def test_bytes_needed(name, dtype, count):
    assert get_format(name).bytes_needed(batch=2, heads_kv=4, head_dim=100, max_tokens=80, dtype=dtype) == count


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int8", {64: 8.5, 128: 8.25, 256: 8.125}),
        ("int4", {64: 4.5, 128: 4.25, 256: 4.125}),
        ("int8_kivi", {64: 9.5, 128: 9.25, 256: 9.125}),
        ("int4_kivi", {64: 5.5, 128: 5.25, 256: 5.125}),
        ("int8_hq", {64: 8.5, 128: 8.46875, 256: 8.453125}),
        ("int4_hq", {64: 4.5, 128: 4.46875, 256: 4.453125}),
        ("int4_g32", {64: 4.25, 128: 4.1875, 256: 4.15625}),
    ],
)
def test_bits_per_value(name, bits):
    """Everything that describes a coded token; those of hq are at most half a bit more than the codes."""
    assert {head_dim: get_format(name).bits_per_value(head_dim) for head_dim in bits} == bits
    assert not name.endswith("hq") or max(bits.values()) <= int(name[3]) + 0.5


def test_parts():
    assert get_format("int8/int4").parts(2, 3, 10, 7) == {
        "key_codes": Part((2, 3, 7, 10), "int8"),
        "key_scales": Part((2, 3, 7), "float32"),
        "value_codes": Part((2, 3, 7, 5), "uint8"),
        "value_scales": Part((2, 3, 7), "float32"),
    }
    assert get_format("int4_hq").parts(2, 3, 100, 140, "float16") == {
        "key_codes": Part((2, 3, 140, 50), "uint8"),
        "key_scales": Part((2, 3, 2, 100), "bfloat16", "block"),
        "value_codes": Part((2, 3, 140, 50), "uint8"),
        "value_scales": Part((2, 3, 3, 140), "uint8", axis=3),
        "key_zeros": Part((2, 3, 2, 100), "float32", "block"),
        "key_full": Part((2, 3, 132, 100), "float16", "slot"),
        "value_full": Part((2, 3, 4, 100), "float16", "slot"),
    }
    assert get_format("int8_kivi/sinks0").parts(2, 3, 10, 20) == {
        "key_codes": Part((2, 3, 20, 10), "int8"),
        "key_scales": Part((2, 3, 1, 10), "float32", "block"),  # none fits: one, so that no part is empty
        "value_codes": Part((2, 3, 20, 10), "int8"),
        "value_scales": Part((2, 3, 20), "float32"),
        "key_zeros": Part((2, 3, 1, 10), "float32", "block"),
        "value_zeros": Part((2, 3, 20), "float32"),
        "key_full": Part((2, 3, 64, 10), "bfloat16", "slot"),
    }
    assert get_format("int4_g64/int8_hq/sinks2").parts(1, 1, 80, 9) == {
        "key_codes": Part((1, 1, 9, 40), "uint8"),
        "key_scales": Part((1, 1, 2, 9), "uint8", axis=3),
        "value_codes": Part((1, 1, 9, 80), "int8"),
        "value_scales": Part((1, 1, 3, 9), "uint8", axis=3),
        "key_full": Part((1, 1, 2, 80), "bfloat16", "slot"),
        "value_full": Part((1, 1, 2, 80), "bfloat16", "slot"),
    }


@pytest.mark.parametrize(
    ("name", "slots", "frozen"),
    [
        ("int8", 0, {0: 0, 1: 1, 100: 100}),
        ("int8/sinks4", 4, {0: 0, 1: 1, 100: 100}),
        ("int4_kivi", 68, {0: 0, 3: 3, 4: 4, 5: 4, 35: 4, 36: 36, 67: 36, 68: 68, 69: 68}),
        ("int8_hq", 132, {0: 0, 3: 3, 4: 4, 5: 4, 67: 4, 68: 68, 131: 68, 132: 132, 1000: 964}),
        ("int8_hq/sinks0", 128, {0: 0, 1: 0, 63: 0, 64: 64, 65: 64}),
        ("int8/int4_kivi", 0, {0: 0, 37: 37}),
    ],
)
def test_frozen(name, slots, frozen):
    assert get_format(name).key_slots == slots
    assert {length: get_format(name).frozen(length) for length in frozen} == frozen


def test_rows_in_use():
    format = get_format("int4_kivi")
    parts = format.parts(2, 3, 10, 200)
    used = {part: [format.rows_in_use(parts[part], length) for length in (0, 4, 35, 36, 100, 101)] for part in parts}
    blocks, tokens = [0, 0, 0, 1, 3, 3], [0, 4, 35, 36, 100, 101]
    assert used == {
        **dict.fromkeys(("key_codes", "value_codes", "value_scales", "value_zeros"), tokens),
        **dict.fromkeys(("key_scales", "key_zeros"), blocks),
        "key_full": [68] * 6,
        "value_full": [4] * 6,
    }


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_names(name):
    named = get_format(name)
    assert get_format(named.name) == named
    assert get_format(named) is named


def test_equal_sides_have_one_name():
    assert get_format("int8/int8") == FORMATS["int8"]
    assert get_format("int8/int8").name == "int8"


SIDES = ["int4", "int8", "int4_g32", "int4_g64", "int4_kivi", "int8_kivi", "int4_hq", "int8_hq"]


def accepted(name: str) -> bool:
    """By the op: a cache of no sequences asks nothing but that the format be one."""
    lengths, rows = torch.empty(0, dtype=torch.int32), torch.empty(0, 1, 0, 8)
    with pytest.raises(RuntimeError) as error:
        torch.ops.kvq.append(*[torch.empty(0, 1, 1)] * 4, lengths, rows, rows, name)
    refused = str(error.value).startswith("kvq::append: format ")
    assert not refused or str(error.value) == f"kvq::append: format {KNOWN_FORMATS}, got '{name}'"
    return not refused


@pytest.mark.parametrize("key", SIDES)
def test_every_name(key):
    """Round trips, and C++ knows the same names."""
    for value in SIDES:
        for sinks in (None, 0, 1, 4, 9, 10, 63, 64):
            format = CacheFormat(key, value, sinks)
            for written in (format.name, f"{key}/{value}" + ("" if sinks is None else f"/sinks{sinks}")):
                assert get_format(written) == format
                assert accepted(written)
            assert (format.name.count("/") == 0) <= (key == value or (key, value) == ("int8", "int4_hq"))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("int8/int8/sinks0", "int8"),
        ("int4_hq/sinks4", "int4_hq"),
        ("int4_hq/int4_hq/sinks0", "int4_hq/sinks0"),
        ("int8/int4_hq", "k8v4"),
        ("int8/int4_hq/sinks3", "k8v4/sinks3"),
        ("k8v4/sinks0", "k8v4"),
        ("int8_kivi/int4/sinks4", "int8_kivi/int4"),
    ],
)
def test_short_names(written, name):
    assert get_format(written).name == name


_WORDS = """
int2 int int16 fp8 INT8 int4_ int4_h int4_hqx int4hq int4_g16 int8_g32 int8_g64 k8v
/ /int8 int8/ int8/int4/int8 int4/int4/ k8v4/int8 int8/k8v4 k8v4/k8v4
sinks4 /sinks4 int8/sinks int8/sinks-1 int8/sinks+4 int8/sinks65 int8/sinks100 int8/sinks04 int8/sinks00 int8/Sinks4
int8/sinks4a int8//sinks4 int8/int4/sinks4/ int8/sinks4/int4 int8/sinks4/sinks4 int8/int4/int8/sinks4
"""
UNKNOWN = [*_WORDS.split(), "", "int8 ", " int8", "int8/sinks4 ", "int8/sinks\u0664", "int8/sinks\u00b2"]
UNKNOWN += ["int8/sinks" + "9" * 30, "int8/sinks" + "1" * 5000]


@pytest.mark.parametrize("name", [*UNKNOWN, 8, None])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="must be one of int4, int4_g32") as error:
        get_format(name)
    assert str(error.value).endswith(f"or <key>/<value> of them, got '{name}'" if isinstance(name, str) else repr(name))
    assert not isinstance(name, str) or not accepted(name)


def test_random_names():
    """Pieces of names in any order: Python and C++ agree on each."""
    pieces = ["int8", "int4", "_hq", "_kivi", "_g32", "_g64", "k8v4", "/", "/", "sinks", "/sinks", "4", "64", "0", " "]
    generator, known = torch.Generator().manual_seed(0), 0
    for _ in range(3000):
        size = int(torch.randint(1, 6, (1,), generator=generator))
        name = "".join(pieces[i] for i in torch.randint(0, len(pieces), (size,), generator=generator).tolist())
        try:
            get_format(name)
        except ValueError:
            assert not accepted(name), name
        else:
            assert accepted(name), name
            known += 1
    assert known > 50


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
    append(cache, rows, rows, name)
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
