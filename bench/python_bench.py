"""Groups from Python against torch's Gloo, calls against TensorPipe, and pipelines against torch's over Gloo: two processes, rounds
in turn.

    build/python/venv/bin/python bench/python_bench.py [groups | pipelines | calls] >build/bench/python.json

`make bench SECTION=python` runs it.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import python_rpc

RANKS = 2
ROUNDS = int(os.environ.get("TORCHSPAN_BENCH_ROUNDS", "7"))
SECONDS = 0.15  # of one round of one backend


def timed(call, barrier):
    """Seconds of one call, the mean of a round; all ranks make the same number of calls."""
    barrier()
    started = time.perf_counter()
    call()
    one = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    count = max(1, min(2000, int(SECONDS / max(one.item(), 1e-6))))
    barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def pair(ours, theirs):
    """Medians of rounds in turn, so that both meet the same load."""
    mine, others = [], []
    for _ in range(ROUNDS):
        mine.append(timed(ours, dist.barrier))
        others.append(timed(theirs, dist.barrier))
    return statistics.median(mine), statistics.median(others)


def operations(group, size):
    """Calls of one backend on tensors of `size` bytes in all."""
    count = size // 4
    whole, part = torch.ones(count), torch.ones(max(1, count // RANKS))
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def ddp_step(group):
    net = nn.parallel.DistributedDataParallel(mlp(), process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.randn(32, 512)

    def step():
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second(x))


def fsdp_step(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(512) for _ in range(8)])  # 25 million parameters
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.randn(2, 16, 512)

    def step():
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_groups(rank, folder):
    dist.init_process_group("torchspan", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups = [dist.new_group(backend="torchspan"), dist.new_group(backend="gloo")]
    metrics = []

    def add(name, seconds, unit, scale):
        metrics.append(
            {
                "name": f"python/{name}",
                "unit": unit,
                "value": seconds[0] * scale,
                "peer": "gloo",
                "peer_value": seconds[1] * scale,
                "ratio": seconds[0] / seconds[1],
            }
        )

    for size, label in ((64, "64B"), (4 << 10, "4KiB"), (1 << 20, "1MiB"), (25 << 20, "25MiB")):
        ours, theirs = [operations(group, size) for group in groups]
        for name in ours:
            add(f"{name}/{label}", pair(ours[name], theirs[name]), "us", 1e6)
    for name, make in (("ddp/step/mlp", ddp_step), ("fsdp2/step/gpt_25m", fsdp_step)):
        add(name, pair(*[make(group) for group in groups]), "ms", 1e3)
    dist.destroy_process_group()
    return metrics


def pipeline_steps(rank, folder, group):
    """Steps of a GPT of 450,000 parameters in two stages, 8 micro-batches: ours, torch's."""
    import torchspan
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    blocks, width, rows = 4, 96, (32, 32)
    batch, target = torch.randn(*rows, width), torch.randn(*rows, width)
    options = torchspan.rpc.Options(init_method=f"file://{folder}/pipelines")
    torchspan.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=RANKS, rpc_backend_options=options)
    layers = torchspan.pipeline.Layers()
    for _ in range(blocks):
        layers.add(Block, width)
    pipe = torchspan.pipeline.Pipeline(layers, micro_batches=8, checkpoint="never")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)

    def ours():
        pipe.train_step(batch, target, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()

    part = nn.Sequential(*[Block(width) for _ in range(blocks // RANKS)])
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 8, loss_fn=nn.functional.mse_loss)
    others = torch.optim.SGD(part.parameters(), lr=0.01)

    def theirs():
        schedule.step(*([batch] if rank == 0 else []), **({"target": target} if rank == RANKS - 1 else {}))
        others.step()
        others.zero_grad()

    return ours, theirs, pipe


def measure_pipelines(rank, folder):
    import torchspan

    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=RANKS)
    ours, theirs, pipe = pipeline_steps(rank, folder, dist.new_group(backend="gloo"))
    mine, others = pair(ours, theirs)
    pipe.close()
    torchspan.rpc.shutdown()
    dist.destroy_process_group()
    return [
        {
            "name": "python/pipeline/step/gpt_450k",
            "unit": "ms",
            "value": mine * 1e3,
            "peer": "torch.distributed.pipelining",
            "peer_value": others * 1e3,
            "ratio": mine / others,
        }
    ]


def rank_main(rank, folder, parts):
    import torchspan  # noqa: F401

    torch.set_num_threads(1)
    metrics = []
    if "groups" in parts:
        metrics += measure_groups(rank, folder)
    if "pipelines" in parts:
        metrics += measure_pipelines(rank, folder)
    if "calls" in parts:
        metrics += python_rpc.measure(rank, folder, ROUNDS)
    if rank == 0:
        machine = {"cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
        print(json.dumps({"machine": machine, "metrics": metrics}, indent=1))


if __name__ == "__main__":
    multiprocessing.spawn(rank_main, (tempfile.mkdtemp(), sys.argv[1:] or ["groups", "pipelines", "calls"]), nprocs=RANKS)
