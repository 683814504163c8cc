"""The transformers tests under the oldest version that is supported; every other run has the newest, in .venv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLDEST = "5.18.0"
FOLDER = ROOT / "build" / f"transformers-{OLDEST}"
FILES = ["tests/test_transformers_cache.py", "tests/test_transformers.py"]


def run(*arguments: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def oldest() -> None:
    if not (FOLDER / "transformers").is_dir():
        pytest.skip(f"transformers {OLDEST} is not in {FOLDER.relative_to(ROOT)}: no package index had it for `make`")
    assert run("-c", "import transformers; print(transformers.__version__)").split() == [OLDEST]


@pytest.mark.usefixtures("oldest")
@pytest.mark.parametrize("chosen", ["not compiled", pytest.param("compiled", marks=pytest.mark.slow)])
def test_oldest(chosen: str) -> None:
    said = run("-m", "pytest", "-q", "-p", "no:xdist", "-k", chosen, *FILES)
    assert re.search(r"^\d+ passed", said, re.MULTILINE)
    assert " skipped" not in said


def test_oldest_is_what_make_installs() -> None:
    assert f"OLDEST_TRANSFORMERS := {OLDEST}\n" in (ROOT / "Makefile").read_text()
