"""The machine's read and copy bandwidth: bandwidth.c, compiled on first use into benchmarks/.cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("bandwidth.c")
ALIGNMENT = 64


def compiler() -> str | None:
    """The C compiler: ``$CC``, else cc, gcc or clang; None where there is none."""
    found = (shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    return next(filter(None, found), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled bandwidth.c; one file for each source and machine."""
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([*flags, platform.node()]).encode()).hexdigest()[:16]
    path = SOURCE.parent / ".cache" / f"bandwidth-{key}.so"
    if not path.exists():
        cc = compiler()
        if cc is None:
            raise RuntimeError("no C compiler found for the bandwidth measurement: set CC or install gcc")
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        subprocess.run([cc, *flags, "-o", str(partial), str(SOURCE)], check=True)
        partial.replace(path)
    loaded = ctypes.CDLL(str(path))
    loaded.kvq_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    loaded.kvq_read.restype = ctypes.c_uint64
    loaded.kvq_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    loaded.kvq_copy.restype = None
    return loaded


def arena(nbytes: int) -> torch.Tensor:
    """``nbytes`` of written memory from torch's allocator, where caches live too, aligned for the read."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:nbytes].fill_(1)


def read_by_footprint(threads: int, footprints: Iterable[int], window: int = 8 << 20) -> dict[int, float]:
    """Median read bandwidth in GB/s by footprint: at most ``window`` bytes a call, walking through the footprint.

    Shows from which footprint on reads come from memory, whatever the caches say they hold."""
    read, result = library().kvq_read, {}
    for footprint in footprints:
        memory = arena(footprint)
        nbytes = min(window, footprint)
        starts = range(memory.data_ptr(), memory.data_ptr() + footprint - nbytes + 1, nbytes)
        seconds = []
        for round_ in range(1 + max(2, 64 // len(starts))):
            for start in starts:
                begin = time.perf_counter()
                read(start, nbytes, threads)
                if round_:
                    seconds.append(time.perf_counter() - begin)
        result[footprint] = nbytes / statistics.median(seconds) / 1e9
    return result
