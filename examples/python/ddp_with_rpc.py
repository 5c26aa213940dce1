"""PyTorch's combination of DDP with RPC: an embedding is on a server, and the trainers average what follows it.

    torchrun --nproc-per-node 3 examples/python/ddp_with_rpc.py
    torchspan run -n 3 python examples/python/ddp_with_rpc.py

One backward pass fills the embedding's gradients on the server, and averages those of the trainers' own layers. The losses
are those of one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from torchspan import autograd, optim, rpc

WORDS, WIDTH, CLASSES, RATE = 100, 16, 8, 0.1


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.bag.weight.data.normal_(generator=torch.Generator().manual_seed(1))

    def forward(self, words):
        return self.bag(words)

    def references(self):
        return [rpc.RRef(self.bag.weight)]


def classifier():
    torch.manual_seed(2)
    return nn.Linear(WIDTH, CLASSES)


def batch(step, trainer):
    """Texts of four words; the class of a text is that of most of its words."""
    words = torch.randint(0, WORDS, (16, 4), generator=torch.Generator().manual_seed(100 * step + trainer))
    return words, (words % CLASSES).mode(dim=1).values


def train(embedding, number, steps):
    """Runs on a trainer. Returns its losses."""
    trainers = dist.new_group(list(range(1, dist.get_world_size())), use_local_synchronization=True)
    model = nn.parallel.DistributedDataParallel(classifier(), process_group=trainers)
    parameters = embedding.rpc_sync().references() + [rpc.RRef(one) for one in model.parameters()]
    optimizer = optim.DistributedOptimizer("sgd", parameters, lr=RATE)
    losses = []
    for step in range(steps):
        words, classes = batch(step, number)
        with autograd.context() as context:
            loss = nn.functional.cross_entropy(model(embedding.rpc_sync().forward(words)), classes)
            autograd.backward(context, [loss])
            dist.barrier(trainers)  # no trainer changes the embedding before all have their gradients
            optimizer.step(context)
            dist.barrier(trainers)
        losses.append(loss.item())
    return losses


def train_in_one_process(number, trainers, steps):
    """The losses of one trainer, if one process has the batches of all."""
    embedding, model = Embedding(), classifier()
    losses = []
    for step in range(steps):
        each = [batch(step, trainer) for trainer in range(trainers)]
        found = [nn.functional.cross_entropy(model(embedding(words)), classes) for words, classes in each]
        losses.append(found[number].item())
        # Each trainer steps the embedding with its own gradient; the classifier gets the average.
        ours = torch.autograd.grad(sum(found), [embedding.bag.weight, *model.parameters()])
        with torch.no_grad():
            embedding.bag.weight -= RATE * ours[0]
            for parameter, gradient in zip(model.parameters(), ours[1:]):
                parameter -= RATE * gradient / trainers
    return losses


def main():
    parser = argparse.ArgumentParser(description="Rank 0 serves the embedding; the other ranks train.")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("torchspan")
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=size)
    if rank == 0:
        embedding = rpc.RRef(Embedding())
        calls = [
            rpc.rpc_async(f"trainer{number + 1}", train, args=(embedding, number, arguments.steps)) for number in range(size - 1)
        ]
        differences = []
        for number, call in enumerate(calls):
            losses = call.wait()
            wanted = train_in_one_process(number, size - 1, arguments.steps)
            differences += [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
        print(
            f"{size - 1} trainers, {arguments.steps} steps: loss {losses[0]:.3f} to {losses[-1]:.3f}; "
            f"one process differs by {max(differences):.1e}"
        )
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
