"""The backend BackendType.TORCHSPAN of torch.distributed.rpc: calls over authenticated shared memory, and encrypted between hosts."""

import json
import os

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api, backend_registry
from torch.distributed.rpc import constants as defaults
from torch.distributed.rpc.options import _to_device_list, _to_device_map

from . import _C, _calls
from .distributed import _host_of

_NAME = "TORCHSPAN"
# The last one; stopped at the end of the interpreter, for programs that do not call rpc.shutdown().
_agents: "list[_C.RpcAgent]" = []


class TorchSpanRpcBackendOptions(_C.RpcOptions):
    """Options of init_rpc(backend=BackendType.TORCHSPAN).

    num_worker_threads: how many functions a worker runs at the same time for the others.
    rpc_timeout: seconds after which a call fails; 0: no limit. A call may have its own.
    init_method: where the workers meet, as for init_process_group().
    device_maps: by the name of each callee, the devices here and theirs there. Tensors go through the hosts' memory.
    devices: the devices of this worker that messages use; by default, those that the maps of all workers name.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = defaults.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = defaults.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = defaults.DEFAULT_INIT_METHOD,
        device_maps: "dict[str, dict] | None" = None,
        devices: "list | None" = None,
    ):
        super().__init__(num_worker_threads, rpc_timeout, init_method)
        self.device_maps = {name: _to_device_map(device_map) for name, device_map in (device_maps or {}).items()}
        self.devices = _to_device_list(devices or [])

    def set_device_map(self, to: str, device_map: dict) -> None:
        """Adds to the map for calls to worker `to`: devices here, and theirs there."""
        maps = self.device_maps
        full = {**maps.get(to, {})}
        for here, there in _to_device_map(device_map).items():
            if full.get(here, there) != there:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {here} to {there} and {full[here]}"
                )
            full[here] = there
        maps[to] = _to_device_map(full)
        self.device_maps = maps

    def set_devices(self, devices: list) -> None:
        self.devices = _to_device_list(devices)


def register() -> None:
    """Makes BackendType.TORCHSPAN known. Importing the package does this."""
    if backend_registry.backend_registered(_NAME):
        return
    known = backend_registry.BackendType
    backend_registry.register_backend(_NAME, _make_options, _init_backend)
    # torch makes a new enumeration, in which members of the one that programs have imported are unknown.
    made = backend_registry.BackendType[_NAME]
    member = object.__new__(known)
    member._name_, member._value_, member._sort_order_ = made.name, made.value, len(known.__members__)
    setattr(known, _NAME, member)
    known._member_names_.append(_NAME)
    known._member_map_[_NAME] = member
    known._value2member_map_[member._value_] = member
    member.__objclass__ = known
    backend_registry.BackendType = known


def _make_options(rpc_timeout, init_method, **options):
    return TorchSpanRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def _init_backend(store, name, rank, world_size, rpc_backend_options):
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TorchSpanRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TorchSpanRpcBackendOptions`. {rpc_backend_options}")
    agent = _C.join_rpc(store, name, rank, world_size or 0, _host_of(store), rpc_backend_options, _on_departure)
    _agents[:] = [agent]
    _calls.at_exit(_stop_at_exit)
    try:
        if world_size:
            agent.set_devices(_devices(agent, name, rpc_backend_options))
        api._init_rpc_states(agent)
    except BaseException:
        agent.shutdown()
        if api._is_current_rpc_agent_set():
            rpc._reset_current_rpc_agent()
        raise
    return agent if world_size else _Alone(agent)


class _Alone:
    """In a world that workers join and leave, each waits for itself alone when it leaves; torch asks for those to wait for."""

    def __init__(self, agent):
        self._agent = agent

    def get_worker_infos(self):
        return [self._agent.get_worker_info()]


def _devices(agent, name, options):
    """Checks the device maps of all workers, as torch does for its own agent, and returns the devices that this one uses."""
    count = torch.accelerator.device_count() if hasattr(torch, "accelerator") else torch.cuda.device_count()
    mine = {
        "name": name,
        "count": count,
        "maps": {to: [[str(k), str(v)] for k, v in one.items()] for to, one in options.device_maps.items()},
        "devices": [str(device) for device in options.devices],
    }
    everyone = [json.loads(text) for text in agent.gather("torchspan.rpc.devices", json.dumps(mine).encode())]
    if not any(one["maps"] or one["devices"] for one in everyone):
        return []
    names = [one["name"] for one in everyone]
    maps = {
        one["name"]: {
            to: {torch.device(k): torch.device(v) for k, v in pairs} for to, pairs in one["maps"].items()
        }
        for one in everyone
    }
    devices = {one["name"]: [torch.device(text) for text in one["devices"]] for one in everyone}
    backend_registry._validate_device_maps(names, {one["name"]: one["count"] for one in everyone}, maps, devices)
    backwards = backend_registry._create_reverse_mapping(name, names, maps)
    used = backend_registry._create_device_list(devices[name], maps[name], backwards)
    if used and torch.cuda.is_available():
        torch.cuda.init()
    return used


class _Failed:
    """In place of the state of a gather that will not end: its waiters get the reason."""

    def __init__(self, reason, proceed_signal):
        self._reason, self.proceed_signal = reason, proceed_signal

    @property
    def gathered_objects(self):
        raise RuntimeError(f"torchspan: {self._reason}")


def _on_departure(name, reason):
    """Ends the waits of torch's own gathers and barriers, rpc.shutdown() among them, for a worker that died."""
    with api._all_gather_dict_lock:
        states = api._all_gather_sequence_id_to_states
        for sequence_id in list(states):
            if name in sequence_id and not states[sequence_id].proceed_signal.is_set():
                signal = states[sequence_id].proceed_signal
                states[sequence_id] = _Failed(reason, signal)
                signal.set()


def _current_agent() -> "_C.RpcAgent | None":
    """The agent while torch's RPC is initialized with it."""
    return _agents[0] if _agents and api._is_current_rpc_agent_set() else None


def _stop_at_exit():
    for agent in _agents:
        agent.stop_at_exit()


def _in_forked_child():
    """torch waits in a child, as in its parent, for others that do not know the child."""
    if not api._is_current_rpc_agent_set():
        return
    for agent in _agents:

        def refuse(name=agent.get_worker_info().name):
            raise RuntimeError(
                f"torchspan: this process is a fork of worker '{name}': only the process that called init_rpc() may use it"
            )

        api._is_current_rpc_agent_set = refuse


os.register_at_fork(after_in_child=_in_forked_child)
