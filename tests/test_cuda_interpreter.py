"""The CUDA kernels in Triton's interpreter: every format, dtype, head size and grouping against the reference, by
``cuda_interpreter.py`` in processes of their own. No GPU takes part, so nothing here says how fast, or that a GPU's
compiler agrees."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from common import CODINGS, FORMAT_NAMES, run_python

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: no CUDA kernels to interpret"
)

HEAD_DIMS = [64, 80, 10, 128, 36, 130, 96, 8]
GROUPINGS = ["2:2", "6:2", "5:1", "40:2"]
DTYPES = ["fp32", "fp16", "bf16"]


def interpret(*cases: str) -> None:
    result = run_python(
        "import runpy; runpy.run_module('cuda_interpreter', run_name='__main__')", *cases, OMP_NUM_THREADS="1"
    )
    assert result.returncode == 0, result.stderr[-3000:]


def turn(of: list, number: int) -> object:
    return of[number % len(of)]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_append(name):
    """Over the formats each head size meets each dtype."""
    first = FORMAT_NAMES.index(name)
    interpret(*(f"test_append:{name}:{dtype}:{turn(HEAD_DIMS, first + 3 * i)}" for i, dtype in enumerate(DTYPES)))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_attend(name):
    """Over the formats each head size and each grouping meets each dtype; data with outliers too."""
    first = FORMAT_NAMES.index(name)
    sizes = [f"{turn(HEAD_DIMS, first + 3 * i)}:{turn(GROUPINGS, first + i)}" for i in range(3)]
    cases = [f"test_attend:{name}:{dtype}:{size}:normal" for dtype, size in zip(DTYPES, sizes, strict=True)]
    interpret(
        *cases,
        f"test_attend:{name}:fp16:64:{turn(GROUPINGS, first + 1)}:outlier",
        f"test_attend:{name}:bf16:64:2:2:extreme",
    )


@pytest.mark.parametrize("name", CODINGS)
def test_semantics(name):
    """Several query tokens, a sequence alone, strides, no room."""
    interpret(*(f"{test}:{name}" for test in ("test_tokens", "test_alone", "test_strides", "test_overflow")))


def test_wide_heads():
    interpret(
        *(f"test_attend:{name}:bf16:{head_dim}:6:1:normal" for name in ("int8", "int4_hq") for head_dim in (256, 1024))
    )
    interpret(*(f"test_append:{name}:bf16:{head_dim}" for name in ("int4", "int4_hq") for head_dim in (256, 1024)))


def test_exact_and_empty():
    interpret("test_exact:int8", "test_exact:int4", "test_empty", "test_plans", "test_levels")
