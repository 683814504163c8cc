"""Several Python threads at once: ops release the interpreter, so whatever they do, no access leaves the tensors."""

from __future__ import annotations

import pytest
from common import run_python

# Two threads append to one cache that has room for one of them, while others attend and rewrite the lengths.
RACE = """
import sys, threading, torch
from kvq_ops import QuantizedKVCache

torch.set_num_threads(1)
kind, rounds = sys.argv[1], int(sys.argv[2])

def both(*bodies):
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def append(cache, rows):
    try:
        cache.append(rows, rows)
    except RuntimeError as error:
        assert "leave room" in str(error), error

if kind == "append":
    rows = torch.randn(1, 8, 1050, 64)
    for _ in range(rounds):
        cache = QuantizedKVCache(1, 8, 64, 2000)
        both(*2 * [lambda: append(cache, rows)])
        assert cache.lengths.tolist() == [1050]
else:
    cache, query = QuantizedKVCache(4, 4, 64, 4096), torch.randn(4, 16, 64)
    cache.append(*torch.randn(2, 4, 4, 4096, 64))
    done = threading.Event()

    def rewrite():
        while not done.is_set():
            cache.lengths.fill_(1)
            cache.lengths.fill_(4096)

    def attend():
        for _ in range(rounds):
            assert cache.attend(query).isfinite().all()
        done.set()

    both(rewrite, attend)
print("ok")
"""


@pytest.mark.parametrize(("kind", "rounds"), [("append", 60), ("attend", 300)])
def test_no_access_leaves_the_tensors(kind, rounds):
    run = run_python(RACE, kind, str(rounds))
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr
