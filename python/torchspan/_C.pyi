"""The compiled module; programs use torchspan and torchspan.rpc."""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Store
from torch.distributed.rpc import RpcAgent as _TorchAgent
from torch.distributed.rpc import RpcBackendOptions as _TorchOptions
from torch.distributed.rpc import WorkerInfo

version: str
torch_version: str

class World:
    def leave(self, timeout: timedelta) -> None: ...
    def observe(self) -> ObservedWorld: ...

class ObservedWorld:
    def get(self) -> World | None: ...

class Backend(torch._C._distributed_c10d.Backend):
    @property
    def world(self) -> World: ...

def join_world(store: Store, rank: int, size: int, master_host: str, timeout: timedelta) -> World: ...
def make_backend(
    world: World, ranks: list[int], backend: str, group: str, ends_world: bool, timeout: timedelta
) -> Backend: ...

class RpcOptions(_TorchOptions):
    num_worker_threads: int
    device_maps: dict[str, dict[torch.device, torch.device]]
    devices: list[torch.device]
    def __init__(self, num_worker_threads: int, rpc_timeout: float, init_method: str) -> None: ...

class RpcAgent(_TorchAgent):
    def get_worker_info(self, worker: str | int = ..., /) -> WorkerInfo: ...
    def get_worker_infos(self) -> list[WorkerInfo]: ...
    def gather(self, tag: str, mine: bytes) -> list[bytes]: ...
    def set_devices(self, devices: list[torch.device]) -> None: ...
    def stop_at_exit(self) -> None: ...

def join_rpc(
    store: Store,
    name: str,
    rank: int,
    size: int,
    master_host: str,
    options: RpcOptions,
    on_departure: Callable[[str, str], None],
) -> RpcAgent: ...
