"""What Triton's ahead-of-time compiler makes of the CUDA kernels, with no GPU: registers, shared memory, instructions.

    python -m benchmarks.gpu_static --write benchmarks/GPU_STATIC.md  # every shipped configuration, every architecture
    python -m benchmarks.gpu_static --core    # the set that CI compiles

Nothing here runs on a GPU, and nothing is a time.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kvq_ops.format import FORMATS, get_format

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Of a block, KiB, by compute capability."""
SHARED_SM = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""Of a multiprocessor, KiB; a block costs 1 KiB more than it asks for."""
THREADS_SM = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
REGISTERS_SM = 65536
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Case:
    """One compilation: an op's kernel for a format, a dtype of query or key, a head size, heads of a group, and whether
    the sequence is split."""

    kernel: str
    format: str
    dtype: str = "bf16"
    head_dim: int = 128
    group: int = 4
    tokens: int = 1
    long: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.format} {self.dtype} D{self.head_dim} group{self.group} T{self.tokens}" + (
            "" if self.long else " short"
        )


CORE = [
    Case("attend", "int8", head_dim=256, group=6),
    Case("attend", "int4", head_dim=256, group=6),
    Case("attend", "int8_hq", head_dim=256, group=6),
    Case("attend", "int4_hq", head_dim=256, group=6),
    Case("attend", "int4_hq", "fp16"),
    Case("attend", "int4_kivi", "fp32"),
    Case("attend", "k8v4", head_dim=80, long=False),
    Case("attend", "int4_g64"),
    Case("append", "int8", head_dim=256),
    Case("append", "int4_hq"),
    Case("append", "int4_g64", "fp32"),
    Case("append", "int8_kivi", "fp16", tokens=100),
    Case("finish", "int4_hq"),
    Case("combine", "int8", head_dim=256),
]


def shipped() -> list[Case]:
    """Every preset at the usual head sizes, and what else takes another way through a kernel."""
    found = list(CORE)
    for name in FORMATS:
        found += [Case("attend", name), Case("attend", name, head_dim=256, group=6), Case("append", name)]
    found += [Case("attend", name, "fp32", 64, 1) for name in ("int8", "int4_hq")]
    found += [Case("attend", name, group=8, tokens=4) for name in ("int8", "int4_hq")]
    found += [Case("attend", name, head_dim=1024) for name in ("int8", "int4_hq")]
    found += [Case("attend", "int4_hq", head_dim=96), Case("append", "int4_hq", head_dim=80)]
    return list(dict.fromkeys(found))


def empty_cache(case: Case, max_tokens: int) -> dict[str, Tensor]:
    dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
    parts = get_format(case.format).parts(1, 4, case.head_dim, max_tokens, dtype)
    made = {
        name: torch.empty(part.shape, dtype=getattr(torch, part.dtype), device="meta") for name, part in parts.items()
    }
    return made | {"lengths": torch.empty(1, dtype=torch.int32, device="meta")}


def launches(case: Case) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What the launcher would start, as (kernel, arguments, keywords)."""
    from kvq_ops.cuda import launch

    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: Any, _: Any, *arguments: Any, **keywords: Any) -> None:
        found.append((kernel, arguments, keywords))

    # The meta device's programs are the launcher's own choice for a device that is not here.
    parts = empty_cache(case, 65536 if case.long else 128)
    dtype = DTYPES[case.dtype]
    with mock.patch.object(launch, "_launch", record):
        if case.kernel in ("append", "finish"):
            rows = [torch.empty(1, 4, case.tokens, case.head_dim, dtype=dtype, device="meta") for _ in range(2)]
            launch.append(key=rows[0], value=rows[1], format=case.format, **parts)
        else:
            query = torch.empty(1, 4 * case.group, case.tokens, case.head_dim, dtype=dtype, device="meta")
            launch.attend(True, query, format=case.format, **parts)
    wanted = case.kernel + "_kernel"
    return [each for each in found if each[0].__name__ == wanted]


