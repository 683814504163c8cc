"""The kernels without torch: every ISA that this machine runs under sanitizers, NEON in an emulator."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "kvq_ops" / "csrc"
HARNESS = ROOT / "tests" / "native"
BUILD = ROOT / "build"
QEMU = shutil.which("qemu-aarch64")
CROSS = shutil.which("aarch64-linux-gnu-g++")


def build_harness(folder: Path, *options: str) -> Path:
    """Configures and builds in a folder that stays, so that a second run compiles nothing; one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder, *options)


def _build(folder: Path, *options: str) -> Path:
    tools = Path(sys.executable).parent
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        pytest.skip("cmake is not installed")
    environment = {**os.environ, "PATH": path}
    place = ["-S", str(CSRC), "-B", str(folder), "-G", "Ninja"]
    configure = [cmake, *place, "-DKVQ_TORCH=OFF", f"-DKVQ_HARNESS={HARNESS}"]
    for command in ([*configure, *options], [cmake, "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "kvq_harness"


def run_harness(command: list[str], isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "--quick"], capture_output=True, text=True, env={**os.environ, "KVQ_CPU_ISA": isa}, check=False
    )


@pytest.fixture(scope="session")
def sanitized() -> Path:
    return build_harness(BUILD / "sanitize", "-DKVQ_SANITIZE=address,undefined")


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512_vnni", "neon", "neon_dot"])
def test_native_sanitized(sanitized: Path, isa: str) -> None:
    done = run_harness([str(sanitized)], isa)
    if "must name an instruction set of this processor" in done.stderr:
        pytest.skip(f"{platform.machine()} processor without {isa}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{isa}: ")


@pytest.fixture(scope="session")
def emulated() -> Path:
    if QEMU is None or CROSS is None:
        pytest.skip("needs qemu-aarch64 and aarch64-linux-gnu-g++")
    return build_harness(
        BUILD / "aarch64",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={CROSS}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )


@pytest.mark.parametrize("isa", ["neon", "neon_dot"])
def test_neon_emulated(emulated: Path, isa: str) -> None:
    done = run_harness([str(QEMU), "-cpu", "max", str(emulated)], isa)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{isa}: ")
