"""The ops' schemas, for builds without the compiled library, which has them in ``csrc/library.cpp``."""

from __future__ import annotations

__all__ = ["SCHEMAS"]

_CACHE = "Tensor key_codes, Tensor key_scales, Tensor value_codes, Tensor value_scales, Tensor lengths"
_OPTIONAL = "Tensor? key_zeros=None, Tensor? value_zeros=None, Tensor? key_full=None, Tensor? value_full=None"

SCHEMAS = {
    "append": (
        "append(Tensor(a!) key_codes, Tensor(b!) key_scales, Tensor(c!) value_codes, Tensor(d!) value_scales, "
        "Tensor(e!) lengths, Tensor key, Tensor value, str format, Tensor(f!)? key_zeros=None, "
        "Tensor(g!)? value_zeros=None, Tensor(h!)? key_full=None, Tensor(i!)? value_full=None) -> ()"
    ),
    "attend": f"attend(Tensor query, {_CACHE}, str format, float? scale=None, {_OPTIONAL}) -> Tensor",
    "attend_lse": f"attend_lse(Tensor query, {_CACHE}, str format, float? scale=None, {_OPTIONAL}) -> (Tensor, Tensor)",
}
"""By the op's name."""
