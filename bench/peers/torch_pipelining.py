"""One of two stages of torch.distributed.pipelining over Gloo, with the layers of bench/pipeline_bench.cpp.

usage: torch_pipelining.py MICRO_BATCHES STEPS     (RANK and WORLD_SIZE in the environment)
Rank 0 writes the microseconds of every step, by schedule. Exits with 77 if this PyTorch has no such package.
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

try:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
except ImportError:
    sys.exit(77)

WIDTH, ROWS, LAYERS = 256, 512, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def main():
    micro_batches, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    half = nn.Sequential(*(Layer() for _ in range(LAYERS // 2)))
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    schedules = {}
    for name, kind in (("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)):
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        schedules[name] = kind(stage, n_microbatches=micro_batches, loss_fn=nn.functional.mse_loss)
    samples = {name: [] for name in schedules}
    for i in range(steps + 2):
        for name, schedule in schedules.items():
            half.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            if i >= 2:
                samples[name].append((time.perf_counter() - began) * 1e6)
    if rank == 0:
        with open(os.environ["TORCHSPAN_RUNTIME_DIR"] + "/samples.json", "w", encoding="utf-8") as file:
            json.dump(samples, file)
    dist.barrier()


if __name__ == "__main__":
    main()
