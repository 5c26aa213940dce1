"""PyTorch's tutorial "Getting Started with Distributed Data Parallel" on CPUs: a small network learns in several processes.

    torchrun --nproc-per-node 2 examples/python/ddp.py
    torchspan run -n 2 python examples/python/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))


def train(net, inputs, targets, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nn.functional.mse_loss(net(inputs), targets).detach()


def main():
    parser = argparse.ArgumentParser(description="Trains a small network with DistributedDataParallel.")
    parser.add_argument("--backend", default="torchspan", help="gloo, for comparison")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    # Every rank trains on its rows. Their average gradient is that of all rows, so that one process learns the same.
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20 * size, 10, generator=generator)
    targets = inputs @ torch.randn(10, 5, generator=generator)
    mine = slice(20 * rank, 20 * (rank + 1))
    net = DistributedDataParallel(network())
    loss = train(net, inputs[mine], targets[mine], arguments.steps)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)

    if rank == 0:
        alone = network()
        train(alone, inputs, targets, arguments.steps)
        difference = max((a - b).abs().max() for a, b in zip(net.parameters(), alone.parameters()))
        print(f"{size} ranks, {arguments.steps} steps: loss {loss:.4f}; one process differs by {difference:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
