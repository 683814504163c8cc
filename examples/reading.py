"""How a text goes through a model in chunks as if token by token, and what it is asked to recall."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from examples.llama import Llama
from examples.metrics import losses
from kvq_ops import CacheFormat

CHUNK = 64
"""Tokens in one call where keys do not freeze in blocks."""
RECALL_START, RECALL_DISTANCE, RECALL_TOKENS = 4096, 1536, 256
"""Where the recall's context starts in the text, how long it is, and how much of its beginning is repeated after it."""
RECALL_NOTE = f"of a passage of {RECALL_TOKENS} tokens that comes again {RECALL_DISTANCE} tokens later"


def chunks(format: CacheFormat | None, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts tokens ``start`` to ``end`` so that every query sees what it would see if they came one by one.

    Rows are coded as they come, so any cut serves. Keys coded per channel freeze with the last token of their block,
    and the queries of a chunk would see the block frozen too early: that token goes alone. ``None`` is a plain cache.
    """
    cuts = {start, end}
    if format and format.key.key_block:
        freezing = range(format.sinks + format.key.key_block - 1, end, format.key.key_block)
        cuts |= {cut for token in freezing for cut in (token, token + 1) if start < cut < end}
    else:
        cuts |= set(range(start, end, CHUNK))
    yield from pairwise(sorted(cuts))


def read(model: Llama, ids: Tensor, start: int) -> Iterator[Tensor]:
    """Append the tokens ``ids`` [n] at positions ``start`` on, not compiled: chunk by chunk the logits [T, vocab] after
    each token."""
    format = getattr(model.caches[0], "format", None)
    for first, last in chunks(format, start, start + len(ids)):
        yield model(ids[None, first - start : last - start], torch.arange(first, last))[0]


def prefill(model: Llama, ids: Tensor) -> Tensor:
    """Append the tokens ``ids`` [n] to the empty caches; the logits after the last."""
    model.reset_caches()
    return deque(read(model, ids, 0), maxlen=1).pop()[-1]


def recall(model: Llama, text: Tensor) -> Tensor:
    """Losses of a passage's second copy, a whole context after the first: what must be read far back."""
    context = text[RECALL_START : RECALL_START + RECALL_DISTANCE]
    passage = context[:RECALL_TOKENS]
    prefill(model, context)
    return losses(torch.cat(list(read(model, passage[:-1], len(context)))), passage[1:])


def bits_per_value(model: Llama) -> float:
    """Of a coded token, all that describes it included; of a plain cache those of its dtype."""
    cache = model.caches[0]
    format = getattr(cache, "format", None)
    return format.bits_per_value(model.config.head_dim) if format else 8 * cache.key.itemsize
