"""torch.distributed.rpc over TorchSpan, and torchspan.rpc, against TensorPipe, torch's own agent: two processes, rounds in turn."""

import statistics
import time

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

import torchspan

WARM_UP = 20
IDLE_SECONDS = 1.0


def nothing():
    return None


def identity(value):
    return value


def nested(to, back, depth):
    """Calls between two workers, each inside of the one before."""
    return 0 if depth == 0 else 1 + torchspan.rpc.rpc_sync(to, nested, args=(back, to, depth - 1))


def calls(rpc, dist_autograd):
    """(name, call, how often) of what rank 0 does; a round takes about half a second on an idle machine."""
    small, large = torch.zeros(16), torch.zeros(1 << 24)
    factor = torch.ones(16, requires_grad=True)

    def backward(hops):
        with dist_autograd.context() as context:
            product = factor
            for _ in range(hops):
                product = rpc.rpc_sync("worker1", torch.mul, args=(product, factor))
            dist_autograd.backward(context, [product.sum()])

    def many():
        for future in [rpc.rpc_async("worker1", nothing) for _ in range(100)]:
            future.wait()

    return [
        ("rpc_sync/empty_function", lambda: rpc.rpc_sync("worker1", nothing), 1000),
        ("rpc_sync/torch.add", lambda: rpc.rpc_sync("worker1", torch.add, args=(small, small)), 1000),
        ("rpc_sync/tensor_64B", lambda: rpc.rpc_sync("worker1", identity, args=(small,)), 500),
        ("rpc_async/100_empty_functions", many, 10),
        ("rpc_sync/64MiB_there_and_back", lambda: rpc.rpc_sync("worker1", identity, args=(large,)), 4),
        ("backward/one_hop", lambda: backward(1), 200),
        ("backward/eight_hops", lambda: backward(8), 50),
    ]


def one_round(rank, ours, begin):
    """Of rank 0: the median seconds of each call, and the share of a core that the process takes when idle."""
    begin()
    results = {}
    if rank == 0:
        for name, call, count in calls(*ours):
            for _ in range(min(WARM_UP, count)):
                call()
            seconds = []
            for _ in range(count):
                started = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - started)
            results[name] = statistics.median(seconds)
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        results["idle"] = (time.process_time() - before) / IDLE_SECONDS
    ours[0].shutdown()
    return results


def nested_calls(rank, folder):
    """Seconds of 64 nested calls where one thread serves each worker; over TensorPipe they wait for each other for ever."""
    options = torchspan.rpc.Options(init_method=f"file://{folder}/nested", num_worker_threads=1)
    torchspan.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    seconds = []
    for _ in range(20 if rank == 0 else 0):
        started = time.perf_counter()
        if nested("worker1", "worker0", 64) != 64:
            raise AssertionError("64 nested calls returned another number")
        seconds.append(time.perf_counter() - started)
    torchspan.rpc.shutdown()
    return statistics.median(seconds) if seconds else 0.0


def measure(rank, folder, rounds):
    """Returns the metrics on rank 0."""
    from torchspan.torch_rpc import TorchSpanRpcBackendOptions

    def begin_torch(backend, options):
        rpc.init_rpc(
            f"worker{rank}", rank=rank, world_size=2, backend=rpc.BackendType[backend], rpc_backend_options=options
        )

    def begin_ours(options):
        torchspan.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    found = {"rpc": [], "torchspan.rpc": [], "tensorpipe": []}
    for number in range(rounds):
        for kind, results in found.items():
            method = f"file://{folder}/{kind}{number}"
            if kind == "torchspan.rpc":
                options = torchspan.rpc.Options(init_method=method)
                results.append(one_round(rank, (torchspan.rpc, torchspan.autograd), lambda: begin_ours(options)))
            else:
                name, make = (
                    ("TORCHSPAN", TorchSpanRpcBackendOptions) if kind == "rpc" else ("TENSORPIPE", rpc.TensorPipeRpcBackendOptions)
                )
                options = make(init_method=method)
                results.append(one_round(rank, (rpc, dist_autograd), lambda: begin_torch(name, options)))
    nested_seconds = nested_calls(rank, folder)
    if rank != 0:
        return []
    metrics = []
    for kind in ("rpc", "torchspan.rpc"):
        for name in found[kind][0]:
            ours, theirs = (statistics.median(one[name] for one in found[which]) for which in (kind, "tensorpipe"))
            metric = {"name": f"python/{kind}/{name}", "unit": "us", "peer": "tensorpipe"}
            scale = 1e6
            if name == "idle":
                metric["unit"], scale = "% of a core", 100
            metrics.append({**metric, "value": ours * scale, "peer_value": theirs * scale, "ratio": ours / theirs})
    metrics.append({"name": "python/torchspan.rpc/nested_64/one_thread", "unit": "us", "value": nested_seconds * 1e6})
    return metrics
