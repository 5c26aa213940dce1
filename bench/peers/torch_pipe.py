"""PyTorch's torch.distributed.pipeline.sync.Pipe on the CPU, with the layers of bench/pipeline_bench.cpp.

It runs all partitions of one device on one thread. Writes the microseconds of every step, and of a step without it.
Exits with 77 if this PyTorch has no such package: releases from 2.4 on have torch.distributed.pipelining instead.
"""
import sys
import time

import torch
import torch.distributed.rpc as rpc
from torch import nn

try:
    from torch.distributed.pipeline.sync import Pipe
except ImportError:
    sys.exit(77)

from pipeline_layers import batch, half, write


def main():
    micro_batches, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    rpc.init_rpc("worker0", rank=0, world_size=1)
    torch.manual_seed(7)
    halves = [half() for _ in range(2)]
    x, y = batch()
    plain = nn.Sequential(*halves)
    pipe = Pipe(nn.Sequential(*halves), chunks=micro_batches, checkpoint="never")
    sides = {"plain": plain, "step": lambda batch: pipe(batch).local_value()}
    samples = {side: [] for side in sides}
    for i in range(steps + 2):
        for side, net in sides.items():
            plain.zero_grad()
            began = time.perf_counter()
            nn.functional.mse_loss(net(x), y).backward()
            if i >= 2:
                samples[side].append((time.perf_counter() - began) * 1e6)
    write(samples)
    rpc.shutdown()


if __name__ == "__main__":
    main()
