"""Finds and loads the compiled library, which defines the ops and their CPU kernels.

The library is a plain shared object over torch's stable ABI, without Python's: one file serves every Python, and
every torch from ``MIN_TORCH`` on. It lies beside this file; an editable install has a second folder, where pip put
what it built.
"""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from pathlib import Path

import torch

from .format import SCHEMA_VERSION

__all__ = ["LIBRARY", "MIN_TORCH", "library_path", "load"]

LIBRARY = "_kvq_ops.abi3.so"
SHIMS = "_kvq_shims.so"
"""Beside the library: what compiled packages call, in a library of its own that needs no other (csrc/shims)."""
MIN_TORCH = (2, 11)
"""The stable ABI that the library is built for; csrc/CMakeLists.txt sets the same."""

_OPS = ("append", "attend", "attend_lse", "cpu_isa", "schema_version")
_BUILD = "with torch installed, run `make build` in the checkout, or `pip install --no-build-isolation .` there"
_MACHINES = {"x86_64": 62, "aarch64": 183}
"""``e_machine`` in the header of a 64-bit ELF file by what ``platform.machine()`` says."""


def library_path() -> Path:
    """The compiled library's file. Raises ``ImportError`` where there is none."""
    candidates = _candidates()
    for path in (*candidates, *_named_after_namespaces()):
        if path.is_file():
            return path
    raise _error(candidates, "nothing", _BUILD)


def load(namespace: str) -> Path:
    """Loads the library into torch, once a process, and returns its path; ``namespace`` is that of its ops.

    Raises ``ImportError`` that says what was looked for, what was found and what to do."""
    problem = torch_problem(torch.__version__)
    if problem is not None:
        raise _error(_candidates(), problem, "install torch>={}.{}".format(*MIN_TORCH))
    path = library_path()
    try:
        problem = file_problem(path)
        if problem is None:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        problem = f"a file that does not load: {error.__cause__ or error}"  # torch hides the loader's words there
    if problem is not None:
        raise _error([path], problem, _BUILD)
    ops = getattr(torch.ops, namespace)
    absent = [f"{namespace}::{name}" for name in _OPS if not hasattr(ops, name)]
    if absent:
        raise _error([path], f"a library of another version, without {', '.join(absent)}", _BUILD)
    version = ops.schema_version()
    if version != SCHEMA_VERSION:
        raise _error([path], f"a library of schema version {version}; these sources are of {SCHEMA_VERSION}", _BUILD)
    if path.name == LIBRARY:  # a build for the Hub has no shims
        _open_shims(path)
    return path


def _open_shims(path: Path) -> None:
    """Lets compiled packages find the library's C functions, without putting torch's own names before those of other
    extension modules, as opening the library itself with ``RTLD_GLOBAL`` would."""
    shims = path.with_name(SHIMS)
    try:
        door = ctypes.CDLL(str(shims), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _error([shims], f"nothing that loads: {error}", _BUILD) from None
    library = ctypes.CDLL(str(path))
    names = ("append", "attend", "attend_lse")
    door.kvq_open_shims(*(ctypes.cast(library[f"aoti_torch_cpu_{name}"], ctypes.c_void_p) for name in names))


def torch_problem(version: str) -> str | None:
    """What is wrong with torch ``version``, or None."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) >= MIN_TORCH:
        return None
    return "torch {}, too old: the library needs torch {}.{} or newer".format(version, *MIN_TORCH)


def file_problem(path: Path) -> str | None:
    """What the file's header says is wrong with it, or None. The loader cannot be asked: it dies of a file that was
    cut short, and calls another processor's "No such file or directory"."""
    with path.open("rb") as file:
        header = file.read(64)
    size = path.stat().st_size
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return f"a file of {size} bytes that is no shared object"
    machine, here = int.from_bytes(header[18:20], "little"), platform.machine()
    if here in _MACHINES and machine != _MACHINES[here]:
        names = {number: name for name, number in _MACHINES.items()}
        return f"a library for {names.get(machine, f'ELF machine {machine}')}, and this machine is {here}"
    sections = int.from_bytes(header[40:48], "little")
    end = sections + int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
    if size < end:
        return f"a library cut short: {size} of {end} bytes"
    return None


def _candidates() -> list[Path]:
    package = sys.modules[__name__.rpartition(".")[0]]
    folders = dict.fromkeys([Path(__file__).parent, *map(Path, package.__path__)])
    return [folder / LIBRARY for folder in folders]


def _named_after_namespaces() -> list[Path]:
    """Libraries of a build for the Hugging Face Hub: one, called like its ops' namespace."""
    return sorted(Path(__file__).parent.glob("_kvq_ops_*.abi3.so"))


def _error(looked_for: list[Path], found: str, to_do: str) -> ImportError:
    paths = "\n              ".join(map(str, looked_for))
    return ImportError(
        f"kvq_ops cannot work without its compiled library\n  looked for: {paths}\n  found: {found}\n  to do: {to_do}",
        name="kvq_ops",
        path=str(looked_for[0]),
    )