def source(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Triton's source of a launch, specialised as the launch itself would be, and its options."""
    from triton.compiler import ASTSource

    names = kernel.arg_names
    options = {name: keywords[name] for name in ("num_warps", "num_stages") if name in keywords}
    given = dict(zip(names, arguments, strict=False)) | {k: v for k, v in keywords.items() if k not in options}
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for i, name in enumerate(names):
        value = given[name]
        if isinstance(value, Tensor):
            signature[name], attributes[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif name.isupper() or value == 1:
            signature[name], constants[i,] = "constexpr", value
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


@dataclass(frozen=True)
class Report:
    """Of one kernel on one architecture."""

    case: Case
    arch: int
    registers: int
    stack: int
    shared: int
    warps: int
    opcodes: Counter[str]
    wide_loads: int

    @property
    def blocks(self) -> int:
        """That a multiprocessor holds at once."""
        per_warp = math.ceil(max(self.registers, 1) * 32 / 256) * 256
        by_registers = REGISTERS_SM // (per_warp * self.warps)
        by_shared = SHARED_SM[self.arch] * 1024 // (self.shared + 1024)
        return min(by_registers, by_shared, THREADS_SM[self.arch] // (32 * self.warps))

    def count(self, *names: str) -> int:
        return sum(number for opcode, number in self.opcodes.items() if opcode.split(".")[0] in names)

    @property
    def local(self) -> int:
        return self.count("LDL", "STL")

    @property
    def conversions(self) -> int:
        """Of integers to floats, apart from those that divide integers (.RP)."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(("I2F", "I2FP")) and ".RP" not in name)

    @property
    def products(self) -> int:
        return self.count("HMMA", "IMMA", "QMMA", "HGMMA", "UTCHMMA", "OMMA")


def tool(name: str) -> str:
    from triton import backends

    return str(Path(backends.__file__).parent / "nvidia" / "bin" / name)


def inspect(cubin: bytes) -> tuple[int, int, Counter[str], int]:
    """Registers, stack, instructions by opcode, and global loads and asynchronous copies of 16 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run(
            [tool("cuobjdump"), "-res-usage", path], check=True, capture_output=True, text=True
        ).stdout
        sass = subprocess.run([tool("nvdisasm"), "-c", path], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    opcodes: Counter[str] = Counter()
    wide = 0
    for line in sass.splitlines():
        match = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
        if match:
            opcodes[match[1]] += 1
            wide += match[1].startswith(("LDG", "LDGSTS")) and ".128" in match[1]
    return int(found[1]), int(found[2]), opcodes, wide


def compiled(case: Case, arch: int) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel, arguments, keywords = launches(case)[0]
    made, options = source(kernel, arguments, keywords)
    result = triton.compile(made, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack, opcodes, wide = inspect(result.asm["cubin"])
    metadata = result.metadata
    return Report(case, arch, registers, stack, metadata.shared, metadata.num_warps, opcodes, wide)


def rows(reports: list[Report]) -> Iterator[str]:
    names = "kernel|sm|registers|stack, local|shared KiB|blocks an SM|warps an SM|instructions|MMA|I2F|16-byte loads"
    yield "| " + " | ".join(names.split("|")) + " |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for r in reports:
        cells = [r.case.name, r.arch, r.registers, f"{r.stack}, {r.local}", f"{r.shared / 1024:.1f}", r.blocks]
        cells += [r.blocks * r.warps, sum(r.opcodes.values()), r.products, r.conversions, r.wide_loads]
        yield "| " + " | ".join(map(str, cells)) + " |"


HEAD = """# What the CUDA kernels compile to

Made by `python -m benchmarks.gpu_static` (gpu_static.py) with triton {triton}. Nothing in it was run on a GPU, and
nothing is a time. `stack, local`: bytes of stack and instructions on local memory, 0 where nothing spills. Blocks
and warps are what a multiprocessor holds at once by registers and shared memory. I2F are conversions of integers to
floats apart from those that divide integers; 16-byte loads are global loads and asynchronous copies in the code, not
how often they run. `short`: a capacity of 128 tokens, one launch; else 65,536, split. Nothing spills but `int4_hq` at
head_dim 1024, whose query and sums alone take half of all registers.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", action="store_true", help="the set that CI compiles, on sm_80 and sm_90")
    parser.add_argument("--arch", type=int, nargs="*", help="compute capabilities, such as 90")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--write", type=Path, help="the file to write")
    arguments = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns that its default will change
    cases = [case for case in (CORE if arguments.core else shipped()) if arguments.only in case.name]
    archs = arguments.arch or ([80, 90] if arguments.core else list(SHARED_LIMIT))
    reports = []
    for case in cases:
        for arch in archs:
            reports.append(compiled(case, arch))
            print(list(rows(reports[-1:]))[-1], flush=True)
    if arguments.write:
        import triton

        arguments.write.write_text(HEAD.format(triton=triton.__version__) + "\n".join(rows(reports)) + "\n")


if __name__ == "__main__":
    main()
