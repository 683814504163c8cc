"""What transformers calls of the kernel on the Hugging Face Hub: ``attn_implementation="<repo>:kvq_attention"``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["kvq_attention"]


def kvq_attention(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
    """Attention over the layers of a ``KVQCache`` as transformers calls it: module, query [batch, heads_q, tokens,
    head_dim], key and value as the cache hands them out, attention_mask; the output [batch, tokens, heads_q, head_dim]
    and no weights. It is the implementation "kvq", which raises ``ValueError`` for what attend does not have."""
    # Without a model of transformers nothing calls this, and importing it takes seconds.
    from .transformers.attention import attention  # noqa: PLC0415

    return attention(*arguments, **keywords)
