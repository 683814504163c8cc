"""Layers for ``kernels.kernelize``: stateless forwards that take the place of a model's own.

What such a forward uses belongs to the module that it is put into.
"""

from __future__ import annotations

from torch import Tensor, nn

from .cache import QuantizedKVCache

__all__ = ["CachedAttention"]


class CachedAttention(nn.Module):
    """Appends key and value to a cache, attends over it with the query.

    The module that it takes the place of holds the cache, ``cache``, a :class:`QuantizedKVCache`, and has a forward of
    the same three arguments. What an op refuses is a ``RuntimeError`` of the op.
    """

    can_torch_compile = True
    has_backward = False
    cache: QuantizedKVCache

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [batch, heads_q, head_dim] or [batch, heads_q, tokens, head_dim], key and value the same with heads_kv
        heads; fp32, bf16 or fp16. The output is like query, causal among the new tokens."""
        self.cache.append(key, value)
        return self.cache.attend(query)
