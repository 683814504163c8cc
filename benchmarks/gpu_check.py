"""`make gpu-check`: everything that needs a GPU, in about six minutes. Not run on a GPU so far.

Parts, each reported and none stopping the next: bytes and attention of every format against the reference, then
compute-sanitizer over a few of them where it is installed, a CUDA graph replayed while lengths grow, torch.compile
with mode="reduce-overhead", an AOTInductor package, and times beside what else attends on this GPU. Times are of CUDA
graphs, the cache read cold: a buffer larger than the L2 cache is written between calls.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import (
    DTYPES,
    FORMAT_NAMES,
    TOLERANCES,
    Cache,
    append,
    assert_same_bits,
    attend,
    filled,
    judge,
    relative_error,
)
from data import make

from kvq_ops import QuantizedKVCache, get_format, reference

SMALL = ["int8", "int4_hq", "int4_g32/int4_kivi"]
HEAD_DIMS = [64, 80, 128, 256]


def to(cache: Cache, device: str) -> Cache:
    return cache.each(lambda part: part.to(device))


def check_format(name: str, dtype: str, head_dim: int, heads_q: int, heads_kv: int) -> dict[str, Any]:
    """Bytes of a prompt and a step, then attention over ragged sequences."""
    kind, lengths = DTYPES[dtype], [150, 0, 67]
    query, key, value = (x.to(kind) for x in make("outlier", 3, heads_q, heads_kv, head_dim, 150))
    want = filled(name, key, value, lengths, 256)
    got = to(want, "cuda")
    for tokens in (70, 1):
        rows = key[:, :, :tokens], value[:, :, -tokens:]
        append(want, *rows, name, reference.append)
        append(got, *(x.cuda() for x in rows), name)
    assert_same_bits(to(got, "cpu"), want)
    out, lse = attend(query.cuda(), got, name, return_lse=True)
    again, _ = attend(query.cuda(), got, name, return_lse=True)
    assert torch.equal(out, again), "two calls differ"
    judged, judged_lse = judge(query, want, name)
    error = relative_error(out.cpu(), judged)
    assert error < TOLERANCES[name].attend[dtype], f"error {error:.2e}"
    assert (lse.cpu() - judged_lse).nan_to_num(0.0).abs().max() < 1e-3, "lse"
    return {"error": error}


def correctness(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, name in enumerate(names):
        for j, dtype in enumerate(DTYPES):
            head_dim = HEAD_DIMS[(i + j) % len(HEAD_DIMS)]
            case = f"{name} {dtype} D{head_dim}"
            try:
                found[case] = check_format(name, dtype, head_dim, 6, 2)
            except Exception as error:
                found[case] = {"failed": f"{type(error).__name__}: {error}"}
    failed = {case: result for case, result in found.items() if "failed" in result}
    assert not failed, json.dumps(failed, indent=1)
    return found


def sanitizer() -> dict[str, Any]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not installed"}
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu_check"]
    result = subprocess.run([*command, "--small"], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-2000:]
    return {"checked": SMALL}


class Step(nn.Module):
    def __init__(self, name: str, max_tokens: int = 2048) -> None:
        super().__init__()
        self.cache = QuantizedKVCache(2, 2, 128, max_tokens, format=name, device="cuda")

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.cache.append(key, value)
        return self.cache.attend(query)


def step_inputs(steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(heads: int) -> Tensor:
        return torch.randn(2, heads, 128, generator=generator, device="cuda").bfloat16()

    return [(rows(8), rows(2), rows(2)) for _ in range(steps)]


def graphs() -> dict[str, Any]:
    """1000 replays of one graph, lengths growing inside, give the bits of eager."""
    for name in SMALL:
        eager, captured = Step(name), Step(name)
        inputs = step_inputs(1000)
        held = tuple(x.clone() for x in inputs[0])
        captured(*held)  # compiles
        captured.cache.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = captured(*held)
        for given in inputs:
            for to_, from_ in zip(held, given, strict=True):
                to_.copy_(from_)
            graph.replay()
            assert torch.equal(out, eager(*given)), name
        assert captured.cache.lengths.tolist() == [1000, 1000]
        assert not captured.cache.overflowed()
    return {"replays": 1000, "formats": SMALL}


def reduce_overhead() -> dict[str, Any]:
    from torch._dynamo.utils import counters

    for name in SMALL:
        torch._dynamo.reset()
        counters.clear()
        eager, model = Step(name), Step(name)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for given in step_inputs(20):
            assert torch.equal(compiled(*given), eager(*given)), name
        assert counters["inductor"]["cudagraph_skips"] == 0, name
    return {"formats": SMALL}


def package() -> dict[str, Any]:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    for name in ("int8", "int4_hq"):
        eager, model = Step(name), Step(name)
        inputs = step_inputs(20)
        exported = torch.export.export(model, inputs[0])
        with tempfile.TemporaryDirectory() as folder:
            path = aoti_compile_and_package(exported, package_path=str(Path(folder) / "step.pt2"))
            loaded = aoti_load_package(path)
            for given in inputs:
                assert torch.equal(loaded(*given), eager(*given)), name
    return {"formats": ["int8", "int4_hq"]}


def milliseconds(function: Callable[[], Any], flush: Tensor) -> float:
    """Median of 15 calls in a graph, the L2 cache flushed before each."""
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(15):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def bandwidth(flush: Tensor) -> float:
    """GB/s that a copy of 1 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to_ = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: to_.copy_(source), flush) / 1e6


