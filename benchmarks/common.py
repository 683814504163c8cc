"""Shared by the CPU benchmarks: geometries, data, the interface of a contender, the machine's description."""

from __future__ import annotations

import functools
import importlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

BASE_TOKENS = 4096
"""Longer caches repeat the first so many tokens: the exact answer stays the same, and preparing them stays cheap."""
COLD_BYTES = 256 << 20
"""What a cold contender rotates through; a run prints the read bandwidth around it to show that it is cold."""


@dataclass(frozen=True)
class Geometry:
    """One attention shape with the cache lengths that it is measured at."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (batch {self.batch}, {self.heads_q}/{self.heads_kv} heads, D {self.head_dim})"

    def cache_bytes(self, tokens: int, bits: float, row_extra: int = 0) -> int:
        """Keys and values at ``bits`` an element and ``row_extra`` bytes a row."""
        return int(2 * self.batch * self.heads_kv * tokens * (self.head_dim * bits / 8 + row_extra))


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("G1", 1, 8, 8, 128, (512, 2048, 8192, 32768)),
        Geometry("G2", 1, 24, 4, 256, (1024, 4096, 16384, 65536)),
        Geometry("G3", 8, 32, 8, 128, (512, 4096, 16384)),
    )
}


@functools.lru_cache(maxsize=2)
def attention_data(geometry: Geometry, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Query [B, Hq, D], key and value [B, Hkv, T, D] from N(0, 1), and float64 attention on them as float32."""
    generator = torch.Generator().manual_seed(0)
    batch, heads_kv, head_dim = geometry.batch, geometry.heads_kv, geometry.head_dim
    query = torch.randn(batch, geometry.heads_q, head_dim, generator=generator)
    key = torch.randn(batch, heads_kv, tokens, head_dim, generator=generator)
    value = torch.randn(batch, heads_kv, tokens, head_dim, generator=generator)
    grouped = query.unflatten(1, (heads_kv, -1)).double() / head_dim**0.5
    expected = torch.empty_like(query).unflatten(1, (heads_kv, -1))
    for row in range(batch):
        weights = torch.softmax(grouped[row] @ key[row].double().transpose(-1, -2), -1)
        expected[row] = (weights @ value[row].double()).float()
    return query, key, value, expected.flatten(1, 2).numpy()


