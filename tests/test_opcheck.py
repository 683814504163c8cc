"""torch.library.opcheck: what torch itself demands of an op, for every op and format."""

from __future__ import annotations

import pytest
import torch
from common import DTYPES, FORMAT_NAMES, filled
from data import make

ATTENDS = {"attend": torch.ops.kvq.attend.default, "attend_lse": torch.ops.kvq.attend_lse.default}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_append(name, dtype):
    _, key, value = make("normal", 2, 2, 2, 10, 7)
    cache = filled(name, key, value, [3, 5], max_tokens=12)
    rows = [x.to(DTYPES[dtype]) for x in (key, value)]
    torch.library.opcheck(torch.ops.kvq.append.default, (*cache, *rows, name))


@pytest.mark.parametrize(("dtype", "tokens"), [("fp32", 0), *((dtype, 3) for dtype in DTYPES)])
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("op", ATTENDS)
def test_attend(op, name, dtype, tokens):
    """With a strided query, scale given or not."""
    query, key, value = make("normal", 2, 6, 2, 10, 7)
    cache = filled(name, key, value, [3, 7])
    query = query.to(DTYPES[dtype])
    arguments = (*cache, name)
    if tokens:
        query = query[:, None].expand(2, tokens, 6, 10).transpose(1, 2)
        arguments = (*arguments, 0.25)
    torch.library.opcheck(ATTENDS[op], (query, *arguments))


@pytest.mark.parametrize("op", ATTENDS)
def test_attend_with_a_query_that_requires_grad(op):
    """The gradient is refused, which opcheck's test of aot_autograd cannot know."""
    query, key, value = make("normal", 1, 2, 1, 8, 4)
    arguments = (query.clone().requires_grad_(), *filled("int8", key, value), "int8")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ATTENDS[op], arguments, test_utils=tests)
