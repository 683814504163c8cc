"""PyTorch ops for decoding over a quantized key-value cache, whole under torch.compile.

``append`` quantises new rows into a cache, ``attend`` reads it as it is; :class:`QuantizedKVCache` holds one layer's.
"""

from kvq_ops.cache import QuantizedKVCache
from kvq_ops.format import FORMATS, CacheFormat, SideFormat, get_format
from kvq_ops.integrations.package import C_SHIMS, PACKAGE_METADATA, check_package
from kvq_ops.integrations.rewrite import AttentionReport, RewriteReport, quantize_kv_storage
from kvq_ops.native import library_path
from kvq_ops.ops import append, attend, cpu_isa

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
    "library_path",
    "quantize_kv_storage",
]
__version__ = "0.1.0"
