"""The same program over torch's own Gloo and over TorchSpan gives the same tensors."""

import shutil
import tempfile
import unittest

import torch
import torch.distributed as dist
from torch import nn

import processes


def model(width=16):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def batches(rank, count):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def operations(rank, size):
    """Every operation, with uneven lists and several dtypes."""
    results = []
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        tensor = torch.randint(1, 5, (6, size * 2), generator=generator).to(dtype)
        for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            results.append(tensor.clone())
            dist.all_reduce(results[-1], op=reduction)
        results.append(tensor.clone())
        dist.broadcast(results[-1], 1)
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        results += parts
        wide = torch.empty(6 * size, size * 2, dtype=dtype)
        dist.all_gather_into_tensor(wide, tensor)
        results.append(wide)
        gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == 1 else None
        dist.gather(tensor, gathered, dst=1)
        results += gathered or []
        scattered = torch.empty(2, dtype=dtype)
        dist.scatter(scattered, [torch.full((2,), r + 3).to(dtype) for r in range(size)] if rank == 0 else None, src=0)
        results.append(scattered)
        reduced = tensor.clone()
        dist.reduce(reduced, 0)
        results += [reduced] if rank == 0 else []
        split = torch.empty(6, 2, dtype=dtype)
        dist.reduce_scatter(split, [tensor[:, 2 * r : 2 * r + 2].contiguous() for r in range(size)])
        results.append(split)
        exchanged = torch.empty(2 * size, dtype=dtype)
        dist.all_to_all_single(exchanged, torch.arange(2 * size).to(dtype) + 10 * rank)
        results.append(exchanged)
        counts = [(rank + r) % 3 for r in range(size)]  # the same both ways
        uneven = torch.empty(sum(counts), 2, dtype=dtype)
        dist.all_to_all_single(uneven, torch.full((sum(counts), 2), rank).to(dtype), counts, counts)
        results.append(uneven)
    for values in (torch.tensor([True, rank == 0]), torch.tensor(complex(rank, 1))):
        dist.all_reduce(values)
        results.append(values)
    sparse = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (size, ))
    dist.all_reduce(sparse)
    results.append(sparse.to_dense())
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "tensor": torch.ones(rank)})
    return results + [o["tensor"] for o in objects]


def strided(rank):
    whole = torch.arange(12.0).reshape(3, 4) + rank
    return whole.t()[1:], whole


def strides(rank, size):
    view, whole = strided(rank)
    dist.all_reduce(view)
    assert torch.equal(whole[:, 0], strided(rank)[1][:, 0]), "elements outside the view changed"
    return [view.contiguous()]


def messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    got = [torch.empty(3), torch.empty(5)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), right, tag=1),
            dist.P2POp(dist.isend, torch.full((5,), float(-rank)), left, tag=2),
            dist.P2POp(dist.irecv, got[0], left, tag=1),
            dist.P2POp(dist.irecv, got[1], right, tag=2),
        ]
    )
    for work in works:
        work.wait()
    return got




class Branches(nn.Module):
    """Uses a branch that depends on the rank."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.rank = nn.Linear(8, 4), nn.Linear(8, 4), rank

    def forward(self, x):
        return self.first(x) if self.rank == 0 else self.second(x)


def ddp(rank, size, kind):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    if kind == "find_unused":
        net = DistributedDataParallel(Branches(rank), find_unused_parameters=True)
    elif kind == "static":
        net = DistributedDataParallel(model(), static_graph=True)
    else:
        net = DistributedDataParallel(model(), gradient_as_bucket_view=kind == "views", 
                                      bucket_cap_mb=25 if kind == "power_sgd" else 0.001)
    if kind == "bf16":
        net.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if kind == "power_sgd":  # one bucket: callbacks of several would call operations in any order
        net.register_comm_hook(powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 6)):
        if kind == "no_sync" and step % 3 != 2:
            with net.no_sync():
                net(batch).square().mean().backward()
            continue
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def fsdp(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for batch in batches(rank, 4):
        net(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in net.parameters()]


def dtensor(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    tensor = torch.arange(6.0 * size).reshape(2 * size, 3)
    rows = distribute_tensor(tensor, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    return [columns.to_local(), columns.redistribute(mesh, [Replicate()]).to_local(), (rows @ rows.t()).full_tensor()]


def checkpoint(rank, size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.arange(8.0 * size).reshape(2 * size, 4), mesh, [Shard(0)])
    dcp.save({"tensor": tensor}, checkpoint_id=folder)
    other = distribute_tensor(torch.zeros(2 * size, 4), mesh, [Shard(1)])
    dcp.load({"tensor": other}, checkpoint_id=folder)
    return [other.full_tensor()]


def pipeline(rank, size):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    stage_module = nn.Linear(8, 8)
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    torch.manual_seed(5)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    return [p.grad.clone() for p in stage_module.parameters()] + [loss.detach() for loss in losses]


class SameAsGloo(unittest.TestCase):
    def check(self, body, size, *arguments, tolerance=0.0):
        ours = processes.run(size, body, *arguments)
        theirs = processes.run(size, body, *arguments, world=processes.Group("gloo"))
        for rank in range(size):
            self.assertIsInstance(theirs[rank], list, theirs[rank])
            self.assertIsInstance(ours[rank], list, ours[rank])
            self.assertEqual(len(ours[rank]), len(theirs[rank]))
            for mine, other in zip(ours[rank], theirs[rank]):
                torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)

    def test_operations(self):
        for size in (2, 3, 4):
            with self.subTest(size=size):
                self.check(operations, size, tolerance=1e-6)

    def test_messages(self):
        self.check(messages, 3)

    def test_data_parallel_training(self):
        for kind in ("plain", "views", "find_unused", "static", "no_sync", "bf16", "power_sgd"):
            with self.subTest(kind=kind):
                self.check(ddp, 2, kind, tolerance=1e-6)

    def test_strides(self):
        # Gloo reduces the memory of such a tensor, not its elements.
        for size in (2, 3):
            for rank, result in enumerate(processes.run(size, strides)):
                self.assertIsInstance(result, list, result)
                torch.testing.assert_close(result[0], strided(0)[0] * size + sum(range(size)))

    def test_fully_sharded_training(self):
        self.check(fsdp, 2, tolerance=1e-6)
        self.check(fsdp, 3, tolerance=1e-6)

    def test_distributed_tensors(self):
        self.check(dtensor, 3, tolerance=1e-6)

    def test_distributed_checkpoints(self):
        folder = tempfile.mkdtemp()
        self.check(checkpoint, 2, folder)
        shutil.rmtree(folder)

    def test_pipelines(self):
        self.check(pipeline, 3, tolerance=1e-6)


if __name__ == "__main__":
    unittest.main()
