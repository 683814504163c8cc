"""A Llama whose heads and caches are divided over processes by ``parallelize_module``, its decode step compiled:

    torchrun --nproc-per-node 2 -m examples.tensor_parallel

Gloo on CPUs; with CUDA the same code takes NCCL (not tried: kvq_ops has no CUDA kernels yet).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from examples.llama import Llama
from examples.parallel import MAX_TOKENS, arguments, compare_with_one, process_group, random_llama, report
from kvq_ops.integrations.distributed import HeadParallel


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
