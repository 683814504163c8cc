"""The compiled library: what it asks of torch, how it is found, and what its absence says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import run_python

import kvq_ops
from kvq_ops import native
from kvq_ops.format import SCHEMA_VERSION
from kvq_ops.native import LIBRARY, MIN_TORCH, SHIMS, file_problem, library_path, torch_problem

ROOT = Path(__file__).parents[1]
PUBLIC = [
    "C_SHIMS",
    "FORMATS",
    "PACKAGE_METADATA",
    "AttentionReport",
    "CacheFormat",
    "QuantizedKVCache",
    "RewriteReport",
    "SideFormat",
    "append",
    "attend",
    "check_package",
    "cpu_isa",
    "get_format",
    "kvq_attention",
    "layers",
    "library_path",
    "quantize_kv_storage",
]


def binutil(name: str, *arguments: str | Path) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def test_public_names():
    assert kvq_ops.__all__ == PUBLIC
    assert all(hasattr(kvq_ops, name) for name in PUBLIC)
    assert kvq_ops.__version__ == "0.1.0"


def test_library_path_is_what_torch_loaded():
    path = kvq_ops.library_path()
    assert path.name == LIBRARY
    assert str(path.resolve()) in torch.ops.loaded_libraries


def test_oldest_torch_is_one_number():
    cmake = (ROOT / "kvq_ops/csrc/CMakeLists.txt").read_text()
    target = int(re.search(r"TORCH_TARGET_VERSION=(0x\w+)", cmake)[1], 16)
    assert (target >> 56, target >> 48 & 255) == MIN_TORCH
    assert "torch_version VERSION_LESS {}.{})".format(*MIN_TORCH) in cmake
    assert '"torch>={}.{}"'.format(*MIN_TORCH) in (ROOT / "pyproject.toml").read_text()


def test_only_stable_symbols_of_torch():
    symbols = binutil("nm", "-D", "--undefined-only", "--demangle", library_path()).splitlines()
    names = [line.split(maxsplit=1)[1] for line in symbols]
    assert any(name.startswith("aoti_torch_") for name in names), "the library calls no torch: is nm read right?"
    assert [name for name in names if re.search(r"\b(at|c10|caffe2|torch)::", name)] == []


def test_nothing_but_torch_is_exported():
    """A symbol of ours that another library also defines would be replaced by it, or replace it: none but what compiled
    packages call."""
    symbols = binutil("nm", "-D", "--defined-only", "--demangle", library_path()).splitlines()
    assert {line.split()[-1] for line in symbols} == {
        f"aoti_torch_cpu_{op}" for op in ("append", "attend", "attend_lse")
    }


def test_torch_stays_out_of_the_global_scope():
    """Where its names would come before those that other extension modules carry with them; of ours three are there."""
    code = """
