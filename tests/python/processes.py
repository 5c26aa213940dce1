"""Runs a function on every rank of a world of forked processes."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import torchspan  # noqa: F401  registers the backend, and is forked with torch

LIMIT = 60  # seconds; a rank that takes longer has hung


class Failed:
    """What a rank raised, or how its process ended."""

    def __init__(self, type_name, text, seconds):
        self.type_name, self.text, self.seconds = type_name, text, seconds

    def __repr__(self):
        return f"Failed({self.type_name}: {self.text})"


def run(size, body, *arguments, backend="torchspan", timeout=30, environment=None, destroy=True):
    """Returns what `body(rank, size, *arguments)` returned on each rank, or a Failed.

    The ranks meet in a file, as with init_method="file://…". `environment(rank)` returns variables of one rank.
    """
    context = multiprocessing.get_context("fork")
    folder = tempfile.mkdtemp()
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank,
            args=(theirs, rank, size, body, arguments, backend, timeout, environment, destroy, folder + "/store"),
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


def _rank(pipe, rank, size, body, arguments, backend, timeout, environment, destroy, store):
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        os.environ.update(environment(rank) if environment else {})
        dist.init_process_group(
            backend, init_method="file://" + store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        started = time.monotonic()
        result = body(rank, size, *arguments)
        if destroy:
            dist.destroy_process_group()
    except BaseException as error:  # noqa: B902  the parent judges it
        result = Failed(type(error).__name__, str(error) or traceback.format_exc(), time.monotonic() - started)
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
