"""The wheel: what is in it, and that it works where the checkout is not."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import kvq_ops, torch
ones = torch.ones(1, 1, 64)
cache = kvq_ops.QuantizedKVCache(1, 1, 64, 8, dtype=torch.float32)
cache.append(ones, ones)
print(cache.attend(ones).mean().item())
print(kvq_ops.library_path())
"""


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel(tmp_path):
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps"]
    run(*pip, f"--config-settings=build-dir={tmp_path / 'build'}", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("kvq_ops-0.1.0-cp310-abi3-linux_")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    files = {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvq_ops").rglob("*.py")}
    built = {"kvq_ops/_kvq_ops.abi3.so", "kvq_ops/_kvq_shims.so", "kvq_ops/py.typed"}
    assert {name for name in files if "dist-info" not in name} == sources | built
    metadata = (tmp_path / "site/kvq_ops-0.1.0.dist-info/METADATA").read_text()
    assert "Requires-Dist: torch>=2.11\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    mean, library = run(sys.executable, "-c", USE, PYTHONPATH=str(tmp_path / "site")).split()
    assert abs(float(mean) - 1) < 2e-4
    assert library == str(tmp_path / "site/kvq_ops/_kvq_ops.abi3.so")