import ctypes, kvq_ops
everyone = ctypes.CDLL(None)
names = ("aoti_torch_cpu_append", "aoti_torch_cpu_attend", "aoti_torch_cpu_attend_lse", "aoti_torch_new_tensor_handle")
print([hasattr(everyone, name) for name in names])
"""
    run = run_python(code)
    assert run.stdout == "[True, True, True, False]\n", run.stderr


def test_needs_torch_and_names_no_folder():
    dynamic = binutil("readelf", "-d", "-W", library_path())
    assert "libtorch_cpu.so" in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) == []


def test_isa_objects_share_no_code():
    """Of a weak function that several files define the linker keeps one: from an ISA's file it would be an illegal
    instruction on processors without that ISA. So such a file shares no function with another."""
    objects = sorted((ROOT / "build/native/CMakeFiles").rglob("*.o"))
    if not objects:
        pytest.skip("build/native holds no objects: the library was not built by `make build`")
    weak = {}
    for path in objects:
        symbols = [line.split()[-2:] for line in binutil("nm", "--defined-only", path).splitlines()]
        weak[path.name] = {name for kind, name in symbols if kind in "WVu"}
    isas = [name for name in weak if name.startswith("isa_")]
    assert len(isas) > 1
    assert any(weak.values()), "no object has a weak symbol: is nm read right?"
    shared = {(isa, other): weak[isa] & weak[other] for isa in isas for other in weak if other != isa}
    assert {files: names for files, names in shared.items() if names} == {}


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git0123", "2.13.0+cpu", "3.0.1"])
def test_torch_new_enough(version):
    assert torch_problem(version) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.9.1+cu128", "1.13.0", "unknown"])
def test_torch_too_old(version):
    assert torch_problem(version) == f"torch {version}, too old: the library needs torch 2.11 or newer"


@pytest.fixture
def bare_package(tmp_path: Path) -> Path:
    """The package's Python files without a library."""
    package = tmp_path / "kvq_ops"
    shutil.copytree(ROOT / "kvq_ops", package, ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__"))
    return package


def import_error(package: Path) -> str:
    """The last words of a Python that imports ``package``."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import kvq_ops"]
    run = subprocess.run(command, check=False, cwd=package.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert run.stderr.count("Traceback") == 1, run.stderr
    return run.stderr[run.stderr.index("ImportError") :]


def message(package: Path, found: str) -> str:
    to_do = "with torch installed, run `make build` in the checkout, or `pip install --no-build-isolation .` there"
    return (
        "ImportError: kvq_ops cannot work without its compiled library\n"
        f"  looked for: {package / LIBRARY}\n"
        f"  found: {found}\n"
        f"  to do: {to_do}\n"
    )


def test_library_missing(bare_package):
    assert import_error(bare_package) == message(bare_package, "nothing")


def test_shims_missing(bare_package):
    """The second library, which compiled packages need."""
    shutil.copy(library_path(), bare_package / LIBRARY)
    said = import_error(bare_package)
    assert f"looked for: {bare_package / SHIMS}\n  found: nothing that loads: " in said


def test_library_is_no_library(bare_package):
    (bare_package / LIBRARY).write_bytes(b"garbage" * 100)
    assert import_error(bare_package) == message(bare_package, "a file of 700 bytes that is no shared object")


def test_loader_refuses_library(bare_package):
    """Whatever else is wrong, the error holds the loader's own words."""
    library = bytearray(library_path().read_bytes())
    library[56:58] = bytes(2)  # e_phnum: no program headers
    (bare_package / LIBRARY).write_bytes(library)
    loader = re.escape(f"{bare_package / LIBRARY}: ") + "object file has no .*"
    pattern = re.escape(message(bare_package, "a file that does not load: LOADER")).replace("LOADER", loader)
    assert re.fullmatch(pattern, import_error(bare_package))


@pytest.mark.parametrize("size", [0, 63, 64, 4096, -1])
def test_library_cut_short(tmp_path, size):
    """A file cut short must be told from the header: the loader dies of it."""
    whole = library_path().read_bytes()
    part = tmp_path / LIBRARY
    part.write_bytes(whole[:size])
    assert file_problem(library_path()) is None
    bytes_left = len(whole[:size])
    if bytes_left < 64:
        assert file_problem(part) == f"a file of {bytes_left} bytes that is no shared object"
    else:
        assert file_problem(part) == f"a library cut short: {bytes_left} of {len(whole)} bytes"


def test_library_of_another_processor(tmp_path):
    header = bytearray(library_path().read_bytes())
    here, other = {62: ("x86_64", 183), 183: ("aarch64", 62)}[header[18]]
    header[18] = other
    path = tmp_path / LIBRARY
    path.write_bytes(header)
    name = {62: "x86_64", 183: "aarch64"}[other]
    assert file_problem(path) == f"a library for {name}, and this machine is {here}"


def test_library_of_another_schema_version(monkeypatch):
    assert torch.ops.kvq.schema_version() == SCHEMA_VERSION
    monkeypatch.setattr(native, "SCHEMA_VERSION", 1000)
    said = f"found: a library of schema version {SCHEMA_VERSION}; these sources are of 1000\n"
    with pytest.raises(ImportError, match=said):
        native.load("kvq")


def test_library_of_another_version(bare_package):
    """A library that loads but defines other ops, such as one left by an older checkout."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c++", "-o", bare_package / LIBRARY, "-"],
        input="int nothing;",
        text=True,
        check=True,
    )
    ops = "kvq::append, kvq::attend, kvq::attend_lse, kvq::cpu_isa, kvq::schema_version"
    assert import_error(bare_package) == message(bare_package, f"a library of another version, without {ops}")
