"""PyTorch's batch-updating parameter server: trainers send gradients to rank 0, which averages them and answers with parameters.

    torchrun --nproc-per-node 3 examples/python/parameter_server.py
    torchspan run -n 3 python examples/python/parameter_server.py

No thread of the server waits for the other trainers: the function that they call returns a future.
"""

import argparse
import os
import threading

import torch
from torch import nn
from torch.distributed import rpc

import torchspan  # registers the backend


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))


class ParameterServer:
    def __init__(self, trainers):
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.begin_step()

    def begin_step(self):
        self.gradients = [torch.zeros_like(parameter) for parameter in self.net.parameters()]
        self.received = 0
        self.updated = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def update(server, gradients):
        """Returns the parameters after the step, for which the gradients of all trainers are needed."""
        self = server.local_value()
        with self.lock:
            for total, gradient in zip(self.gradients, gradients):
                total += gradient / self.trainers
            self.received += 1
            updated = self.updated
            if self.received < self.trainers:
                return updated
            for parameter, gradient in zip(self.net.parameters(), self.gradients):
                parameter.grad = gradient
            self.optimizer.step()
            self.begin_step()
            updated.set_result([parameter.detach().clone() for parameter in self.net.parameters()])
        return updated


def train(server, rank, steps):
    """Returns the first and the last loss."""
    net = network()
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 10, generator=generator)
    targets = inputs.sum(1, keepdim=True).expand(64, 5)
    losses = []
    for _ in range(steps):
        net.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        updated = rpc.rpc_sync(server.owner(), ParameterServer.update, args=(server, gradients))
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), updated):
                parameter.copy_(value)
        losses.append(loss.item())
    return losses[0], losses[-1]


def main():
    parser = argparse.ArgumentParser(description="Trainers share the network of a parameter server.")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(
        "server" if rank == 0 else f"trainer{rank}",
        rank=rank,
        world_size=size,
        backend=rpc.BackendType.TORCHSPAN,
        rpc_backend_options=torchspan.torch_rpc.TorchSpanRpcBackendOptions(),
    )
    if rank == 0:
        server = rpc.RRef(ParameterServer(size - 1))
        trainers = [rpc.rpc_async(f"trainer{r}", train, args=(server, r, arguments.steps)) for r in range(1, size)]
        for r, (first, last) in enumerate(torch.futures.wait_all(trainers), 1):
            print(f"trainer {r}: loss {first:.3f} before, {last:.3f} after {arguments.steps} steps", flush=True)
    rpc.shutdown()  # waits for the server's calls


if __name__ == "__main__":
    main()
