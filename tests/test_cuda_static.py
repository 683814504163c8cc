"""The CUDA kernels through Triton's ahead-of-time compiler, without a GPU: what benchmarks/GPU_STATIC.md lists, held to
budgets. A core set on two architectures; every shipped configuration on six is marked slow."""

from __future__ import annotations

import platform
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from common import ROOT

from benchmarks import gpu_static
from kvq_ops import get_format

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: nothing compiles CUDA kernels"),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="triton's wheel for this machine may lack NVIDIA's tools"
    ),
]
REGISTERS = 255
"""Of a thread: all that there are, since none may spill. The two kernels that only move data stay under 64."""


@pytest.fixture(autouse=True)
def fusion(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns that its default will change


def hold(report: gpu_static.Report) -> None:
    case = report.case
    if case.head_dim <= 512 or not get_format(case.format).key.key_block:  # GPU_STATIC.md says what spills there
        assert report.stack == 0
        assert report.local == 0
    assert report.registers <= (64 if case.kernel in ("finish", "combine") else REGISTERS)
    assert report.shared <= gpu_static.SHARED_LIMIT[report.arch] * 1024
    assert report.blocks >= 1
    if case.kernel != "attend":
        return
    assert report.products >= 8
    assert report.conversions == 0 or case.head_dim % 64
    if case.head_dim % 64 == 0:
        assert report.wide_loads >= 4


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", gpu_static.CORE, ids=lambda case: case.name)
def test_core(case, arch):
    hold(gpu_static.compiled(case, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(gpu_static.SHARED_LIMIT))
@pytest.mark.parametrize("case", gpu_static.shipped(), ids=lambda case: case.name)
def test_shipped(case, arch):
    hold(gpu_static.compiled(case, arch))


def test_the_tools_see_what_they_look_for(tmp_path):
    """A kernel that converts integers and spills is caught."""
    source = """
import triton, triton.language as tl
@triton.jit
def bad(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.cumsum(tl.load(x + at).to(tl.float32), 0))
"""
    path = tmp_path / "bad.py"
    path.write_text(source)
    import importlib.util

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location("bad", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = ASTSource(module.bad, {"x": "*i32", "out": "*fp32", "N": "constexpr"}, {(2,): 65536}, {})
    result = triton.compile(made, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})
    _, stack, opcodes, _ = gpu_static.inspect(result.asm["cubin"])
    assert stack > 0
    assert any(name.startswith("I2F") for name in opcodes)
    assert any(name.startswith(("LDL", "STL")) for name in opcodes)


def test_the_table_is_of_these_configurations():
    text = (ROOT / "benchmarks/GPU_STATIC.md").read_text()
    assert "Nothing in it was run on a GPU" in text
    listed = set(re.findall(r"^\| ((?:attend|append|finish|combine) [^|]+?) \| \d", text, re.MULTILINE))
    assert listed == {case.name for case in gpu_static.shipped()}
    assert Path(gpu_static.__file__).name in text
