"""Runs a function on every rank of a world of forked processes."""

import copy
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import rpc

import torchspan  # registers the backends, and is forked with torch

LIMIT = 60  # seconds; a rank that takes longer has hung


class Failed:
    """What a rank raised, or how its process ended."""

    def __init__(self, type_name, text, seconds):
        self.type_name, self.text, self.seconds = type_name, text, seconds

    def __repr__(self):
        return f"Failed({self.type_name}: {self.text})"


def run(size, body, *arguments, world=None, environment=None):
    """Returns what `body(rank, size, *arguments)` returned on each rank, or a Failed.

    The ranks meet in a file, as with init_method="file://…". `environment(rank)` returns variables of one rank. `world`: a
    Group, the default, or Calls.
    """
    world = world or Group()
    context = multiprocessing.get_context("fork")
    folder = tempfile.mkdtemp()
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank,
            args=(theirs, world.at(rank, size, folder + "/store"), body, (rank, size, *arguments), environment),
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    end = time.monotonic() + LIMIT
    results = []
    for rank, (process, pipe) in enumerate(ranks):
        try:
            if not pipe.poll(max(0, end - time.monotonic())):
                process.kill()
                results.append(Failed("Hung", f"rank {rank} did not end in {LIMIT} s", LIMIT))
            else:
                results.append(pickle.loads(pipe.recv_bytes()))
        except EOFError:
            process.join()
            results.append(Failed("Exit", f"rank {rank} ended with {process.exitcode}", 0))
        process.join(max(1, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            results[-1] = Failed("Hung", f"rank {rank} returned, but its process did not end", LIMIT)
    return results


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    """The default process group. `destroy`: whether the ranks end it."""

    def __init__(self, backend="torchspan", timeout=30, destroy=True):
        self.backend, self.timeout, self.destroy = backend, timeout, destroy

    def at(self, rank, size, store):
        placed = copy.copy(self)
        placed.rank, placed.size, placed.store = rank, size, store
        return placed

    def begin(self):
        dist.init_process_group(
            self.backend,
            init_method="file://" + self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout),
        )

    def end(self):
        dist.destroy_process_group()


class Calls(Group):
    """torch.distributed.rpc among worker0, worker1, …. `dynamic`: they join and leave; `names`: others than these."""

    def __init__(self, timeout=30, destroy=True, threads=16, dynamic=False, names=None):
        super().__init__("TORCHSPAN", timeout, destroy)
        self.threads, self.dynamic, self.names = threads, dynamic, names

    def begin(self):
        rpc.init_rpc(
            self.names[self.rank] if self.names else f"worker{self.rank}",
            rank=self.rank,
            world_size=None if self.dynamic else self.size,
            backend=rpc.BackendType[self.backend],
            rpc_backend_options=torchspan.torch_rpc.TorchSpanRpcBackendOptions(
                init_method="file://" + self.store, rpc_timeout=self.timeout, num_worker_threads=self.threads
            ),
        )

    def end(self):
        rpc.shutdown()


class Native(Calls):
    """torchspan.rpc among worker0, worker1, …. `functions`: the only ones that others may call."""

    def __init__(self, timeout=30, destroy=True, threads=16, functions=None):
        super().__init__(timeout, destroy, threads)
        self.functions = functions

    def begin(self):
        torchspan.rpc.init_rpc(
            f"worker{self.rank}",
            rank=self.rank,
            world_size=self.size,
            rpc_backend_options=torchspan.rpc.Options(
                init_method="file://" + self.store, rpc_timeout=self.timeout, num_worker_threads=self.threads
            ),
            functions=self.functions,
        )

    def end(self):
        torchspan.rpc.shutdown()


def _rank(pipe, world, body, arguments, environment):
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        os.environ.update(environment(world.rank) if environment else {})
        world.begin()
        started = time.monotonic()
        result = body(*arguments)
        if world.destroy:
            world.end()
    except BaseException as error:  # noqa: B902  the parent judges it
        result = Failed(type(error).__name__, str(error) or traceback.format_exc(), time.monotonic() - started)
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
