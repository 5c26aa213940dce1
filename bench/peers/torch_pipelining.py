"""One of two stages of torch.distributed.pipelining over Gloo, with the layers of bench/pipeline_bench.cpp.

usage: torch_pipelining.py MICRO_BATCHES STEPS     (RANK and WORLD_SIZE in the environment)
Rank 0 writes the microseconds of every step, by schedule. Exits with 77 if this PyTorch has no such package.
"""
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

try:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
except ImportError:
    sys.exit(77)

from pipeline_layers import batch, half, write


def main():
    micro_batches, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    stage_layers = half()
    x, y = batch()
    schedules = {}
    for name, kind in (("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)):
        stage = PipelineStage(stage_layers, rank, 2, torch.device("cpu"))
        schedules[name] = kind(stage, n_microbatches=micro_batches, loss_fn=nn.functional.mse_loss)
    samples = {name: [] for name in schedules}
    for i in range(steps + 2):
        for name, schedule in schedules.items():
            stage_layers.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            if i >= 2:
                samples[name].append((time.perf_counter() - began) * 1e6)
    if rank == 0:
        write(samples)
    dist.barrier()


if __name__ == "__main__":
    main()
