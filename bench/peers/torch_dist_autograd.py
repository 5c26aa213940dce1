"""One process of PyTorch's distributed autograd over its RPC, with the programs of bench/autograd/world.cpp.

usage: torch_dist_autograd.py pair|chain|trainers SECONDS default|tcp     (RANK and WORLD_SIZE in the environment)
"default" is its default on one host, shared memory that its threads poll; with "tcp", they sleep while they wait.
Rank 0 writes microseconds by figure to samples.json in TORCHSPAN_RUNTIME_DIR. Remote calls use as little Python as
the peer allows: operators and TorchScript functions, which its callee runs without Python. Figures that begin with
"python/" measure the time of Python on the caller.
"""
import ctypes
import json
import os
import signal
import sys
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef

TRAINERS, SERVERS = 3, 4


def take_turns(samples, sides, most, seconds):
    """Runs the (name, function) pairs in turns; a function returns the measured microseconds of its run."""
    for _ in range(max(5, most // 10)):
        for _, once in sides:
            once()
    enough = time.perf_counter() + seconds
    for _ in range(most):
        for name, once in sides:
            samples.setdefault(name, []).append(once())
        if time.perf_counter() > enough:
            break


def expect(right, what):
    if not right:
        raise RuntimeError(what + " returned a wrong result")


def clock():
    return time.perf_counter() * 1e6


def small(requires_grad=False):
    return torch.ones(4, 4, requires_grad=requires_grad)


def round_trips(count, cpu=False):
    """Times forward over `count` calls and backward, including entering and leaving the context; with `cpu`, measures
    this thread's processor time instead."""
    now = (lambda: time.thread_time() * 1e6) if cpu else clock
    leaf, other = small(True), small()

    def once():
        began = now()
        with dist_autograd.context() as context:
            x = leaf
            for _ in range(count):
                x = rpc.rpc_sync("worker1", torch.add, args=(x, other))
            dist_autograd.backward(context, [x.sum()])
            over = now()
            expect(dist_autograd.get_gradients(context)[leaf][0, 0] == 1, "a gradient")
            ending = now()
        return over - began + now() - ending

    return once


def backward_only(count):
    leaf, other = small(True), small()

    def once():
        with dist_autograd.context() as context:
            x = leaf
            for _ in range(count):
                x = rpc.rpc_sync("worker1", torch.add, args=(x, other))
            loss = x.sum()
            began = clock()
            dist_autograd.backward(context, [loss])
            return clock() - began

    return once


def timed(work):
    def once():
        began = clock()
        work()
        return clock() - began

    return once


def context_alone():
    with dist_autograd.context():
        pass


def local_round_trip(count):
    """The same program without a call: LibTorch's operators and engine, driven from Python."""
    leaf, other = small(True), small()

    def work():
        x = leaf
        for _ in range(count):
            x = torch.add(x, other)
        leaf.grad = None
        x.sum().backward()

    return work


def pair(samples, seconds):
    other = small()
    take_turns(samples, [("hop_1", round_trips(1)), ("python/hop_1_caller_cpu", round_trips(1, cpu=True))], 400,
               2 * seconds)
    take_turns(samples, [("hop_8", round_trips(8)), ("python/hop_8_caller_cpu", round_trips(8, cpu=True))], 200,
               2 * seconds)
    take_turns(samples, [("backward_1", backward_only(1))], 400, seconds)
    take_turns(samples, [("backward_8", backward_only(8))], 200, seconds)
    take_turns(samples, [("python/context", timed(context_alone)),
                         ("python/call", timed(lambda: rpc.rpc_sync("worker1", torch.add, args=(other, other)))),
                         ("python/local_1", timed(local_round_trip(1))),
                         ("python/local_8", timed(local_round_trip(8)))], 400, seconds)


@torch.jit.script
def through_third(to: str, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.jit.script
def through_second(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, through_third, (to, x * 2))


@torch.jit.script
def through_first(to: str, next: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, through_second, (next, x * 2))


def chain(samples, seconds):
    leaf = small(True)

    def once():
        began = clock()
        with dist_autograd.context() as context:
            y = rpc.rpc_sync("worker1", through_first, args=("worker2", "worker3", leaf))
            dist_autograd.backward(context, [y.sum()])
            over = clock()
            expect(dist_autograd.get_gradients(context)[leaf][0, 0] == 8, "a gradient")
            ending = clock()
        return over - began + clock() - ending

    take_turns(samples, [("chain_4", once)], 300, seconds)


@torch.jit.script
def add_to_shard(shard: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.add(shard.local_value(), x)


@torch.jit.script
def make_shard() -> torch.Tensor:
    return torch.ones(4, 4).requires_grad_()


def train(shards, seconds):
    """Runs steps for `seconds` after a warm-up; returns the microseconds of each."""
    x = small(True)

    def step():
        began = clock()
        with dist_autograd.context() as context:
            calls = [rpc.rpc_async(shard.owner(), add_to_shard, args=(shard, x)) for shard in shards]
            dist_autograd.backward(context, [sum(call.wait() for call in calls).sum()])
            over = clock()
            expect(dist_autograd.get_gradients(context)[x][0, 0] == SERVERS, "a gradient")
            ending = clock()
        return over - began + clock() - ending

    samples = {}
    take_turns(samples, [("step", step)], 20, 0.2 * seconds)
    samples = {}
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        samples.setdefault("step", []).append(step())
    return samples["step"]


def trainers(samples, seconds):
    """Measures the duration of a step while all trainers run, and the elapsed time per step of any trainer."""
    shards = [rpc.remote(f"worker{TRAINERS + i}", make_shard) for i in range(SERVERS)]
    for shard in shards:
        shard.to_here()
    others = [rpc.rpc_async(f"worker{rank}", train, args=(shards, seconds)) for rank in range(1, TRAINERS)]
    steps = train(shards, seconds)
    lists = [steps] + [other.wait() for other in others]
    samples["ps_4x3"] = [1 / sum(len(steps) / sum(steps) for steps in lists)]
    samples["ps_4x3_step"] = [step for steps in lists for step in steps]


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = rpc.TensorPipeRpcBackendOptions()
    if sys.argv[3] == "tcp":
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank != 0:
        time.sleep(300)  # until it is killed
        return
    samples = {}
    {"pair": pair, "chain": chain, "trainers": trainers}[sys.argv[1]](samples, float(sys.argv[2]))
    with open(os.environ["TORCHSPAN_RUNTIME_DIR"] + "/samples.json", "w", encoding="utf-8") as file:
        json.dump(samples, file)
        file.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