@dataclass(frozen=True)
class Case:
    """One cell of the benchmark. ``footprint`` is what each contender rotates through; 0 keeps one buffer hot."""

    geometry: Geometry
    tokens: int
    threads: int
    footprint: int

    @property
    def mode(self) -> str:
        return "cold" if self.footprint else "hot"

    @property
    def base_tokens(self) -> int:
        return min(self.tokens, BASE_TOKENS)

    @property
    def query(self) -> torch.Tensor:
        return attention_data(self.geometry, self.base_tokens)[0]

    @property
    def key(self) -> torch.Tensor:
        """[B, Hkv, base_tokens, D]; :meth:`tiled` makes it as long as the case."""
        return attention_data(self.geometry, self.base_tokens)[1]

    @property
    def value(self) -> torch.Tensor:
        return attention_data(self.geometry, self.base_tokens)[2]

    @property
    def expected(self) -> np.ndarray:
        return attention_data(self.geometry, self.base_tokens)[3]

    def tiled(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [B, Hkv, base_tokens, ...] repeated to ``tokens``: a new contiguous tensor of torch's allocator."""
        return rows.repeat(1, 1, self.tokens // self.base_tokens, *[1] * (rows.dim() - 3))

    def copies(self, nbytes: int) -> int:
        """How many caches of ``nbytes`` are rotated."""
        return max(1, -(-self.footprint // nbytes))


@dataclass
class Contender:
    """One line of a case: ``calls`` are timed in turn, each reads another copy of a cache of ``nbytes``."""

    name: str
    bits: int
    nbytes: int
    calls: Sequence[Callable[[], Any]]
    output: Callable[[], np.ndarray] | None = None
    """The result of ``calls[0]`` as [B, Hq, D] float32; None where there is none to check."""
    note: str = ""
    settle: float = 0.0
    """Seconds for which its thread pool goes on spinning after a call: the next contender waits so long."""
    keep: list[Any] = field(default_factory=list)
    """What must outlive the calls."""


ERROR_LIMITS = {32: 1e-4, 16: 0.1, 8: 0.05, 4: 0.6}
"""Relative L2 error by bits above which an output is called wrong, not inaccurate (peers reach 0.019 and 0.35)."""


def result_of(call: Callable[[], torch.Tensor]) -> Callable[[], np.ndarray]:
    """The output of a contender whose call returns it as a tensor."""
    return lambda: call().float().numpy()


def relative_error(contender: Contender, case: Case) -> float | None:
    """Relative L2 error of the output against float64 attention on the unquantized data; None for the floor."""
    if contender.output is None:
        return None
    got = np.asarray(contender.output(), np.float64).reshape(case.expected.shape)
    return float(np.linalg.norm(got - case.expected) / np.linalg.norm(case.expected))


def read_text(path: str | Path, default: str = "") -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return default


def cache_size(level: int) -> int:
    """Bytes of the data or unified cache of that level as the system reports it for CPU 0; 0 where it does not."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if read_text(index / "level") == str(level) and read_text(index / "type") != "Instruction":
            size = read_text(index / "size")
            return int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1:], 0)
    return 0


def csv(text: str) -> list[str]:
    """An argument of comma-separated values."""
    return [part for part in text.split(",") if part]


def geometries(text: str) -> list[Geometry]:
    """An argument of comma-separated geometries by name."""
    return [GEOMETRIES[name] for name in csv(text)]


def command(module: str, argv: list[str] | None) -> str:
    """The command line of a benchmark as the record shows it: without where its output goes."""
    words = iter(sys.argv[1:] if argv is None else argv)
    kept = [word for word in words if word not in ("--json", "--picture") or next(words, None) is None]
    return shlex.join(["python", "-m", f"benchmarks.{module}", *kept])


def save(path: Path | None, run: dict[str, Any]) -> None:
    """As JSON, where a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run, indent=1) + "\n")


def kvq_isa() -> str:
    """The instruction set that kvq_ops runs on, or why that is unknown."""
    try:
        return str(importlib.import_module("kvq_ops").cpu_isa())
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # peers and floor run without our library
        return f"nothing: it does not import ({type(error).__name__})"


ISA_FLAGS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "sve"),
)


def machine() -> dict[str, Any]:
    """What a reader needs to know about the machine to judge the figures."""
    info = read_text("/proc/cpuinfo")
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "cpu": facts.get("model name", platform.processor() or platform.machine()),
        "family/model": "/".join(filter(None, (facts.get("cpu family"), facts.get("model")))),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "kvq_isa": kvq_isa(),
        "cpus": len(os.sched_getaffinity(0)),
        "virtual": "hypervisor" in flags,
        "l2": cache_size(2),
        "l3": cache_size(3),
        "governor": read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "unknown"),
        "huge_pages": read_text("/sys/kernel/mm/transparent_hugepage/enabled", "unknown"),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe(facts: dict[str, Any]) -> str:
    """The machine in two lines."""
    kind = "virtual machine, " if facts["virtual"] else ""
    return (
        f"{facts['cpu']} (family/model {facts['family/model']}), {kind}{facts['cpus']} CPUs, {' '.join(facts['isa'])}; "
        f"L2 {facts['l2'] >> 10} KiB, L3 {facts['l3'] >> 20} MiB as reported; governor {facts['governor']}\n"
        f"{facts['system']}, Python {facts['python']}, torch {facts['torch']}, kvq_ops on {facts['kvq_isa']}"
    )
