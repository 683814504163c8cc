"""PyTorch ops for decoding over a quantized key-value cache, whole under torch.compile.

``append`` quantises new rows into a cache, ``attend`` reads it as it is; :class:`QuantizedKVCache` holds one layer's.
"""

from . import layers
from .cache import QuantizedKVCache
from .format import FORMATS, CacheFormat, SideFormat, get_format
from .integrations.package import PACKAGE_METADATA, check_package
from .integrations.rewrite import AttentionReport, RewriteReport, quantize_kv_storage
from .native import library_path
from .ops import append, attend, cpu_isa

__all__ = [
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
    "layers",
    "library_path",
    "quantize_kv_storage",
]
__version__ = "0.1.0"
