"""What a launch is made of: constants of a format and a head size, and how work is cut. No triton, no device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..format import NIBBLE_BLOCK, CacheFormat, SideFormat, get_format

__all__ = ["VERSION", "AttendPlan", "Constants", "append_rows", "attend_plan", "constants", "splits"]

VERSION = 1
"""A constant of every kernel: compile caches hash kernels, but not the choices that are made here. Count it up with
them."""

Constants = dict[str, int | bool]
_CODINGS = {"row": 0, "group": 1, "token": 2, "channel": 3}
_TILE = 4096
"""Elements of a tile of rows that an append program codes at once."""
_MAX_SPLITS = 128


def _side(side: SideFormat, name: str) -> Constants:
    return {
        f"{name.upper()}_CODING": _CODINGS[side.coding(name)],
        f"{name.upper()}_BITS": side.bits,
        f"{name.upper()}_GROUP": side.group,
    }


def power_of_two(number: int) -> int:
    """The least that is not below number."""
    return 1 << max(0, number - 1).bit_length()


@lru_cache(maxsize=256)
def constants(format: str, head_dim: int) -> Constants:
    """What both ops' kernels take of a format."""
    cache = get_format(format)
    return {
        "HEAD_DIM": head_dim,
        "BLOCKS": power_of_two(-(-head_dim // NIBBLE_BLOCK)),
        "SINKS": cache.sinks,
        "KEY_BLOCK": cache.key.key_block,
        "ROTATED": cache.value.rotated("value"),
        **_side(cache.key, "key"),
        **_side(cache.value, "value"),
        "VERSION": VERSION,
    }


def append_rows(head_dim: int, rows: int) -> int:
    """Rows that one program codes, of so many of a sequence."""
    blocks = power_of_two(-(-head_dim // NIBBLE_BLOCK))
    return min(max(1, _TILE // (blocks * NIBBLE_BLOCK)), power_of_two(min(rows, _TILE)))


@dataclass(frozen=True)
class AttendPlan:
    """Tiles of one attend: query rows and tokens of a program, and how it is compiled."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=1024)
def attend_plan(format: CacheFormat, head_dim: int, rows: int, split: bool) -> AttendPlan:
    """For so many query rows of one KV head; split: products are taken twice. Tokens of a tile divide a block of keys;
    accumulators, [rows, head_dim] fp32, and a tile of codes as fp16 must fit registers."""
    wide = power_of_two(head_dim)
    tokens = 64 if wide <= 256 else 32 if wide <= 512 else 16
    if format.key.key_block:
        tokens = min(tokens, format.key.key_block)
    tile = 16 if rows <= 16 or wide > 256 else 32
    gathers = format.value.rotated("value") and head_dim % NIBBLE_BLOCK != 0
    # As few warps as hold it all without spills, see benchmarks/GPU_STATIC.md.
    heavy = split or tile > 16 if format.key.key_block else format.key.coding("key") == "group"
    warps = 8 if wide > (128 if format.key.key_block else 256) or gathers or heavy else 4
    if heavy and format.key.key_block:
        tokens = min(tokens, 32)
    return AttendPlan(tile, tokens, warps, 3 if wide <= 256 and not (heavy and tile > 16) else 2)


def splits(programs: int, max_tokens: int, tokens: int, multiprocessors: int) -> int:
    """Into how many pieces the tokens of a sequence are cut, for so many programs without: enough for two programs a
    multiprocessor, and none of less than two tiles at full capacity. Of capacity and device alone, never of lengths."""
    wanted = 2 * multiprocessors // max(1, programs)
    return max(1, min(wanted, max_tokens // (2 * tokens), _MAX_SPLITS))
