"""What tests/test_distributed.py runs in every process of a group: ``python -m distributed_jobs JOB``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from common import TOLERANCES, attention, in_use, parts, relative_error, same_bits
from data import make
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from kvq_ops import QuantizedKVCache
from kvq_ops.integrations.distributed import HeadParallel, TokenParallelCache, local_heads, merge_attention

BATCH, HEADS_Q, HEADS_KV, HEAD_DIM = 2, 8, 4, 32
TOKENS = 140
"""Past a block of int8_kivi and one of int4_hq."""
FORMATS = ["int8", "int4_hq", "int8_kivi"]
MAX_TOKENS = 160


def whole(name: str) -> QuantizedKVCache:
    return QuantizedKVCache(BATCH, HEADS_KV, HEAD_DIM, MAX_TOKENS, format=name, dtype=torch.float32)


def data() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = make("normal", BATCH, HEADS_Q, HEADS_KV, HEAD_DIM, TOKENS)
    return query.clone(), key.clone(), value.clone()


def refusal(function, *arguments: object) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was refused")


# ------------------------------------------------------------------------------------------------------------- DTensors


def distributed(cache: QuantizedKVCache, mesh: DeviceMesh, dim: int) -> QuantizedKVCache:
    """The cache with its parts as DTensors."""
    for name, part in list(cache.named_buffers()):
        placement = Replicate() if name == "lengths" and dim == 1 else Shard(dim)
        cache.register_buffer(name, distribute_tensor(part, mesh, [placement]), persistent=False)
    return cache


def step(cache: QuantizedKVCache, key: Tensor, value: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    cache.append(key, value)
    return cache.attend(query, return_lse=True)


def dtensor() -> None:
    """Slices of heads, and of sequences, are the slices of the whole bit for bit, eager and compiled."""
    mesh, ranks, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size(), dist.get_rank()
    query, key, value = data()
    cases = [(name, 1, False) for name in FORMATS] + [("int8", 0, False), ("int4_hq", 1, True)]
    for name, dim, compiled in cases:
        one, many = whole(name), distributed(whole(name), mesh, dim)
        run = torch.compile(step, fullgraph=True) if compiled else step
        for first, last in [(0, 100), *((token, token + 1) for token in range(100, 105 if compiled else TOKENS))]:
            rows = [tensor[:, :, first:last] for tensor in (key, value)]
            if compiled and first == 0:
                one.append(*rows)
                many.append(*[distribute_tensor(row, mesh, [Shard(dim)]) for row in rows])
                continue
            new = query * (1 + first)
            want = step(one, *rows, new)
            got = run(many, *[distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in (*rows, new)])
            for a, b in zip(got, want, strict=True):
                assert isinstance(a, DTensor)
                assert a.placements == (Shard(dim),)
                assert same_bits(a.to_local(), b.chunk(ranks, dim)[rank])
        for part, expected in zip(parts(many).tensors(), parts(one).tensors(), strict=True):
            slices = expected.chunk(ranks, dim)[rank] if part.placements == (Shard(dim),) else expected
            assert same_bits(part.to_local(), slices)


def dtensor_refusals() -> None:
    """Nothing is moved or computed by halves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    three = QuantizedKVCache(1, 3, HEAD_DIM, 8)
    rows = torch.randn(1, 3, 1, HEAD_DIM)
    share = [distribute_tensor(rows, mesh, [Shard(1)])] * 2
    said = refusal(distributed(three, mesh, 1).append, *share)
    assert "heads_kv must be a multiple of the ranks, got 3 heads over 2 ranks" in said
    mixed = distributed(whole("int8"), mesh, 1)
    mixed.value_codes = distribute_tensor(mixed.value_codes.full_tensor(), mesh, [Replicate()])
    given = [distribute_tensor(tensor[:, :, :1], mesh, [Shard(1)]) for tensor in data()[1:]]
    said = refusal(mixed.append, *given)
    assert f"kvq::append: value_codes must be {Shard(1)} where key_codes is {Shard(1)}, got {Replicate()}" in said
    by_tokens = QuantizedKVCache(1, 2, HEAD_DIM, 8)
    for name, part in list(by_tokens.named_buffers()):
        placement = Replicate() if name == "lengths" else Shard(2)
        by_tokens.register_buffer(name, distribute_tensor(part, mesh, [placement]), persistent=False)
    said = refusal(by_tokens.attend, distribute_tensor(torch.randn(1, 2, HEAD_DIM), mesh, [Replicate()]))
    assert f"key_codes must be sharded over sequences or heads or replicated, got {Shard(2)}" in said
    style = HeadParallel()
    assert "got 3 heads over 2 ranks" in refusal(parallelize_module, QuantizedKVCache(1, 3, HEAD_DIM, 8), mesh, style)
    assert "must be a QuantizedKVCache, got Linear" in refusal(HeadParallel()._apply, torch.nn.Linear(2, 2), mesh)
    assert refusal(local_heads, 2, 4) == "heads_kv must be a multiple of the ranks, got 2 heads over 4 ranks"


