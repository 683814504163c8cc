"""What a 4-D attention mask says about padding: proved by comparing all of it, or refused.

attend is causal by position and hides nothing else, so padding never enters the cache: each sequence holds its own
tokens alone. A mask is therefore understood where it shows every query all that its sequence holds up to itself, and
nothing else.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

__all__ = ["assert_no_padding", "new_tokens", "refuse"]

CAUSAL = "be causal, with padding at the left only, and show each sequence all that the cache holds of it"


def refuse(argument: str, requirement: str, got: object) -> NoReturn:
    raise ValueError(f"kvq attention: {argument} must {requirement}, got {got}")


def new_tokens(mask: Tensor, lengths: Tensor, seen: int, tokens: int) -> list[int]:
    """How many of the newest ``tokens`` positions of each sequence are tokens of its own, the rest being padding.

    mask is [batch or 1, 1, tokens, positions], bool (True: shown) or float (0: shown); lengths, int32 [batch], is what
    the cache holds of each sequence after ``seen`` positions. Reads both on the host.

    Raises ``ValueError`` for any other pattern than a causal one with padding at the left."""
    batch, held = len(lengths), lengths.tolist()
    shown = _shown(mask, batch, tokens, seen)
    # The newest query is a token of its own wherever the sequence has begun; what it does not see at first is padding.
    positions = torch.arange(shown.shape[2], device=mask.device)
    first = torch.where(shown[:, -1], positions, seen + tokens).amin(1)
    own = torch.arange(tokens, device=mask.device) + seen
    expected = (positions <= own[:, None]) & (positions >= first[:, None, None])
    wrong = ((shown != expected) & (own >= first[:, None])[:, :, None]).flatten(1).any(1).tolist()
    found = []
    for b, start in enumerate(first.tolist()):
        new = max(0, min(tokens, seen + tokens - start))
        if wrong[b] or held[b] + new != seen + tokens - start:
            refuse("attention_mask", CAUSAL, f"another pattern at sequence {b} ({held[b]} tokens held, {tokens} new)")
        found.append(new)
    return found


def _shown(mask: Tensor, batch: int, tokens: int, seen: int) -> Tensor:
    """The mask as bool [batch, tokens, positions]."""
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[1] != 1 or mask.shape[2] != tokens:
        refuse("attention_mask", f"have shape [{batch}, 1, {tokens}, positions]", list(mask.shape))
    if mask.shape[3] < seen + tokens:
        got = f"{mask.shape[3]}, {seen} of them taken and {tokens} new"
        refuse("max_cache_len", f"be at least {seen + tokens}, or the mask as long as what it hides", got)
    shown = mask[:, 0]
    if mask.dtype != torch.bool:
        hidden = shown <= torch.finfo(shown.dtype).min / 2 if shown.is_floating_point() else shown != 0
        shown = shown == 0
        if not bool((shown | hidden).all()):
            refuse("attention_mask", "be a bool mask, or 0 where a token is seen and -inf elsewhere", "a bias")
    return shown.expand(batch, -1, -1)


def assert_no_padding(mask: Tensor, held: Tensor, tokens: int) -> None:
    """In compiled code, where nothing is read on the host: an assertion in the graph that a mask hides none of the new
    tokens, and nothing of what is held, int64 [batch]."""
    expected = held[:, None] + torch.arange(1, tokens + 1, device=mask.device)
    shown = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    torch._assert_async(  # noqa: SLF001 the only assertion that a graph keeps and no host waits for
        (shown.sum(-1) == expected).all(),
        "kvq attention: attention_mask must be causal and show all new tokens and all that the cache holds in a "
        "compiled call, got another pattern: let a padded prompt go through eager",
    )
