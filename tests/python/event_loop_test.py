"""An asynchronous pipeline of one to three stages, as fairscale's AsyncEventLoop runs it, over messages of groups and over calls.

Each stage works on what arrives next, activations of the stage before it or gradients of the one behind it. fairscale sends a
header and then the tensor by torch.distributed.send(), or puts both into a queue of the peer by a call; so does this.
"""

import queue
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

import processes

BATCHES = 5
ACTIVATION, GRADIENT = 0, 1


def layers():
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(6)]


def batches():
    return [torch.randn(4, 6, dtype=torch.double, generator=torch.Generator().manual_seed(i)) for i in range(BATCHES)]


class Messages:
    """A header of kind, batch and sizes, then the tensor, to any rank that waits."""

    def __init__(self):
        self.sent = []

    def send(self, rank, kind, batch, tensor):
        header = torch.tensor([kind, batch, *tensor.shape])
        self.sent += [(dist.isend(part, rank, tag=tag), part) for tag, part in enumerate((header, tensor.contiguous()))]

    def receive(self):
        header = torch.empty(4, dtype=torch.int64)
        source = dist.recv(header, tag=0)
        kind, batch, *sizes = header.tolist()
        tensor = torch.empty(sizes, dtype=torch.double)
        dist.recv(tensor, source, tag=1)
        return kind, batch, tensor

    def end(self):
        for work, _ in self.sent:
            work.wait()


arrived = queue.Queue()


def put(kind, batch, tensor):
    arrived.put((kind, batch, tensor))


class Puts:
    """Calls that put a message into the queue of the stage that they go to."""

    def __init__(self):
        self.sent = []

    def send(self, rank, kind, batch, tensor):
        self.sent.append(rpc.rpc_async(f"worker{rank}", put, args=(kind, batch, tensor)))

    def receive(self):
        return arrived.get(timeout=30)

    def end(self):
        for call in self.sent:
            call.wait()


def run_stage(rank, size, transport):
    """Returns the gradients of this stage's parameters."""
    part = nn.Sequential(*layers()[6 * rank // size : 6 * (rank + 1) // size])
    inputs, outputs = {}, {}

    def forward(batch, tensor):
        inputs[batch] = tensor.requires_grad_()
        result = part(inputs[batch])
        if rank + 1 < size:
            outputs[batch] = result
            transport.send(rank + 1, ACTIVATION, batch, result.detach())
        else:
            outputs[batch] = result.square().sum()
            backward(batch, None)

    def backward(batch, gradient):
        outputs.pop(batch).backward(gradient)
        if rank > 0:
            transport.send(rank - 1, GRADIENT, batch, inputs.pop(batch).grad)

    if rank == 0:  # the head has all batches at hand
        for batch, tensor in enumerate(batches()):
            forward(batch, tensor)
    for _ in range(BATCHES * ((rank > 0) + (rank + 1 < size))):
        kind, batch, tensor = transport.receive()
        (forward if kind == ACTIVATION else backward)(batch, tensor)
    transport.end()
    return [parameter.grad for parameter in part.parameters()]


def over_messages(rank, size):
    return run_stage(rank, size, Messages())


def over_calls(rank, size):
    return run_stage(rank, size, Puts())


class EventLoop(unittest.TestCase):
    def check(self, body, world):
        whole = nn.Sequential(*layers())
        for tensor in batches():
            whole(tensor).square().sum().backward()
        expected = [parameter.grad for parameter in whole.parameters()]
        for size in (1, 2, 3):
            with self.subTest(stages=size):
                found = [gradient for stage in processes.run(size, body, world=world) for gradient in stage]
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_gradients_over_messages_of_a_group_equal_one_process(self):
        self.check(over_messages, processes.Group())

    def test_gradients_over_calls_equal_one_process(self):
        self.check(over_calls, processes.Calls())


if __name__ == "__main__":
    unittest.main()