# ----------------------------------------------------------------------------------------------------- context parallel

STRIPE = 16


def merge() -> None:
    """Partial attention in fp32 merges to the whole but for rounding; ranks that hold nothing do not count."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    query, key, value = data()
    query = query[:, :, None]
    want, _ = attention(query, key, value)

    def part(own: list[int]) -> tuple[Tensor, Tensor]:
        if not own:
            return torch.zeros_like(query), torch.full(query.shape[:-1], -torch.inf)
        out, lse = attention(query, key[:, :, own], value[:, :, own])
        return out.float(), lse.float()

    everywhere = [token for token in range(TOKENS) if token % ranks == rank]
    on_the_last = list(range(TOKENS)) if rank == ranks - 1 else []
    for own in (everywhere, on_the_last):
        assert relative_error(merge_attention(*part(own), group), want) < 1e-6
    nothing = merge_attention(*part([]), group)
    assert torch.equal(nothing, torch.zeros_like(query))


def own_tokens(sequence: int) -> list[int]:
    """Of a sequence, the tokens that this rank keeps: the second one starts a stripe later."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return [token for token in range(TOKENS) if (token + sequence * STRIPE) // STRIPE % ranks == rank]


def token_parallel() -> None:
    """Each rank holds the rows that are its own, as if it had been given no others; what they make together is
    attention over all of them. One graph, the collectives in it."""
    group = dist.group.WORLD
    query, key, value = data()
    for name in FORMATS:
        cache = TokenParallelCache(
            BATCH, HEADS_KV, HEAD_DIM, MAX_TOKENS + STRIPE, group=group, stripe=STRIPE, format=name, dtype=torch.float32
        )
        cache.positions.copy_(torch.tensor([0, STRIPE]))
        counter = CompileCounterWithBackend("inductor")

        @torch.compile(fullgraph=True, backend=counter)
        def decode(cache: TokenParallelCache, key: Tensor, value: Tensor, query: Tensor) -> Tensor:
            cache.append(key, value)
            return cache.attend(query)

        compiled = name == "int4_hq" and dist.get_world_size() == 2  # three compilers at a time take a minute
        run = decode if compiled else decode.__wrapped__
        assert not cache.attend(query).any()
        for token in range(TOKENS):
            out = run(cache, key[:, :, token], value[:, :, token], query)
            if token in (0, STRIPE, TOKENS - 1):
                check_shares(cache.cache, key, value, token + 1)
                check_output(cache, out, query, name)
        assert counter.frame_count == compiled


def check_shares(cache: QuantizedKVCache, key: Tensor, value: Tensor, tokens: int) -> None:
    for sequence in range(BATCH):
        alone = QuantizedKVCache(1, HEADS_KV, HEAD_DIM, cache.max_tokens, format=cache.format, dtype=torch.float32)
        for token in own_tokens(sequence):
            if token < tokens:
                alone.append(*(rows[sequence : sequence + 1, :, token] for rows in (key, value)))
        held = parts(cache).sequence(sequence)
        for got, want in zip(in_use(held, cache.format.name), in_use(alone), strict=True):
            assert same_bits(got, want)


def check_output(cache: TokenParallelCache, out: Tensor, query: Tensor, name: str) -> None:
    """Against attention in float64 over what all ranks hold."""
    ranks = dist.get_world_size()
    for sequence in range(BATCH):
        length = int(cache.cache.lengths[sequence])
        own = [rows[sequence : sequence + 1, :, :length] for rows in cache.cache.dequantize()]
        shares: list[list[Tensor]] = [[] for _ in range(ranks)]
        dist.all_gather_object(shares, own)
        key, value = (torch.cat(rows, 2) for rows in zip(*shares, strict=True))
        want, _ = attention(query[sequence : sequence + 1, :, None], key, value)
        assert relative_error(out[sequence : sequence + 1], want[:, :, 0]) < TOLERANCES[name].attend["fp32"]


def token_parallel_refusals() -> None:
    group = dist.group.WORLD
    cache = TokenParallelCache(1, 2, HEAD_DIM, 64, group=group)
    rows = torch.randn(1, 2, 2, HEAD_DIM)
    assert refusal(cache.append, rows, rows) == "TokenParallelCache.append: key must have 1 token, got 2"
    assert refusal(cache.attend, rows) == "TokenParallelCache.attend: query must have 1 token, got 2"
    said = refusal(lambda: TokenParallelCache(1, 2, HEAD_DIM, 64, group=group, stripe=0))
    assert said == "TokenParallelCache: stripe must be a positive int, got 0"


JOBS = {
    "heads": [dtensor, dtensor_refusals],
    "tokens": [merge, token_parallel, token_parallel_refusals],
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.no_grad():
        for job in JOBS[sys.argv[1]]:
            job()
            sys.stdout.write(f"{job.__name__} passed\n")
    dist.destroy_process_group()
