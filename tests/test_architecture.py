"""The floors: a module imports only from lower ones, and what is small stays small. CONTRIBUTING.md says why."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first. A name is a module or a package of kvq_ops; those of one floor do not know each other.
PYTHON_FLOORS = [
    {"format", "schemas"},
    {"reference"},
    {"checks"},
    {"meta", "cuda", "native"},
    {"_ops"},
    {"ops"},
    {"cache"},
    {"integrations", "layers"},
    {"__init__"},
]
# Lowest first, as patterns of paths in csrc; the first that fits counts. Headers of one floor may include each other.
CPP_FLOORS = [
    r"format\.h|cpu/(params|half)\.h",
    r"cpu/simd_\w+\.h|cpu/key_\w+-inl\.h",
    r"cpu/\w+-inl\.h",
    r"cpu/isa_\w+\.cpp",
    r"cpu/\w+\.(h|cpp)",
    r"checks\.h",
    r"(?!library\.)\w+\.(h|cpp)",
    r"library\.cpp|shims/\w+\.cpp",
]
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2)/")


def floor_of_module(name: str) -> int:
    floors = [floor for floor, names in enumerate(PYTHON_FLOORS) if name in names]
    assert floors, f"kvq_ops.{name} has no floor: give it one here and in CONTRIBUTING.md"
    return floors[0]


def imports(path: Path, package: Path) -> Iterator[str]:
    """Every absolute name that ``path`` imports, wherever in the file: ``a.b`` for ``import a.b``, ``from a import b``
    and the relative spellings."""
    here = ["kvq_ops", *path.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def python_violations(package: Path) -> list[str]:
    found = []
    modules = {path.stem for path in package.glob("*.py")} | {path.name for path in package.iterdir() if path.is_dir()}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        floor = floor_of_module(name)
        for imported in imports(path, package):
            parts = imported.split(".")
            if parts[0] != "kvq_ops":
                continue
            target = parts[1] if len(parts) > 1 and parts[1] in modules else "__init__"
            if target != name and floor_of_module(target) >= floor:
                found.append(f"{path.relative_to(package)} imports {imported}")
    return found


def floor_of_file(path: str) -> int:
    floors = [floor for floor, pattern in enumerate(CPP_FLOORS) if re.fullmatch(pattern, path)]
    assert floors, f"csrc/{path} has no floor: give it one here and in CONTRIBUTING.md"
    return floors[0]


def cpp_violations(csrc: Path) -> list[str]:
    found = []
    for path in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp")]):
        name = path.relative_to(csrc).as_posix()
        floor = floor_of_file(name)
        for quoted, included in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', path.read_text(), re.MULTILINE):
            if TORCH_HEADER.match(included) and (name.startswith("cpu/") or name == "format.h"):
                found.append(f"{name} includes {included}")
            if quoted != '"':
                continue
            beside, rooted = path.parent / included, csrc / included
            target = (beside if beside.is_file() else rooted).resolve()
            assert target.is_file(), f"{name} includes {included}, which is not in csrc"
            lower = target.relative_to(csrc.resolve()).as_posix()
            if floor_of_file(lower) > floor or not lower.endswith(".h"):
                found.append(f"{name} includes {lower}")
    return found


def test_python_floors():
    assert python_violations(ROOT / "kvq_ops") == []


def test_cpp_floors():
    assert cpp_violations(ROOT / "kvq_ops/csrc") == []


def test_format_uses_the_standard_library_only():
    names = {name.partition(".")[0] for name in imports(ROOT / "kvq_ops/format.py", ROOT / "kvq_ops")}
    assert names <= sys.stdlib_module_names


def test_imports_of_itself_are_relative():
    """A build for the Hugging Face Hub is the same sources under another name."""
    package, found = ROOT / "kvq_ops", []
    for path in sorted(package.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        found += [path.name for name in names if name.partition(".")[0] == "kvq_ops"]
    assert found == []


def test_only_one_module_names_the_namespace():
    """In a build for the Hugging Face Hub it is another; ``kvq::append`` in messages is the op's name for people."""
    package = ROOT / "kvq_ops"
    named = r"ops\.kvq\b|(Library|register_\w+|getattr|load)\(\s*(torch\.ops, )?f?[\"']kvq\b"
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    code = {name: re.sub(r'"""(?s:.*?)"""', "", text) for name, text in texts.items()}
    assert {name for name, text in code.items() if re.search(named, text)} == {"_ops.py"}


