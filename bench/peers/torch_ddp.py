"""One rank of PyTorch's DistributedDataParallel over Gloo, with the models of bench/ddp/workloads.cpp.

Prints, on rank 0, the microseconds of every step with communication and without, in turns.
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = None
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Resnet18(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks, before = [], 64
        for after in (64, 128, 256, 512):
            for stride in (1 if after == 64 else 2, 1):
                blocks.append(Block(before, after, stride))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(1000))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.01
        return x


def make(name):
    torch.manual_seed(7)
    if name == "mlp":
        net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
        return net, torch.randn(64, 1024), torch.randn(64, 10)
    if name == "resnet18":
        return Resnet18(), torch.randn(8, 3, 32, 32), torch.randn(8, 10)
    return Many(), torch.randn(16, 32), torch.randn(16, 32)


def main():
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, x, y = make(name)
    wrapped, _, _ = make(name)
    wrapped = nn.parallel.DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    sides = {}
    for side, net in (("plain", plain), ("step", wrapped)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(net=net, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

        sides[side] = step
    sides["together"] = lambda: (sides["plain"](), dist.barrier())
    samples = {side: [] for side in sides}
    for i in range(steps + 3):
        for side, step in sides.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if i >= 3:
                samples[side].append((time.perf_counter() - began) * 1e6)
    if dist.get_rank() == 0:
        with open(os.environ["TORCHSPAN_RUNTIME_DIR"] + "/samples.json", "w", encoding="utf-8") as file:
            json.dump(samples, file)
    dist.barrier()


if __name__ == "__main__":
    main()
