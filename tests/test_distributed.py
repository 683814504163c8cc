"""Caches over several processes of a gloo group: heads by rank, sequences by rank, tokens by rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from common import ROOT
from distributed_jobs import JOBS

SECONDS = 600
"""After which a group hangs."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def launch(ranks: int, *command: str) -> list[str]:
    """What each process of a group printed, as torchrun starts them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + SECONDS
    try:
        said = [process.communicate(timeout=max(1, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, text) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {text}"
    return said


@pytest.mark.parametrize(("job", "ranks"), [("heads", 2), ("tokens", 2), ("tokens", 3)])
def test_job(job: str, ranks: int) -> None:
    """distributed_jobs.py says what is asserted."""
    for text in launch(ranks, "distributed_jobs", job):
        for function in JOBS[job]:
            assert f"{function.__name__} passed" in text


def errors(said: list[str]) -> list[float]:
    return [float(re.search(r"logits (\S+) from one process", text)[1]) for text in said]


def test_tensor_parallel_example() -> None:
    said = launch(2, "examples.tensor_parallel", "--tokens", "8")
    assert max(errors(said)) < 1e-3
    assert len({re.search(r"tokens (\[.*\])", text)[1] for text in said}) == 1
    held, whole = re.search(r"([\d,]+) of ([\d,]+) cache bytes", said[0]).groups()
    assert 1.99 < int(whole.replace(",", "")) / int(held.replace(",", "")) <= 2
    assert all("local_map: the slice of one process, bit for bit" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("format", ["int8", "int4_hq"])
def test_context_parallel_example(ranks: int, format: str) -> None:
    said = launch(ranks, "examples.context_parallel", "--format", format)
    assert max(errors(said)) < 3e-2  # shares freeze blocks of their own, so codes differ
    assert len({re.search(r"tokens (\[.*\])", text)[1] for text in said}) == 1
