"""Attend and append take no memory that grows with the cache."""

from __future__ import annotations

import pytest
from common import run_python

# The cache is touched first, and a small call made, so that what grows the peak afterwards is the big call's own.
PEAK = """
import resource, sys, torch
from kvq_ops import QuantizedKVCache

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

name, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
cache = QuantizedKVCache(1, 8, 128, 60000, format=name, dtype=torch.float32)
for part in cache.buffers():
    part.fill_(1)
small = QuantizedKVCache(1, 8, 128, 512, format=name, dtype=torch.float32)
small.append(*torch.randn(2, 1, 8, 512, 128))
query = torch.randn(1, 32, tokens, 128)
small.attend(query, return_lse=True)
rows = torch.randn(2, 1, 8, 512, 128)
cache.lengths.fill_(59000)
before = peak()
cache.attend(query, return_lse=True)
cache.append(*rows)
print(cache.nbytes, peak() - before)
"""


@pytest.mark.parametrize("tokens", [1, 16], ids="t{}".format)
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g32/int4_kivi", "int8_kivi", "int4_hq"])
def test_peak(name, tokens):
    """Tokens times head_dim of one head are 8 MB as bytes, 4 MB as nibbles; nothing of that size is taken."""
    run = run_python(PEAK, name, str(tokens))
    assert run.returncode == 0, run.stderr
    nbytes, growth = map(int, run.stdout.split())
    assert nbytes > 60_000_000
    assert growth < 2_000_000
