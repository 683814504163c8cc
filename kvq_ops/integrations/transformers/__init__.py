"""Quantized caches in models of Hugging Face transformers: ``KVQCache``, and the attention implementation "kvq".

``cache`` says which layer of a model is quantized, ``layer`` is one quantized layer, ``attention`` attends over it,
``padding`` reads masks. Importing this registers "kvq" with transformers::

    from kvq_ops.integrations.transformers import KVQCache

    model.set_attn_implementation("kvq")
    cache = KVQCache(model.config, max_cache_len=4096, format="int8_hq")
    model.generate(**inputs, past_key_values=cache)
"""

from .attention import register
from .cache import CacheReport, KVQCache, LayerReport
from .layer import KVQLayer

__all__ = ["CacheReport", "KVQCache", "KVQLayer", "LayerReport"]

register()
