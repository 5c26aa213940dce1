"""A program on the installed wheel: a group, and calls, on two ranks of torchrun. See tools/test-packages."""

import importlib.metadata
import os

import torch
import torch.distributed as dist
from torch.distributed import rpc

import torchspan

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert size == 2, size
assert torchspan.__version__ == importlib.metadata.version("torchspan"), torchspan.__version__

dist.init_process_group("torchspan")
x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
assert x.tolist() == [3, 3, 3], x
dist.destroy_process_group()

rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, backend=rpc.BackendType.TORCHSPAN)
y = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank))
assert y.tolist() == [rank + 1, rank + 1], y
rpc.shutdown()
print(f"rank {rank} of torchspan {torchspan.__version__}, torch {torch.__version__}: all passed", flush=True)
