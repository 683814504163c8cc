"""The benchmarks run at tiny sizes and report what they claim to; how fast anything is, is no test."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from benchmarks import append_cpu, attend_cpu, formats, overhead, report
from benchmarks.common import GEOMETRIES, Case
from benchmarks.summary import summary
from benchmarks.timing import Entry, Timing, measure

TINY = ("--threads", "1", "--rounds", "1", "--seconds", "0.001")


def row(name: str, bits: int, nbytes: int, median: float, ratio: float | None, error: float | None) -> report.Row:
    return report.Row("G2", 1024, 1, "cold", name, bits, nbytes, 1, median, 0.0, median, 1, ratio, error, "")


CELL = report.Cell(
    [
        row("floor int8", 8, 100, 1.0, None, None),
        row("floor int4", 4, 50, 0.5, None, None),
        row("kvq int8", 8, 100, 1.5, 1.5, 0.01),
        row("kvq int4", 4, 50, 1.0, 2.0, 0.2),
        row("peer bf16", 16, 200, 4.0, 4.0, 0.003),
        row("peer int4", 4, 60, 6.0, 12.0, 0.2),
        row("broken peer", 8, 100, 0.1, 0.1, 0.9),
    ]
)


def test_ratios_are_to_the_floor_of_the_own_bytes_and_to_the_int8_floor() -> None:
    own = {row.name: CELL.own_floor(row) for row in CELL.rows}
    int8 = {row.name: CELL.int8_floor(row) for row in CELL.rows}
    assert own["kvq int8"] == 1.5
    assert own["kvq int4"] == 2.0
    assert own["peer bf16"] == 2.0
    assert own["peer int4"] == pytest.approx(10.0)
    assert int8["floor int4"] == 0.5
    assert int8["kvq int4"] == 1.0
    assert int8["peer bf16"] == 4.0


def test_a_wrong_result_is_no_fastest_peer() -> None:
    ours = CELL.rows[3]
    assert CELL.speedup(ours) == 4.0
    assert CELL.speedup(ours, 4) == 6.0
    assert "WRONG RESULT" in report.table(CELL).splitlines()[-2]


def test_rounds_visit_all_entries_and_the_yardstick_before_each() -> None:
    order: list[str] = []
    entries = {
        "floor": Entry([lambda: order.append("floor")]),
        "a": Entry([lambda: order.append("a")], "floor"),
        "b": Entry([lambda: order.append("b")], "floor"),
    }
    timings = measure(entries, threads=1, rounds=2, seconds=1e-6)
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns == ["floor", "a", "floor", "b"] * 2
    assert isinstance(timings["a"].ratio, float)
    assert timings["floor"].ratio is None


def test_rotation_takes_the_calls_in_turn() -> None:
    order: list[int] = []
    calls = [lambda index=index: order.append(index) for index in range(3)]
    measure({"a": Entry(calls)}, threads=1, rounds=5, seconds=1e-6)
    assert order[:7] == [0, 1, 2, 0, 1, 2, 0]


def test_copies_cover_the_footprint() -> None:
    case = Case(GEOMETRIES["G1"], 512, 1, 1000)
    assert [case.copies(nbytes) for nbytes in (1, 999, 1000, 1001)] == [1000, 2, 1, 1]
    assert Case(GEOMETRIES["G1"], 512, 1, 0).copies(1) == 1


def test_attend(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.onnxruntime_gqa", raising=False)
    path = tmp_path / "run.json"
    cell = ("--geometry", "G2", "--tokens", "128", "--mode", "cold,hot", "--footprint", "1", "--query", "fp32,bf16")
    rows = attend_cpu.main([*cell, *TINY, "--only", "floor,kvq,torch,onnx", "--json", str(path)])
    printed = capsys.readouterr().out
    assert "not timed: onnxruntime_gqa: import of onnxruntime halted" in printed
    names = ["floor int8", "floor int4", "kvq int8", "kvq int8 q=bfloat16", "kvq int4", "kvq int4 q=bfloat16"]
    assert [row.name for row in rows if row.mode == "cold"] == [*names, "torch SDPA fp32", "torch SDPA bf16"]
    errors = {row.name: row.error for row in rows}
    assert errors["floor int8"] is None
    assert errors["torch SDPA fp32"] < 1e-5
    assert 1e-3 < errors["kvq int8"] < 2e-2
    assert 5e-2 < errors["kvq int4"] < 3e-1
    copies = {(row.name, row.mode): row.copies for row in rows}
    assert copies["kvq int8", "cold"] == 4
    assert copies["kvq int8", "hot"] == 1
    run, loaded = report.load(path)
    assert loaded == rows
    markdown = report.markdown(run, loaded)
    assert all(f"| {name} |" in markdown for name in names)


def test_picture(tmp_path) -> None:
    plot = pytest.importorskip("benchmarks.plot", reason="matplotlib is not installed", exc_type=ImportError)
    plot.picture(CELL.rows, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_append() -> None:
    rows = append_cpu.main(["--geometry", "G1", "--tokens", "128", "--footprint", "1", *TINY])
    found = {(row["format"], row["input"], row["what"]): row for row in rows}
    assert len(found) == 2 * 2 * 4
    prefill = found["int8", "bf16", "prefill 128 rows"]
    assert prefill["moved"] == 2 * 8 * 128 * (2 * 128 + 128 + 4)
    assert prefill["of copy bandwidth"] > 0
    assert found["int4", "fp32", "append 1 row"]["of attend"] > 0


def test_formats() -> None:
    chosen = ["--geometry", "G1", "--tokens", "192", "--footprint", "1", "--format", "int4_hq,int4"]
    base, other = formats.main([*chosen, *TINY])
    assert (base["format"], base["ratio"], base["of base bytes"]) == ("int4", None, 1)
    assert other["format"] == "int4_hq"
    assert other["ratio"] > 0
    assert base["nbytes"] == 8 * 192 * 2 * (64 + 4) + 4  # one length


def test_overhead() -> None:
    result = overhead.main(["--geometry", "G1", "--format", "int8", "--calls", "20", *TINY])
    (short,) = result["short"]
    assert short["128 tokens"] == pytest.approx(short["arithmetic"] + short["overhead"])
    assert [row["machine"] for row in result["busy"]] == ["idle"] * 4 + ["busy"] * 4
    assert all(row["p99"] >= row["median"] > 0 for row in result["busy"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_step() -> None:
    from benchmarks import step

    rows = step.main(["--model", "one-layer", "--tokens", "64", "--format", "int8", *TINY])
    assert [row["cache"] for row in rows] == ["plain", "int8"]
    assert rows[0]["nbytes"] == 64 * 2 * 4 * 256 * 2


def test_timing_merges_blocks() -> None:
    timing = measure({"a": Entry([lambda: None])}, threads=1, rounds=3, seconds=1e-4)["a"]
    assert isinstance(timing, Timing)
    assert timing.low <= timing.median
    assert timing.blocks >= 3


def test_summary_marks_what_misses_its_target() -> None:
    lines = summary(CELL.rows).splitlines()
    assert [part.strip() for part in lines[2].strip("|").split("|")] == [
        *("G2 1024 cold", "1"),
        *("1.50", "2.00", "0.67", "2.67", "6.00", "-", "-"),
    ]
    slow = [replace(row, ratio=2.1, median=2.1) if row.name == "kvq int8" else row for row in CELL.rows]
    assert "2.10*" in summary(slow)
    assert "1.90*" in summary(slow)
