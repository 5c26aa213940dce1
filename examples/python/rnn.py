"""PyTorch's distributed RNN: embedding and decoder are on a parameter server, the LSTM is on a trainer.

    torchrun --nproc-per-node 2 examples/python/rnn.py
    torchspan run -n 2 python examples/python/rnn.py

Gradients cross both processes, each parameter is stepped where it is, and the losses are those of one process.
"""

import argparse
import os

import torch
from torch import nn

from torchspan import autograd, optim, rpc

TOKENS, WIDTH = 20, 16


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens):
        return self.table(tokens)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, hidden):
        return self.linear(hidden)


def recurrent():
    torch.manual_seed(3)
    return nn.LSTM(WIDTH, WIDTH)


def references(module):
    """To the parameters of a module of this worker."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def batches(steps):
    """Sequences in which each token follows from the one before it."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        start = torch.randint(0, TOKENS, (1, 8), generator=generator)
        tokens = (start + 3 * torch.arange(11).unsqueeze(1)) % TOKENS
        yield tokens[:-1], tokens[1:]


def loss_of(scores, targets):
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train(server, steps):
    """Returns the losses."""
    lstm, remote = recurrent(), []
    parameters = [rpc.RRef(parameter) for parameter in lstm.parameters()]
    for kind in (Embedding, Decoder):
        remote.append(rpc.remote(server, kind))
        # Waits until it is made: both draw their parameters from the server's one generator.
        parameters += rpc.rpc_sync(server, references, args=(remote[-1],))
    embedding, decoder = remote
    optimizer = optim.DistributedOptimizer("adam", parameters, lr=0.02)
    losses = []
    for tokens, targets in batches(steps):
        with autograd.context() as context:
            hidden, _ = lstm(embedding.rpc_sync().forward(tokens))
            loss = loss_of(decoder.rpc_sync().forward(hidden), targets)
            autograd.backward(context, [loss])
            optimizer.clip_grad_norm(context, 1.0)
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def train_in_one_process(steps):
    embedding, lstm, decoder = Embedding(), recurrent(), Decoder()
    parameters = [parameter for module in (lstm, embedding, decoder) for parameter in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for tokens, targets in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(decoder(lstm(embedding(tokens))[0]), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description="A trainer, rank 1, uses embedding and decoder of rank 0.")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=size)
    if rank == 1:
        losses = train("server", arguments.steps)
        difference = max(abs(a - b) for a, b in zip(losses, train_in_one_process(arguments.steps)))
        first, last = losses[0], losses[-1]
        print(f"{len(losses)} steps: loss {first:.3f} to {last:.3f}; one process differs by {difference:.1e}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
