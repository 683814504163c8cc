"""The instruction sets: each that this machine runs, by name, passes the tests of the ops; the rest are refused."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
from common import ROOT, run_python

import kvq_ops

# What /proc/cpuinfo must say; None: whatever it says.
NEEDS = {
    "x86_64": {
        "scalar": "",
        "avx2": "avx2 fma f16c",
        "avx512": "avx2 fma f16c avx512f avx512bw avx512dq avx512vl",
        "avx512_vnni": "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni",
    },
    "aarch64": {"scalar": "", "neon": "asimd", "neon_dot": "asimd asimddp"},
}
OURS = NEEDS.get(platform.machine(), {"scalar": ""})
OTHERS = sorted({name for names in NEEDS.values() for name in names} - set(OURS))

# The tests of test_append.py and test_attend.py that reach every loop of a kernel, tails and specials included.
SELECTED = (
    "bytes_equal or hostile or strided_rows or head_dims or several_tokens or len65 or poisoned_row_stays or exact"
)

SUITE = """
import sys, pytest, kvq_ops
assert kvq_ops.cpu_isa() == sys.argv[1], kvq_ops.cpu_isa()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", sys.argv[2], *sys.argv[3:]]))
"""


def runs_here(name: str) -> bool:
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)[1].split())
    return set(OURS[name].split()) <= flags


RUNNABLE = [name for name in OURS if runs_here(name)]


def refusal(name: str) -> str:
    return f"kvq: KVQ_CPU_ISA must name an instruction set of this processor ({', '.join(RUNNABLE)}), got '{name}'"


def test_the_best_is_chosen():
    run = run_python("import kvq_ops; print(kvq_ops.cpu_isa())", KVQ_CPU_ISA="")
    assert run.stdout.strip() == RUNNABLE[-1], run.stderr
    assert kvq_ops.cpu_isa() in RUNNABLE


@pytest.mark.parametrize("name", OURS)
def test_forced(name):
    if name not in RUNNABLE:
        run = run_python("import kvq_ops; kvq_ops.cpu_isa()", KVQ_CPU_ISA=name)
        assert run.stderr.splitlines()[-1] == f"RuntimeError: {refusal(name)}"
        pytest.skip(f"this processor does not run {name}")
    files = [str(ROOT / "tests" / file) for file in ("test_append.py", "test_attend.py")]
    run = run_python(SUITE, name, SELECTED, *files, KVQ_CPU_ISA=name, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 400


LOUD = """
import kvq_ops, torch
cache, x = kvq_ops.QuantizedKVCache(1, 1, 8, 4), torch.zeros(1, 1, 8)
for call in (kvq_ops.cpu_isa, lambda: cache.append(x, x), lambda: cache.attend(x)):
    try:
        call()
    except RuntimeError as error:
        print(error)
assert cache.lengths.item() == 0
"""


@pytest.mark.parametrize("name", ["nonsense", "AVX2", *OTHERS])
def test_unknown_names_are_loud(name):
    run = run_python(LOUD, KVQ_CPU_ISA=name)
    assert run.stdout.splitlines() == [refusal(name)] * 3, run.stderr