def test_no_numpy():
    """torch works without it, and so does kvq_ops."""
    package = ROOT / "kvq_ops"
    users = [path.name for path in package.rglob("*.py") for name in imports(path, package) if name.startswith("numpy")]
    assert users == []


def long_functions(path: Path) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if node.end_lineno - node.lineno >= 60]


def test_files_are_short():
    folders = ["kvq_ops", "tests", "examples", "benchmarks", "hub"]
    sources = [
        path for folder in folders for ext in ("py", "h", "cpp", "c") for path in (ROOT / folder).rglob(f"*.{ext}")
    ]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources}
    assert {name: count for name, count in lines.items() if count >= 500} == {}


def test_python_functions_are_short():
    """Under 60 lines."""
    sources = [path for folder in ("kvq_ops", "tests", "examples", "hub") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): names for path in sources if (names := long_functions(path))}
    assert found == {}


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("reference.py", "from kvq_ops import ops", "reference.py imports kvq_ops.ops"),
        ("reference.py", "import kvq_ops.cache", "reference.py imports kvq_ops.cache"),
        ("reference.py", "from .checks import x", "reference.py imports kvq_ops.checks.x"),
        ("checks.py", "def f():\n    from kvq_ops import append", "checks.py imports kvq_ops.append"),
        ("meta/attend.py", "from ..native import load", "meta/attend.py imports kvq_ops.native.load"),
        ("meta/attend.py", "from kvq_ops.meta import append\nfrom kvq_ops import checks", None),
        ("ops.py", "from kvq_ops import checks, meta, native", None),
    ],
)
def test_python_floors_are_enforced(tmp_path, path, text, said):
    for name in ("checks", "ops", "cache", "native", "meta/append"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    (tmp_path / path).write_text(text)
    assert python_violations(tmp_path) == ([said] if said else [])


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("cpu/simd_avx2.h", '#include "kernels-inl.h"', "cpu/simd_avx2.h includes cpu/kernels-inl.h"),
        ("cpu/simd_avx2.h", '#include "key_i16-inl.h"', None),
        ("cpu/key_i16-inl.h", '#include "kernels-inl.h"', "cpu/key_i16-inl.h includes cpu/kernels-inl.h"),
        ("cpu/dispatch.cpp", '#include "checks.h"', "cpu/dispatch.cpp includes checks.h"),
        ("cpu/dispatch.cpp", '#include "isa_avx2.cpp"', "cpu/dispatch.cpp includes cpu/isa_avx2.cpp"),
        ("cpu/params.h", "#include <torch/csrc/stable/tensor.h>", "cpu/params.h includes torch/csrc/stable/tensor.h"),
        ("append.cpp", '#include "cpu/params.h"\n#include <torch/csrc/stable/tensor.h>', None),
        ("cpu/isa_avx2.cpp", '#include "kernels-inl.h"', None),
    ],
)
def test_cpp_floors_are_enforced(tmp_path, path, text, said):
    (tmp_path / "cpu").mkdir()
    for name in ("checks.h", "cpu/params.h", "cpu/kernels-inl.h", "cpu/key_i16-inl.h", "cpu/isa_avx2.cpp"):
        (tmp_path / name).touch()
    (tmp_path / path).write_text(text)
    assert cpp_violations(tmp_path) == ([said] if said else [])
