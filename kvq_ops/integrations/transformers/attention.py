"""The attention implementation "kvq": attends over quantized layers, and over plain ones as the model would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from .layer import CachedKeyValue
from .padding import refuse

__all__ = ["NAME", "register"]

NAME = "kvq"
_UNSUPPORTED = ("softcap", "position_bias", "head_mask", "cu_seq_lens_q", "block_mask")
"""Arguments of attention that change its result, and that attend does not have."""

Output = tuple[Tensor, Tensor | None]


def register() -> None:
    """Make "kvq" an attention implementation of transformers, with the mask that belongs to it.

    Raises ``RuntimeError`` where another build of kvq_ops has done so: its caches would meet this one's function."""
    other = AttentionInterface._global_mapping.get(NAME)  # noqa: SLF001
    if other is not None and other.__module__ != attention.__module__:
        got = f"{__name__} after {other.__module__}"
        raise RuntimeError(f"KVQCache: one build of kvq_ops must serve transformers in a process, got {got}")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The 4-D bool mask of sdpa, or None where nothing but what comes later is hidden."""
    found: Tensor | None = sdpa_mask(*args, **kwargs)
    return found


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedKeyValue,
    value: Tensor | CachedKeyValue,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Output:
    """Attention of query [batch, heads_q, tokens, head_dim]: the output [batch, tokens, heads_q, head_dim], no weights.

    Over tensors it is sdpa's, or that of the model's own eager function where sdpa lacks something.

    Raises ``ValueError`` for what attend does not have, and for a mask that is not causal with padding at the left."""
    if not isinstance(key, CachedKeyValue):
        return _plain(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    if attention_mask is None:
        _check_registered()
    _check(module, key, value, dropout, kwargs)
    return key.attend(query, attention_mask, scaling, kwargs.get("s_aux")), None


def _check_registered() -> None:
    """Without its mask function transformers hands no mask at all, and padding would be lost without a word."""
    registered = AttentionMaskInterface._global_mapping.get(NAME)  # noqa: SLF001
    if registered is not mask:
        refuse("the mask function of 'kvq'", "be the registered one", registered)


def _check(module: nn.Module, key: CachedKeyValue, value: Any, dropout: float, given: dict[str, Any]) -> None:
    """Refuse what would change the result."""
    if value is not key:
        refuse("key and value", "be of one update", "two")
    if dropout:
        refuse("dropout", "be 0, attention over a quantized cache is inference only", dropout)
    causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        refuse("is_causal", "be True", False)
    if given.get("output_attentions"):
        refuse("output_attentions", "be False, attend returns no weights", True)
    for name in _UNSUPPORTED:
        if given.get(name) is not None:
            got = given[name] if isinstance(given[name], float) else "one"
            refuse(name, "be None, attend has none", f"{got} (model type {key.layer.model_type!r})")
    window = given.get("sliding_window")
    if window is not None and window < key.layer.max_cache_len:
        refuse("sliding_window", f"be None or at least max_cache_len {key.layer.max_cache_len}", window)


def _plain(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    given: dict[str, Any],
) -> Output:
    """Attention over a layer that is not quantized."""
    if isinstance(value, CachedKeyValue):
        refuse("key and value", "be of one update", "two")
    if given.get("softcap") is None and given.get("s_aux") is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
    tokens, positions = query.shape[2], key.shape[2]
    if attention_mask is None and tokens > 1:
        # A mask that sdpa leaves out means causal from the first position on.
        causal = torch.ones(tokens, positions, dtype=torch.bool, device=query.device).tril()
        attention_mask = causal[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.where(attention_mask, 0.0, hidden).to(query.dtype)
    return _eager(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given)


def _eager(module: nn.Module) -> Callable[..., Output]:
    """The eager attention of the model's own file, which knows all that the model asks for."""
    found: Callable[..., Output] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        refuse("softcap or s_aux", "be None where a model has no eager attention", type(module).__name__)
    return found
