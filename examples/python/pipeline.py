"""A small GPT learns the text of this program, with its blocks on several workers and tied embeddings; one process learns the same.

    torchrun --nproc-per-node 2 examples/python/pipeline.py
    torchspan run -n 2 python examples/python/pipeline.py
"""

import argparse
import os

import torch
from torch import nn
from torchspan import pipeline, rpc

WIDTH, HEADS, CONTEXT = 32, 4, 24
TEXT = open(__file__).read()
LETTERS = sorted(set(TEXT))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text):
        return self.tokens(text) + self.places(torch.arange(text.size(1)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.norm1(x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.project(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


def head():
    return nn.Linear(WIDTH, len(LETTERS), bias=False)


def loss_of(scores, following):
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def batches(steps, rows):
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (rows,), generator=generator)
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


def train(arguments):
    """Returns the loss of each step."""
    layers = pipeline.Layers()  # the same on every worker; only its owner builds a layer
    embedding = layers.add(Embedding)
    for _ in range(arguments.blocks):
        layers.add(Block)
    layers.tie((embedding, "tokens.weight"), (layers.add(head), "weight"))
    with pipeline.Pipeline(
        layers, micro_batches=arguments.micro_batches, schedule=arguments.schedule, checkpoint="never", seed=1
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        losses = []
        for text, following in batches(arguments.steps, arguments.rows):
            optimizer.zero_grad()
            losses.append(pipe.train_step(text, following, loss_of))
            optimizer.step()
        return losses


def train_alone(arguments):
    """The same in one process, with the same weights and dropout."""
    layers = []
    for number, build in enumerate([Embedding, *[Block] * arguments.blocks, head]):
        torch.manual_seed(pipeline.seed_of_layer(1, number))
        layers.append(build())
    layers[-1].weight = layers[0].tokens.weight
    optimizer = torch.optim.AdamW(nn.Sequential(*layers).parameters(), lr=3e-3)
    losses = []
    for step, (text, following) in enumerate(batches(arguments.steps, arguments.rows)):
        optimizer.zero_grad()
        total = 0.0
        for part, rows in enumerate(torch.arange(arguments.rows).tensor_split(arguments.micro_batches)):
            x = text[rows]
            for order, layer in enumerate(layers):
                torch.manual_seed(pipeline.seed_of_use(1, step, order, part))
                x = layer(x)
            share = loss_of(x, following[rows]) * (len(rows) / arguments.rows)
            share.backward()
            total += share.item()
        optimizer.step()
        losses.append(total)
    return losses


def main():
    parser = argparse.ArgumentParser(description="Trains a small GPT on several workers.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b", help="of torchspan.pipeline: gpipe, zb_h1, …")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # both learn the same up to the rounding of sums
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    losses = train(arguments)
    if rank == 0:
        difference = max(abs(a - b) for a, b in zip(losses, train_alone(arguments)))
        print(
            f"{size} workers, {arguments.steps} steps: loss {losses[0]:.3f} before, {losses[-1]:.3f} after; "
            f"one process differs by {difference:.1e}",
            flush=True,
        )
    rpc.shutdown()


if __name__ == "__main__":
    main()
