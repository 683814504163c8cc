"""QuantizedKVCache.truncate where keys freeze in blocks: as if the tokens had never been appended, or refused."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from common import IN_BLOCKS, assert_same_bits, in_use, parts, same_bits
from torch import Tensor

from kvq_ops import QuantizedKVCache, get_format

HEAD_DIM, MAX_TOKENS = 16, 300


def random_rows(batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, batch, 2, tokens, HEAD_DIM, generator=generator)
    return key, value


KEY, VALUE = random_rows(2, MAX_TOKENS)
OTHER_KEY, OTHER_VALUE = random_rows(2, MAX_TOKENS, seed=1)
QUERY = torch.randn(2, 4, 3, HEAD_DIM, generator=torch.Generator().manual_seed(2))


def cache_of(name: str, length: int, batch: int = 1, pieces: int = 50) -> QuantizedKVCache:
    cache = QuantizedKVCache(batch, 2, HEAD_DIM, MAX_TOKENS, format=name, dtype=torch.float32)
    extend(cache, length, (KEY, VALUE), pieces)
    return cache


def extend(cache: QuantizedKVCache, tokens: int, source: tuple[Tensor, Tensor], pieces: int = 50) -> None:
    """Row t of every sequence is row t of the source."""
    (start,) = set(cache.lengths.tolist())
    key, value = (x[: cache.batch, :, start : start + tokens] for x in source)
    for k, v in zip(key.split(pieces, 2), value.split(pieces, 2), strict=True):
        cache.append(k, v)


def assert_alike(cache: QuantizedKVCache, never: QuantizedKVCache) -> None:
    """Nothing that can be read or appended to differs; what an older cut marked as lost may."""
    assert cache.lengths.tolist() == never.lengths.tolist()
    assert_same_bits(cache.dequantize(), never.dequantize())
    tokens = min(3, *cache.lengths.tolist())
    query = QUERY[: cache.batch, :, :tokens]
    assert_same_bits(cache.attend(query, return_lse=True), never.attend(query, return_lse=True))


def block_of(name: str) -> int:
    return get_format(name).key.key_block


def lengths_of(name: str) -> list[int]:
    """Before, at and behind borders, of the first round of the ring and the second."""
    block, sinks = block_of(name), get_format(name).sinks
    return [sinks + block, sinks + block + 1, sinks + 2 * block - 1, sinks + 2 * block + 5, sinks + 3 * block]


@pytest.mark.parametrize("name", ["int8_kivi", "int4_hq", "int4_hq/sinks0", "int8_kivi/int4/sinks64"])
def test_every_cut_by_up_to_a_block(name):
    block = block_of(name)
    for length in lengths_of(name):
        full = cache_of(name, length)
        for cut in range(min(block, length) + 1):
            cache, never = copy.deepcopy(full), cache_of(name, length - cut)
            cache.truncate(length - cut)
            assert same_bits(cache.attend(QUERY[:1, :, :1]), never.attend(QUERY[:1, :, :1]))
            for each in (cache, never):
                extend(each, block + 7, (OTHER_KEY, OTHER_VALUE), pieces=23)
            assert_alike(cache, never)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_cuts_to_borders(name):
    """However far back, to where a block ends or to sinks alone."""
    block, sinks = block_of(name), get_format(name).sinks
    length = sinks + 3 * block + 5
    full = cache_of(name, length)
    for new in {*range(sinks + 1), *range(sinks, length, block)}:
        cache, never = copy.deepcopy(full), cache_of(name, new)
        cache.truncate(new)
        assert cache.lengths.tolist() == [new]
        for each in (cache, never):
            extend(each, 2 * block + 3, (OTHER_KEY, OTHER_VALUE))
        assert_alike(cache, never)
        assert_same_bits(in_use(cache), in_use(never))


def refusal(name: str, new: int, sequence: int = 0) -> str:
    block, sinks = block_of(name), get_format(name).sinks
    words = (
        f"QuantizedKVCache.truncate: lengths must cut a sequence back by at most {block} tokens in all, or to a whole "
    )
    words += f"number of blocks of {block}" + (f" after {sinks} sinks" if sinks else "")
    return f"^{re.escape(f'{words}, got {new} at {sequence}')}$"


def test_the_words_of_a_refusal():
    cache = cache_of("int8_kivi", 200)
    said = (
        "QuantizedKVCache.truncate: lengths must cut a sequence back by at most 32 tokens in all, or to a whole number "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said + 'of blocks of 32 after 4 sinks, got 90 at 0')}$"):
        cache.truncate(90)
    cache = cache_of("int4_hq/sinks0", 250)
    said = (
        "QuantizedKVCache.truncate: lengths must cut a sequence back by at most 64 tokens in all, or to a whole number "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said + 'of blocks of 64, got 90 at 0')}$"):
        cache.truncate(90)


@pytest.mark.parametrize("name", ["int4_kivi", "int8_hq", "int4_hq/sinks0"])
def test_what_is_lost_is_refused(name):
    """Every length is either cut to exactly or refused, with nothing changed; within a block none is refused."""
    block, sinks = block_of(name), get_format(name).sinks
    length = sinks + 3 * block + 9
    full, kept = cache_of(name, length), range(length - 2 * block, length + 1)
    for new in range(length + 1):
        cache, unfinished = copy.deepcopy(full), sinks + max(0, new - sinks) // block * block
        if new > sinks and new != unfinished and unfinished not in kept:
            assert length - new > block
            with pytest.raises(ValueError, match=refusal(name, new)):
                cache.truncate(new)
            assert_same_bits(parts(cache), parts(full))
            continue
        cache.truncate(new)
        never = cache_of(name, new)
        for each in (cache, never):
            extend(each, block, (OTHER_KEY, OTHER_VALUE))
        assert_alike(cache, never)


@pytest.mark.parametrize("name", ["int8_kivi", "int4_hq", "int4_hq/sinks0"])
def test_cut_after_cut(name):
    """Random cuts and appends, beside a cache that is made anew of what is left: the same, or refused."""
    block = block_of(name)
    generator = torch.Generator().manual_seed(3)

    def random(most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=generator))

    cuts, refused = 0, 0
    for _ in range(12):
        cache = cache_of(name, 2 * block + random(block))
        history = [x[:1, :, : cache.lengths.item()] for x in (KEY, VALUE)]
        for _ in range(8):
            length = history[0].shape[2]
            new = max(0, length - random(3 * block // 2))
            try:
                cache.truncate(new)
            except ValueError:
                refused += 1
            else:
                history = [x[:, :, :new] for x in history]
                cuts += 1
            rows = random_rows(1, random(block), seed=cuts)
            cache.append(*rows)
            history = [torch.cat(pair, 2) for pair in zip(history, rows, strict=True)]
            never = QuantizedKVCache(1, 2, HEAD_DIM, MAX_TOKENS + 600, format=name, dtype=torch.float32)
            never.append(*history)
            if history[0].shape[2] > MAX_TOKENS - 2 * block:
                break
            assert_same_bits(cache.dequantize(), never.dequantize())
            if history[0].shape[2]:
                query = QUERY[:1, :, :1]
                assert same_bits(cache.attend(query), never.attend(query))
    assert cuts > 20
    assert refused > 5


@pytest.mark.parametrize("name", ["int8_kivi", "int4_hq"])
def test_a_second_cut_counts_from_the_first(name):
    """At most a block in all: what the first cut gave up is not there for the second."""
    block, sinks = block_of(name), get_format(name).sinks
    length = sinks + 4 * block
    cache = cache_of(name, length)
    cache.truncate(length - block + 5)
    cache.truncate(length - block)
    assert_alike(cache, cache_of(name, length - block))
    cache = cache_of(name, length)
    cache.truncate(length - block)
    with pytest.raises(ValueError, match=refusal(name, length - 2 * block - 1)):
        cache.truncate(length - 2 * block - 1)
    cache.truncate(length - 2 * block)


@pytest.mark.parametrize("name", ["int8_kivi", "int4_hq"])
def test_sequences_are_cut_each_by_itself(name):
    """One that is refused stops all; an int cuts longer ones alone."""
    block, sinks = block_of(name), get_format(name).sinks
    cache = cache_of(name, sinks + 3 * block, batch=2)
    cache.truncate(torch.tensor([sinks + 3 * block, sinks + 2 * block], dtype=torch.int32))
    before = parts(cache).clone()
    new = torch.tensor([sinks + 3 * block - 3, sinks + 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=refusal(name, sinks + 1, 1)):
        cache.truncate(new)
    assert_same_bits(parts(cache), before)
    cache.truncate(sinks + 2 * block + 3)
    assert cache.lengths.tolist() == [sinks + 2 * block + 3, sinks + 2 * block]
    key, value = cache.dequantize()
    for b, length in enumerate(cache.lengths.tolist()):
        never = cache_of(name, length, batch=2)
        assert same_bits(key[b, :, :length], never.dequantize()[0][b])
        assert same_bits(value[b, :, :length], never.dequantize()[1][b])


@pytest.mark.parametrize("name", ["int8_kivi", "int4_hq"])
def test_marks_travel(name):
    """What a cut gave up is known after reorder, deepcopy, a saved state and moves."""
    block, sinks = block_of(name), get_format(name).sinks
    lost = sinks + 2 * block - 1
    cache = cache_of(name, sinks + 4 * block, batch=2)
    cache.truncate(torch.tensor([sinks + 4 * block, sinks + 3 * block], dtype=torch.int32))
    loaded = QuantizedKVCache(2, 2, HEAD_DIM, MAX_TOKENS + 9, format=name, dtype=torch.float32)
    loaded.load_state(cache.save_state())
    for each in (cache, copy.deepcopy(cache), loaded, copy.deepcopy(cache).half()):
        with pytest.raises(ValueError, match=refusal(name, lost, 1)):
            each.truncate(torch.tensor([sinks + 4 * block, lost], dtype=torch.int32))
        each.reorder(torch.tensor([1, 0]))
        with pytest.raises(ValueError, match=refusal(name, lost, 0)):
            each.truncate(torch.tensor([lost, sinks + 4 * block], dtype=torch.int32))


@pytest.mark.parametrize("name", ["int8_kivi", "int4_hq"])
def test_rows_that_are_not_finite_are_no_marks(name):
    """A poisoned channel, or one head's row: still there."""
    block, sinks = block_of(name), get_format(name).sinks
    for where in ((0, slice(None)), (slice(None), 3)):
        key = KEY[:1].clone()
        head, channel = where
        key[:, head, sinks + block + 2, channel] = math.nan
        cache = QuantizedKVCache(1, 2, HEAD_DIM, MAX_TOKENS, format=name, dtype=torch.float32)
        cache.append(key[:, :, : sinks + 2 * block], VALUE[:1, :, : sinks + 2 * block])
        cache.truncate(sinks + block + 5)
        assert cache.lengths.tolist() == [sinks + block + 5]


def test_reset_forgets_marks():
    cache = cache_of("int4_hq", 200)
    cache.truncate(150)
    cache.reset()
    extend(cache, 100, (OTHER_KEY, OTHER_VALUE))
    cache.truncate(80)
    never = QuantizedKVCache(1, 2, HEAD_DIM, MAX_TOKENS, format="int4_hq", dtype=torch.float32)
    extend(never, 80, (OTHER_KEY, OTHER_VALUE))
    assert_alike(cache, never)
