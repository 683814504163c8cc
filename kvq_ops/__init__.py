"""PyTorch ops for decoding over a quantized key-value cache, whole under torch.compile.

``append`` quantises new rows into a cache, ``attend`` reads it as it is; :class:`QuantizedKVCache` holds one layer's.
"""

from typing import Any

from . import layers
from .cache import QuantizedKVCache
from .format import FORMATS, CacheFormat, SideFormat, get_format
from .integrations.hub import kvq_attention
from .integrations.package import C_SHIMS, PACKAGE_METADATA, check_package
from .integrations.rewrite import AttentionReport, RewriteReport, quantize_kv_storage
from .native import library_path
from .ops import append, attend, cpu_isa

__all__ = [
    "C_SHIMS",
    "FORMATS",
    "PACKAGE_METADATA",
    "AttentionReport",
    "CacheFormat",
    "QuantizedKVCache",
    "RewriteReport",
    "SideFormat",
    "append",
    "attend",
    "check_package",
    "cpu_isa",
    "get_format",
    "kvq_attention",
    "layers",
    "library_path",
    "quantize_kv_storage",
]
__version__ = "0.1.0"
flash_attn_forward, supports_flash_attn = kvq_attention, True
"""What transformers looks for in a kernel of the Hub that brings an attention function of its own, with a mask as for
sdpa. It refuses kernels without, whatever function ``attn_implementation`` names."""


def __getattr__(name: str) -> Any:
    """``KVQCache``, without which transformers need not be there, nor be waited for."""
    if name == "KVQCache":
        from .integrations.transformers import KVQCache  # noqa: PLC0415

        return KVQCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