def random_cache(name: str, batch: int, heads_kv: int, head_dim: int, tokens: int) -> QuantizedKVCache:
    """Full of rows like each other, appended once and copied: times do not depend on values."""
    cache = QuantizedKVCache(batch, heads_kv, head_dim, tokens, format=name, device="cuda")
    chunk = min(tokens, 1024)
    for _ in range(tokens // chunk):
        rows = torch.randn(batch, heads_kv, chunk, head_dim, device="cuda").bfloat16()
        cache.append(rows, rows)
    return cache


def peers(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found["SDPA bf16"] = lambda: sdpa(query[:, :, None], key, value, enable_gqa=True)
    try:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention)
        found["FlexAttention bf16"] = lambda: flex(query[:, :, None], key, value, enable_gqa=True)
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_with_kvcache

        by_token = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        found["flash-attn bf16"] = lambda: flash_attn_with_kvcache(query[:, None], *by_token)
    except ImportError:
        pass
    return found


def timings(deadline: float) -> dict[str, Any]:
    flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    limit, found = bandwidth(flush), []
    setups = [(1, 24, 4, 256, [1024, 4096, 16384, 65536, 262144]), (32, 32, 8, 128, [1024, 4096, 16384])]
    for batch, heads_q, heads_kv, head_dim, lengths in setups:
        for tokens in lengths:
            query = torch.randn(batch, heads_q, head_dim, device="cuda").bfloat16()
            shape = (batch, heads_kv, tokens, head_dim)
            plain = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
            calls = {name: (call, 4 * plain[0].numel()) for name, call in peers(query, *plain).items()}
            for name in ("int8", "int4", "int8_hq", "int4_hq"):
                cache = random_cache(name, batch, heads_kv, head_dim, tokens)
                moved = get_format(name).bytes_per_token(heads_kv, head_dim) * batch * tokens
                calls[f"kvq_ops {name}"] = (lambda cache=cache, query=query: cache.attend(query), moved)
            for name, (call, moved) in calls.items():
                if time.monotonic() > deadline:
                    return {"copy GB/s": limit, "times": found, "stopped": "out of time"}
                row = {"name": name, "setup": f"{heads_q}/{heads_kv}/{head_dim} batch {batch}", "tokens": tokens}
                try:
                    row["us"] = 1000 * milliseconds(call, flush)
                    row["of bandwidth"] = moved / row["us"] / 1e3 / limit
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:200]
                found.append(row)
                print(row, flush=True)
    return {"copy GB/s": limit, "times": found}


def picture(times: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    setups = list(dict.fromkeys(row["setup"] for row in times))
    figure, axes = plt.subplots(1, len(setups), figsize=(6 * len(setups), 4), squeeze=False)
    for axis, setup in zip(axes[0], setups, strict=True):
        rows = [row for row in times if row["setup"] == setup and "us" in row]
        for name in dict.fromkeys(row["name"] for row in rows):
            points = [(row["tokens"], row["us"]) for row in rows if row["name"] == name]
            axis.loglog(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=setup, xlabel="tokens", ylabel="microseconds")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(parts: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name, part in parts.items():
        start = time.monotonic()
        try:
            report[name] = part()
        except Exception as error:
            traceback.print_exc()
            report[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        report[name]["seconds"] = round(time.monotonic() - start, 1)
        said = "FAILED" if "failed" in report[name] else report[name].get("skipped", "ok")
        print(f"{name}: {said}, {report[name]['seconds']} s", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="correctness of a few formats only")
    parser.add_argument("--seconds", type=float, default=330, help="when to stop timing")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/gpu-check", help="folder for the JSON and the picture"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: no GPU that torch can use: nothing was checked")
        return 2
    if arguments.small:
        correctness(SMALL)
        return 0
    import triton

    deadline = time.monotonic() + arguments.seconds
    parts = {
        "correctness": lambda: correctness(FORMAT_NAMES),
        "sanitizer": sanitizer,
        "graphs": graphs,
        "reduce-overhead": reduce_overhead,
        "package": package,
        "timings": lambda: timings(deadline),
    }
    with torch.inference_mode():
        report = run(parts)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu-check.json").write_text(json.dumps(versions | report, indent=1))
    if report["timings"].get("times"):
        picture(report["timings"]["times"], arguments.out / "gpu-check.png")
    return 1 if any("failed" in part for part in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
