"""torch.distributed.rpc over TorchSpan against TensorPipe, torch's own agent: two processes, rounds in turn."""

import statistics
import time

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

WARM_UP = 20
IDLE_SECONDS = 1.0


def nothing():
    return None


def identity(value):
    return value


def calls():
    """(name, call, how often) of what rank 0 does; a round takes about half a second on an idle machine."""
    small, large = torch.zeros(16), torch.zeros(1 << 24)
    factor = torch.ones(16, requires_grad=True)

    def backward():
        with dist_autograd.context() as context:
            product = rpc.rpc_sync("worker1", torch.mul, args=(factor, factor))
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
        ("backward/one_hop", backward, 200),
    ]


def one_round(rank, backend, options):
    """Of rank 0: the median seconds of each call, and the share of a core that the process takes when idle."""
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, backend=rpc.BackendType[backend], rpc_backend_options=options
    )
    results = {}
    if rank == 0:
        for name, call, count in calls():
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
    rpc.shutdown()
    return results


def measure(rank, folder, rounds):
    """Returns the metrics on rank 0."""
    from torchspan.torch_rpc import TorchSpanRpcBackendOptions

    found = {"TORCHSPAN": [], "TENSORPIPE": []}
    for number in range(rounds):
        for backend, make in (("TORCHSPAN", TorchSpanRpcBackendOptions), ("TENSORPIPE", rpc.TensorPipeRpcBackendOptions)):
            options = make(init_method=f"file://{folder}/{backend}{number}")
            found[backend].append(one_round(rank, backend, options))
    if rank != 0:
        return []
    metrics = []
    for name in found["TORCHSPAN"][0]:
        ours, theirs = (statistics.median(one[name] for one in found[backend]) for backend in found)
        metric = {"name": f"python/rpc/{name}", "unit": "us", "peer": "tensorpipe"}
        scale = 1e6
        if name == "idle":
            metric["unit"], scale = "% of a core", 100
        metrics.append({**metric, "value": ours * scale, "peer_value": theirs * scale, "ratio": ours / theirs})
    return metrics
