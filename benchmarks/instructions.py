"""Instructions of the inner loops of attend for 32 codes and one query row, from the compiler's output.

    python -m benchmarks.instructions            # a Markdown table; AArch64 needs aarch64-linux-gnu-g++

It times nothing: it is how instruction sets that this machine lacks are compared. Query rows share the loads and the
widening of codes, so the figures are for the widest tile, six rows. Prefetches and loop control count too.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

CSRC = Path(__file__).parent.parent / "kvq_ops" / "csrc"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# name: compiler prefix, flags, int16 lanes of a vector, key tokens of a tile of six rows, value vectors of it, products
ISAS = {
    "avx2": ("", AVX2, 16, 2, 1, ("vpmaddwd",)),
    "avx512": ("", AVX512, 32, 4, 2, ("vpmaddwd",)),
    "avx512_vnni": ("", [*AVX512, "-mavx512vnni"], 32, 4, 2, ("vpdpwssd",)),
    "neon": ("aarch64-linux-gnu-", [], 16, 1, 1, ("smlal", "smlal2")),
    "neon_dot": ("aarch64-linux-gnu-", ["-march=armv8.2-a+dotprod+fp16"], 16, 1, 1, ("sdot", "smlal", "smlal2")),
}
ROWS = 6
LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)")

Instruction = tuple[int, str, str]


def compiler(prefix: str) -> str | None:
    """The compiler for that prefix, None where it is not installed."""
    native = platform.machine() == "x86_64" if not prefix else False
    return shutil.which(f"{prefix}g++") if prefix or native else None


def functions(name: str) -> dict[str, list[Instruction]]:
    """Disassembly of an ISA's kernels by demangled function name."""
    prefix, flags = ISAS[name][:2]
    with tempfile.TemporaryDirectory() as folder:
        object_file = f"{folder}/isa.o"
        command = [f"{prefix}g++", "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *flags]
        subprocess.run([*command, "-c", f"{CSRC}/cpu/isa_{name}.cpp", "-o", object_file], check=True)
        dump = [f"{prefix}objdump", "-dC", "--no-show-raw-insn", object_file]
        text = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if head := re.match(r"^[0-9a-f]+ <(.*)>:", line):
            current = found.setdefault(head[1], [])
        elif match := LINE.match(line):
            current.append((int(match[1], 16), match[2], match[3]))
    return found


def inner_loop(body: list[Instruction], products: tuple[str, ...]) -> list[Instruction]:
    """The shortest loop that holds as many products as any."""
    best: list[Instruction] = []
    for address, mnemonic, operands in body:
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if not target or not mnemonic.startswith(("j", "b.", "cb")):
            continue
        start = int(target[1], 16)
        if start >= address:
            continue
        loop = [item for item in body if start <= item[0] <= address]
        count, most = (sum(item[1] in products for item in one) for one in (loop, best))
        if count > most or (count == most and count and len(loop) < len(best)):
            best = loop
    return best


def cost(name: str, bits: int, side: str, code: dict[str, list[Instruction]]) -> tuple[float, float]:
    """Instructions and products of one side's inner loop for 32 codes and a row."""
    _, _, lanes, tokens, vectors, products = ISAS[name]
    if side == "key":
        arguments, codes = rf"{ROWS}, {tokens}>", tokens * lanes * (1 if bits == 8 else 2)
        names = (rf"key_tile<.*Codec{bits}, {arguments}", rf"key_block<.*Codec{bits}, {ROWS}>")
    else:
        # first vector, vectors of a step, rows, steps, groups
        both = bits == 4 and vectors > 1
        first = 1 if bits == 4 and not both else 0
        arguments = f"{first}, {2 if both else 1}, {ROWS}, {vectors // 2 if both else vectors}, false>"
        names = tuple(rf"{kind}<.*Codec{bits}, {arguments}" for kind in ("value_tile", "value_vectors"))
        codes = 2 * vectors * lanes
    bodies = [body for function, body in code.items() if any(re.search(one, function) for one in names)]
    loop = max((inner_loop(body, products) for body in bodies), key=lambda one: sum(i[1] in products for i in one))
    unit = codes * ROWS / 32
    return len(loop) / unit, sum(item[1] in products for item in loop) / unit


def main() -> None:
    print("| ISA | keys int8 | keys int4 | values int8 | values int4 |\n|---|---|---|---|---|")
    for name, (prefix, *_) in ISAS.items():
        if compiler(prefix) is None:
            print(f"| {name} | not counted: no {prefix or 'x86-64 '}g++ here | | | |")
            continue
        code = functions(name)
        cells = (cost(name, bits, side, code) for side in ("key", "value") for bits in (8, 4))
        print(f"| {name} | " + " | ".join(f"{all_:.2f} ({products:.2f} products)" for all_, products in cells) + " |")


if __name__ == "__main__":
    main()
