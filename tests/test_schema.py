"""The ops' schemas to the letter: exported programs and other people's code hold to them."""

from __future__ import annotations

import pytest
import torch

PARTS = "Tensor key_codes, Tensor key_scales, Tensor value_codes, Tensor value_scales, Tensor lengths"
MORE = "Tensor? key_zeros=None, Tensor? value_zeros=None, Tensor? key_full=None, Tensor? value_full=None"
SCHEMAS = {
    "append": (
        "kvq::append(Tensor(a!) key_codes, Tensor(b!) key_scales, Tensor(c!) value_codes, Tensor(d!) value_scales, "
        "Tensor(e!) lengths, Tensor key, Tensor value, str format, Tensor(f!)? key_zeros=None, "
        "Tensor(g!)? value_zeros=None, Tensor(h!)? key_full=None, Tensor(i!)? value_full=None) -> ()"
    ),
    "attend": f"kvq::attend(Tensor query, {PARTS}, str format, float? scale=None, {MORE}) -> Tensor",
    "attend_lse": f"kvq::attend_lse(Tensor query, {PARTS}, str format, float? scale=None, {MORE}) -> (Tensor, Tensor)",
    "cpu_isa": "kvq::cpu_isa() -> str",
    "schema_version": "kvq::schema_version() -> int",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    assert str(getattr(torch.ops.kvq, name).default._schema) == SCHEMAS[name]


@pytest.mark.parametrize("name", SCHEMAS)
def test_one_overload(name):
    assert getattr(torch.ops.kvq, name).overloads() == ["default"]


def test_no_other_ops():
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("kvq::")}
    assert names == {f"kvq::{name}" for name in SCHEMAS}
