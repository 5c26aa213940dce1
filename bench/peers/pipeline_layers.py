"""The layers and batches of bench/pipeline_bench.cpp, for the peers in Python."""
import json
import os

import torch
from torch import nn

WIDTH, ROWS, LAYERS = 256, 512, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def half():
    """Half of the layers: one of two stages."""
    return nn.Sequential(*(Layer() for _ in range(LAYERS // 2)))


def batch():
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def write(samples):
    """Hands the microseconds of each kind of step to the benchmark."""
    with open(os.environ["TORCHSPAN_RUNTIME_DIR"] + "/samples.json", "w", encoding="utf-8") as file:
        json.dump(samples, file)
