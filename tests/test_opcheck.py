"""torch.library.opcheck: what torch itself demands of an op, for every op and format."""

from __future__ import annotations

import pytest
import torch
from common import DTYPES, filled
from data import make

ATTENDS = {"attend": torch.ops.kvq.attend.default, "attend_lse": torch.ops.kvq.attend_lse.default}


FORMATS = ["int8", "int4", "int4_g32", "int4_kivi", "int4_hq", "int8/int4_hq/sinks3"]
"""Each set of optional parts, each dtype of the others."""
CASES = [(name, dtype) for name in FORMATS for dtype in (DTYPES if name in ("int8", "int4_hq") else ["bf16"])]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_append(name, dtype):
    _, key, value = make("normal", 2, 2, 2, 10, 7)
    rows = [x.to(DTYPES[dtype]) for x in (key, value)]
    cache = filled(name, *rows, [3, 5], max_tokens=12)
    torch.library.opcheck(torch.ops.kvq.append.default, (*cache.needed, *rows, name, *cache.optional))


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("op", ATTENDS)
def test_attend(op, tokens, name, dtype):
    """With a strided query, scale given or not."""
    query, key, value = make("normal", 2, 6, 2, 10, 7)
    cache = filled(name, key, value, [3, 7])
    query = query.to(DTYPES[dtype])
    scale = None
    if tokens:
        query = query[:, None].expand(2, tokens, 6, 10).transpose(1, 2)
        scale = 0.25
    torch.library.opcheck(ATTENDS[op], (query, *cache.needed, name, scale, *cache.optional))


@pytest.mark.parametrize("op", ATTENDS)
def test_attend_with_a_query_that_requires_grad(op):
    """The gradient is refused, which opcheck's test of aot_autograd cannot know."""
    query, key, value = make("normal", 1, 2, 1, 8, 4)
    arguments = (query.clone().requires_grad_(), *filled("int8", key, value).needed, "int8")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ATTENDS[op], arguments, test_utils=tests)
