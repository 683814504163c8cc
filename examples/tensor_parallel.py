"""A Llama whose heads and caches are divided over processes by ``parallelize_module``, its decode step compiled:

    torchrun --nproc-per-node 2 -m examples.tensor_parallel

Gloo on CPUs; with CUDA the same code takes NCCL (not run on a GPU). Then one layer's attention over DTensors, by
``local_map``: for programs that hand sharded tensors around and need no sharding rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from examples.llama import Llama
from examples.parallel import CONFIG, MAX_TOKENS, arguments, compare_with_one, process_group, random_llama, report
from kvq_ops import QuantizedKVCache
from kvq_ops.integrations.distributed import HeadParallel, local_heads


def plan() -> dict[str, ParallelStyle]:
    """Queries, keys and values by columns, so that each rank has its own heads; what follows them by rows."""
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    styles: dict[str, ParallelStyle] = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    styles |= {f"layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    styles["layers.*.self_attn.cache"] = HeadParallel()
    return styles


def divide(model: Llama, mesh: DeviceMesh) -> Llama:
    """The model with its caches set up, in place."""
    parallelize_module(model, mesh, plan())
    return model


def mapped_attention(cache: QuantizedKVCache, mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Query, key and value are DTensors sharded over heads, like the result; ``cache`` holds this rank's heads."""
    heads = [Shard(1)]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache.append(key, value)
        return cache.attend(query)

    mapped: Callable[[Tensor, Tensor, Tensor], Tensor] = local_map(
        attention, out_placements=heads, in_placements=(heads, heads, heads), device_mesh=mesh
    )
    return mapped


@torch.inference_mode()
def compare_mapped(mesh: DeviceMesh, device: torch.device, name: str, tokens: int) -> bool:
    """Whether each rank's heads are the slice of what one process computes, bit for bit."""
    heads_kv = local_heads(CONFIG.heads_kv, mesh.size())
    one, mine = (
        QuantizedKVCache(1, heads, CONFIG.head_dim, MAX_TOKENS, format=name, dtype=torch.float32, device=device)
        for heads in (CONFIG.heads_kv, heads_kv)
    )
    attention, generator = mapped_attention(mine, mesh), torch.Generator().manual_seed(0)
    equal = True
    for _ in range(tokens):
        key, value = torch.randn(2, 1, CONFIG.heads_kv, CONFIG.head_dim, generator=generator).to(device)
        query = torch.randn(1, CONFIG.heads_q, CONFIG.head_dim, generator=generator).to(device)
        one.append(key, value)
        got = attention(*(distribute_tensor(each, mesh, [Shard(1)]) for each in (query, key, value)))
        want = one.attend(query).chunk(mesh.size(), 1)[mesh.get_local_rank()]
        equal &= torch.equal(got.to_local(), want)  # type: ignore[attr-defined]
    return equal


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("torchrun -m examples.tensor_parallel", "Heads by rank.", argv)
    with process_group() as device:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        models = [random_llama(device) for _ in range(2)]
        for model in models:
            model.setup_caches(1, MAX_TOKENS, args.format)
            model.to(device)
        outcome = compare_with_one(divide(models[0], mesh), models[1], args.tokens)
        report(outcome, *models)
        equal = compare_mapped(mesh, device, args.format, args.tokens)
        said = "the slice of one process, bit for bit" if equal else "DIFFERS from one process"
        print(f"local_map: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
