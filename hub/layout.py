"""Lays out the repository of the Hub's kernel: the sources that kernel-builder builds, and builds of this checkout.

    python -m hub.layout build/hub

writes ``build.toml``, ``flake.nix``, ``CARD.md``, ``LICENSE``, ``csrc`` and ``torch-ext`` (the package without the
pip package's ``_ops.py``: a build has its own), and ``build/<variant>`` as ``kernels.get_local_kernel`` loads it: one
with the CPU kernels, linked from the objects of ``make build``, and one of Python alone for CUDA.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGE, NATIVE = ROOT / "kvq_ops", ROOT / "build/native"
NAME, VERSION, LICENSE, STABLE_ABI = "kvq-ops", 1, "Apache-2.0", "211"
"""As build.toml has them; tests/test_hub.py holds the two together."""
OPS = '''"""The ops of this build and their namespace."""

import torch
{load}
ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
'''
"""What stands in the place of the pip package's ``_ops.py``."""


def sources() -> Iterator[tuple[str, Path]]:
    """What kernel-builder needs, by its place in the repository."""
    for name in ("build.toml", "flake.nix", "CARD.md", "torch-ext/torch_binding.cpp"):
        yield name, ROOT / "hub" / name
    yield "LICENSE", ROOT / "LICENSE"
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "_ops.py":
            yield f"torch-ext/kvq_ops/{path.relative_to(PACKAGE).as_posix()}", path
    for path in sorted([*PACKAGE.glob("csrc/**/*.h"), *PACKAGE.glob("csrc/**/*.cpp")]):
        if "shims" not in (path.stem, path.parent.name):  # functions of one name each: only the pip package has them
            yield path.relative_to(PACKAGE).as_posix(), path


def namespace(backend: str) -> str:
    """Of the ops of these sources for a backend: in the form that kernel-builder gives it."""
    digest = hashlib.sha256()
    for name, path in sources():
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"_kvq_ops_{backend}_{digest.hexdigest()[:7]}"


def compile_library(target: Path, name: str) -> None:
    """The compiled library of ``make build``, with its ops in namespace ``name`` and as a module of that name: two
    sources are compiled anew, the other objects are linked as they are."""
    database = NATIVE / "compile_commands.json"
    if not database.is_file():
        raise SystemExit(f"hub.layout: {database} must exist, got nothing: run `make build` first")
    entries = {Path(entry["file"]): shlex.split(entry["command"]) for entry in json.loads(database.read_text())}
    command = entries[PACKAGE / "csrc/library.cpp"]
    flags = command[1 : command.index("-o")]
    includes = [f"-I{sysconfig.get_path('include')}", "-DPy_LIMITED_API=0x030a0000", f"-DTORCH_EXTENSION_NAME={name}"]
    replaced = ("library.cpp.o", "shims.cpp.o", "forward.cpp.o")
    objects = [path for path in NATIVE.glob("CMakeFiles/*/**/*.o") if path.name not in replaced]
    for source in (PACKAGE / "csrc/library.cpp", ROOT / "hub/torch-ext/torch_binding.cpp"):
        objects.append(target.with_suffix(f".{source.stem}.o"))
        subprocess.run([command[0], *flags, *includes, "-c", source, "-o", objects[-1]], check=True)
    libtorch = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    subprocess.run([command[0], "-shared", "-o", target, "-Wl,--no-as-needed", *objects, libtorch], check=True)
    for scratch in objects[-2:]:
        scratch.unlink()


def digest(variant: Path) -> dict[str, Any]:
    files = sorted(path for path in variant.rglob("*") if path.is_file() and path.name != "metadata.json")
    hashes = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }
    return {"algorithm": "sha256", "files": hashes}


def lay_out_variant(variant: Path, backend: str) -> None:
    """A build as the loader takes it: the package's Python, an ``_ops.py`` of its own, ``metadata.json``."""
    name = namespace(backend)
    ignored = shutil.ignore_patterns("csrc", "__pycache__", "*.so", "_ops.py")
    shutil.copytree(PACKAGE, variant, ignore=ignored)
    compiled = backend == "cpu"
    if compiled:
        compile_library(variant / f"{name}.abi3.so", name)
    load = f"\nfrom . import {name}\n" if compiled else ""
    (variant / "_ops.py").write_text(OPS.format(load=load, namespace=name))
    metadata = {
        "name": NAME,
        "id": name,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": digest(variant),
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def lay_out(out: Path) -> None:
    """The whole repository in ``out``, which must not exist or be one laid out before."""
    if out.exists() and not (out / "build.toml").is_file():
        raise SystemExit(f"hub.layout: out must be a new folder or one laid out before, got {out}")
    for name in ("build", "csrc", "torch-ext"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name, path in sources():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out / name)
    machine = f"{platform.machine()}-{platform.system().lower()}"
    lay_out_variant(out / f"build/torch-stable-abi{STABLE_ABI}-cpu-{machine}", "cpu")
    lay_out_variant(out / "build/torch-cuda", "cuda")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build/hub", help="default: build/hub")
    lay_out(parser.parse_args(arguments).out)


if __name__ == "__main__":
    main()
