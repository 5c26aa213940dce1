"""Remote calls between Python programs on TorchSpan's own engine, with the names of torch.distributed.rpc.

    from torchspan import rpc
    rpc.init_rpc("worker0", rank=0, world_size=2)
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    rpc.shutdown()

Functions that other workers call may be `async def`: they hold no thread while they await calls.
"""

import contextlib
import functools as _functools
import importlib
import os
import pickle
import re
import sys
import threading
import time
import types
import urllib.parse
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from . import _C, _calls, errors
from ._calls import RemoteError
from ._C import RRef

__all__ = [
    "Future",
    "Options",
    "RRef",
    "RemoteError",
    "WorkerInfo",
    "delay",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "install",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "typed",
    "wait_all",
]

UNSET_TIMEOUT = -1.0
_inits = 0
_OPEN = "torchspan.rpc/open"  # in the program's store
_stores = []  # that rank 0 may serve, until shutdown(): other ranks may still connect


@dataclass(frozen=True)
class WorkerInfo:
    """A worker: its name, and its rank as id."""

    name: str
    id: int

    def __post_init__(self):
        if not self.name:
            raise RuntimeError("Worker name must be non-empty")
        if not re.fullmatch("[A-Za-z0-9_:-]{1,127}", self.name):
            raise RuntimeError(
                f"Worker name must match ^[A-Za-z0-9-_:]*$ and be shorter than 128 characters, but got {self.name!r}"
            )


@dataclass
class Options:
    """Options of init_rpc().

    num_worker_threads: how many functions this worker runs at the same time for the others; those that wait do not count.
    rpc_timeout: seconds after which a call fails; 0: no limit. A call may have its own.
    init_method: where the workers meet, as for torch.distributed.init_process_group(); or "torchspan://", where workers of C++
    meet under `torchspan run`: at MASTER_ADDR and MASTER_PORT, with RANK and WORLD_SIZE.
    device_maps: by the name of each callee, the devices here and theirs there: {"worker1": {"cuda:0": "cuda:1"}}. Tensors of calls are
    placed by the map, those of results by its inverse. Without a map for a worker, tensors arrive there on the CPU.
    """

    num_worker_threads: int = 16
    rpc_timeout: float = 60.0
    init_method: str = "env://"
    device_maps: dict = field(default_factory=dict)
    devices: list = field(default_factory=list)

    def set_device_map(self, to: str, device_map: dict) -> None:
        """Adds to the map for calls to worker `to`: devices here, and theirs there."""
        self.device_maps = {**self.device_maps, to: {**self.device_maps.get(to, {}), **device_map}}


class functions:
    """Decorators of functions that other workers call."""

    @staticmethod
    def async_execution(function):
        """The function returns a Future; its caller gets what that completes with. `async def` does the same."""

        @_functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        wrapper._wrapped_async_rpc_function = function
        return wrapper


class Future(torch.futures.Future):
    """The result of rpc_async(). wait() also receives messages, so that no other thread need wake up."""

    def __init__(self, handle):
        super().__init__()
        self._handle = handle
        handle.on_done(self._finish)

    def _finish(self):
        handle = self.__dict__.pop("_handle", None)  # once: by the thread that waits, or by one of the pool
        if handle is None:
            return
        try:
            result = handle.wait()
        except BaseException as error:
            if not handle.done():  # what a signal handler raised, and not the call
                self._handle = handle
                if handle.done():  # the pool's callback may have come meanwhile
                    self._finish()
                raise
            _C.fail_future(self, error)
        else:
            self.set_result(result)

    def wait(self):
        self._finish()
        return super().wait()

    def __await__(self):
        if not self.done():
            yield self
        return self.wait()


def init_rpc(
    name: str,
    backend=None,
    rank: int = -1,
    world_size: "int | None" = None,
    rpc_backend_options=None,
    *,
    functions: "list | None" = None,
    typed: "list | tuple" = (),
) -> None:
    """Joins as worker `name` and serves the others; returns when all workers have joined.

    world_size None: that of the environment. If that has none either, or 0: workers join and leave at any time; rank 0 must stay until
    the others have left, and a worker without a rank gets the next free one. functions: the only callables that others may call; then nothing
    is pickled, and only tensors, numbers, strings, bytes, lists, tuples, dicts and references travel. typed: functions of
    typed() that workers of C++ may call.
    """
    if _calls.has_worker():
        raise RuntimeError("torchspan.rpc: this process is already initialized as a worker: call shutdown() first")
    if backend is not None and not hasattr(backend, "value"):
        raise TypeError("Argument backend must be a member of BackendType; torchspan.rpc has one backend, and needs none named")
    options = Options() if rpc_backend_options is None else rpc_backend_options
    if not hasattr(options, "init_method"):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions, such as torchspan.rpc.Options")
    if not hasattr(options, "num_worker_threads"):
        raise TypeError(f"Could not infer backend for options {options!r}: use torchspan.rpc.Options")
    device_maps = _device_maps(getattr(options, "device_maps", None) or {})
    _C.check_seconds("rpc_timeout", options.rpc_timeout)
    if options.num_worker_threads < 1:
        raise ValueError(f"num_worker_threads is {options.num_worker_threads}; expected at least 1")
    for function in typed:
        if not isinstance(function, _calls.Typed):
            raise TypeError(f"torchspan.rpc: typed has {function!r}, which is not a function of torchspan.rpc.typed()")
    functions = None if functions is None else list(functions)
    store, rank, size, host = _meet(options.init_method, rank, world_size, options.rpc_timeout)
    with _torch_words(name), _calls.joining(functions):
        worker = _C.join_worker(
            store,
            name,
            rank,
            size,
            host,
            options.num_worker_threads,
            options.rpc_timeout,
            functions is None,
            _calls.Hooks(functions),
            list(typed),
            device_maps,
        )
        _calls.set_current_worker(worker, device_maps)
    _calls.at_exit(_stop_at_exit)


def _device_maps(maps):
    """As pairs of devices, by worker. Raises ValueError that names the worker for what is no device."""
    pairs = {}
    for worker, device_map in maps.items():
        try:
            pairs[worker] = [(torch.device(here), torch.device(there)) for here, there in device_map.items()]
        except (RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(f"torchspan.rpc: the device map for worker '{worker}' is {device_map!r}: {error}") from None
    return pairs


def _meet(init_method, rank, world_size, timeout):
    """The program's store, or None if the workers meet at TorchSpan's; this rank, -1 for any; the world's size, 0 if it is open, -1
    if only the environment has it; and the store's host."""
    global _inits
    if world_size is not None and world_size < 0:
        raise ValueError(f"world_size is {world_size}; expected 1 or more, or None for workers that join and leave at any time")
    if init_method == "torchspan://":
        size = -1 if world_size is None else world_size
        for name, given in (("RANK", rank), ("WORLD_SIZE", size)):
            if given >= 0 and os.environ.get(name, str(given)) != str(given):
                raise ValueError(f"torchspan.rpc: {name} is {os.environ[name]} in the environment, and {given} in the call")
        return None, rank, size, ""
    if _is_open(init_method, world_size):
        return _meet_open_world(init_method, rank, timeout)
    meeting = dist.rendezvous(init_method, rank=rank, world_size=-1 if world_size is None else world_size)
    store, found_rank, found_size = next(meeting)
    if store.check([f"{_OPEN}/torchspan/store"]) and store.get(f"{_OPEN}/torchspan/store") != b"ended":
        _refuse_other_kind(f"a world_size of {found_size}", "none")
    _inits += 1
    _stores.append(store)
    return (
        dist.PrefixStore(f"torchspan.rpc/{_inits}", store),
        found_rank if rank < 0 else rank,
        found_size if world_size is None else world_size,
        getattr(store, "host", ""),
    )


def _is_open(init_method, world_size) -> bool:
    """Whether neither the call nor the environment nor the address gives a number of workers."""
    if world_size is not None:
        return world_size == 0
    address = urllib.parse.urlsplit(init_method)
    found = os.environ.get("WORLD_SIZE") if address.scheme == "env" else None
    return "world_size" not in urllib.parse.parse_qs(address.query) and (found or "0") == "0"


def _meet_open_world(init_method, rank, timeout):
    address = urllib.parse.urlsplit(init_method)
    if rank < 0 and address.scheme == "env":
        rank = int(os.environ.get("RANK") or -1)
    given = urllib.parse.parse_qs(address.query)
    rank = int(given["rank"][0]) if rank < 0 and "rank" in given else rank
    query = "&".join(filter(None, (address.query, "" if "rank" in given else f"rank={rank}", "world_size=-1")))
    store, _, _ = next(dist.rendezvous(urllib.parse.urlunsplit(address._replace(query=query))))
    if any(store.check([f"torchspan.rpc/1/torchspan/host/{other}"]) for other in (0, 1)):
        _refuse_other_kind("no world_size", "one")
    # How long this worker waits for rank 0.
    store.set_timeout(timedelta(seconds=min(max(timeout, 60.0), 1e6)))
    _stores.append(store)
    # The same place for each of its worlds: a worker may come for the first time when others come again.
    return dist.PrefixStore(_OPEN, store), rank, 0, getattr(store, "host", "")


def _refuse_other_kind(mine, theirs):
    raise ValueError(f"torchspan.rpc: this worker has {mine}, and the others at this store have {theirs}: give all workers the same")


@contextlib.contextmanager
def _torch_words(name):
    try:
        yield
    except errors.Error as error:
        if "are named" not in str(error) and f"the name '{name}' is taken" not in str(error):
            raise
        raise errors.of_kind(error.kind, f"RPC worker name {name} is not unique: {error}") from None


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Waits until no worker has outstanding calls, then leaves together with the others; without `graceful`, at once.

    Where workers join and leave at any time: waits for this worker's own calls, then leaves; rank 0 waits until the others have left.
    timeout: seconds; 0: no limit.
    """
    if not _calls.has_worker():
        return
    _C.check_seconds("timeout", timeout)
    worker = _calls.current_worker()
    try:
        if graceful:
            worker.shutdown(timeout)
        else:
            worker.stop()
    finally:
        _calls.set_current_worker(None)
        _stores.clear()


def get_worker_info(worker_name: "str | None" = None) -> WorkerInfo:
    """This worker, or the one of that name."""
    worker = _calls.current_worker()
    if worker_name is None:
        return WorkerInfo(worker.name, worker.rank)
    for one in get_worker_infos():
        if one.name == worker_name:
            return one
    names = ", ".join(one.name for one in get_worker_infos())
    raise errors.of_kind("invalid", f"could not find destination '{worker_name}': there are {names}")


def get_worker_infos() -> "list[WorkerInfo]":
    """All workers, by rank."""
    return [WorkerInfo(name, rank) for name, rank in _calls.current_worker().workers()]


def get_rpc_timeout() -> float:
    """The limit of calls that name none, in seconds; 0: no limit."""
    return _calls.current_worker().default_timeout


def _set_rpc_timeout(timeout: float) -> None:
    _calls.current_worker().default_timeout = timeout


def _destination(to):
    if isinstance(to, (str, int)):
        return to
    if hasattr(to, "id") and hasattr(to, "name"):
        return to.id
    raise ValueError(f"torchspan.rpc: cannot find a worker for {to!r}: give a name, a rank or a WorkerInfo")


def typed(function=None, *, name: "str | None" = None, signature: "str | None" = None):
    """Decorator: gives a function the name and types of a C++ function, torchspan::Function.

    Pass it to rpc_sync() or rpc_async() to call that function of a C++ worker; its body is then not used. List it in
    init_rpc(typed=[…]), and C++ workers may call it here. Types are those of the annotations: bool, int (int64), float
    (float64), str (string), bytes (string), torch.Tensor, list, dict (map), tuple, Optional; or those of `signature`, as
    "(Tensor, vector<int32>) -> float32". Nothing is pickled.
    """
    if function is None:
        return lambda function: _calls.Typed(function, name, signature)
    return _calls.Typed(function, name, signature)


def _call(to, func, args, kwargs, timeout, name=None):
    if isinstance(func, _calls.Typed):
        args, kwargs, name = func.bound(args or (), kwargs or {}), None, func.type.name
    name = name or getattr(func, "__qualname__", None) or type(func).__qualname__
    return _C.Call(_destination(to), func, tuple(args or ()), kwargs or {}, timeout, name)


def _sync(call):
    return _calls.current_worker().call(call)


def _async(call):
    future = Future(_calls.current_worker().call_async(call))
    _collect(future)
    return future


def _create(call):
    return _calls.current_worker().create(call)


def rpc_sync(to, func, args=None, kwargs=None, timeout: float = UNSET_TIMEOUT):
    """Calls func(*args, **kwargs) on worker `to` and returns its result.

    timeout: seconds; 0: no limit; default: the worker's. An exception arrives as its own type, with the traceback of the
    other worker as its cause; failures of the library are those of torchspan.errors.
    """
    return _sync(_call(to, func, args, kwargs, timeout))


def rpc_async(to, func, args=None, kwargs=None, timeout: float = UNSET_TIMEOUT) -> Future:
    """Like rpc_sync(), but returns a Future at once: wait() for it, or await it."""
    return _async(_call(to, func, args, kwargs, timeout))


def remote(to, func, args=None, kwargs=None, timeout: float = UNSET_TIMEOUT) -> RRef:
    """Calls func(*args, **kwargs) on worker `to`, which keeps the result, and returns a reference to it at once."""
    return _create(_call(to, func, args, kwargs, timeout))


def delay(seconds: float) -> Future:
    """A future that completes after that time; no thread waits: `await rpc.delay(0.002)`."""
    return Future(_calls.current_worker().delay(seconds))


_thread_local_var = threading.local()


def _collect(future) -> None:
    collected = getattr(_thread_local_var, "future_list", None)
    if collected is not None:
        collected.append(future)


@contextlib.contextmanager
def wait_all():
    """At its end, waits for all futures of rpc_async() that this thread made in its block, and raises the first failure."""
    if hasattr(_thread_local_var, "future_list"):
        raise RuntimeError("torchspan.rpc: wait_all() in a block of wait_all(): one block waits for all of its calls")
    _thread_local_var.future_list = made = []
    try:
        yield
    finally:
        del _thread_local_var.future_list
        _calls.all_of(made)


# ---- references


@_calls.own
def _call_method(rref, name, args, kwargs):
    if name.startswith("_") and not _calls.pickles():
        raise ValueError(f"torchspan: {name} is private: with functions=[…] only public methods can be called")
    created = rref._created()
    if not created.done():
        return _call_method_later(Future(created), rref, name, args, kwargs)
    created.wait()  # raises what the creation raised
    return _invoke(rref, name, args, kwargs)


def _invoke(rref, name, args, kwargs):
    value = rref.local_value()
    if not _calls.may_call_method(value, name):
        kind = type(value).__name__
        raise ValueError(
            f"torchspan: {kind}.{name} is not among the functions=[…] with which this worker was started: add {kind}, for all of its "
            f"public methods, or {kind}.{name} there"
        )
    method = getattr(value, name)
    result = method(*args, **kwargs)
    return _calls.Later(result) if hasattr(method, "_wrapped_async_rpc_function") else result


async def _call_method_later(created, rref, name, args, kwargs):
    await created
    result = _invoke(rref, name, args, kwargs)
    if isinstance(result, _calls.Later):
        return await _Awaited(result.future)
    return await result if isinstance(result, types.CoroutineType) else result


@_calls.own
def _type_of(rref):
    return type(rref.local_value())


class _Awaited:
    """Awaits a future of torch, which has no __await__."""

    def __init__(self, future):
        self._future = future

    def __await__(self):
        if not self._future.done():
            yield self._future
        return self._future.wait()


class _Proxy:
    """Methods of a referenced value, called on its owner."""

    def __init__(self, verb, rref, timeout):
        self._verb, self._rref, self._timeout = verb, rref, timeout

    def __getattr__(self, name):
        def call(*args, **kwargs):
            owner = self._rref._owner()[1]
            return self._verb(_call(owner, _call_method, (self._rref, name, args, kwargs), None, self._timeout, name))

        return call


def _extend_references() -> None:
    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return WorkerInfo(*self._owner())

    def proxies(verb, text):
        def proxy(self, timeout: float = UNSET_TIMEOUT):
            return _Proxy(verb, self, timeout)

        proxy.__doc__ = text
        return proxy

    def refuse_pickle(self, *_):
        raise RuntimeError("Can not pickle rref in python pickler: send it as an argument or a result of a call")

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs backward() with the value as root: in the context, or on the owner's own graph."""
        from . import autograd

        if dist_autograd_ctx_id == -1 and not self.is_owner():
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        value = self.to_here()
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(f"RRef should contain a tensor for .backward(), and contains a {type(value).__name__}")
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)
        else:
            autograd.backward(dist_autograd_ctx_id, [value], retain_graph=retain_graph)

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True):
        verb = _sync if blocking else _async
        return verb(_call(self._owner()[1], _type_of, (self,), None, timeout))

    def _get_future(self) -> Future:
        return Future(self._created())

    for name, member in {
        "owner": owner,
        "rpc_sync": proxies(_sync, "rref.rpc_sync().method(…): calls a method of the value on its owner."),
        "rpc_async": proxies(_async, "The same, returns a Future."),
        "remote": proxies(_create, "The same, returns a reference to the result, which the owner keeps."),
        "backward": backward,
        "_get_future": _get_future,
        "_get_type": _get_type,
        "_serialize": lambda self: self,  # torch's RemoteModule asks for it inside of a call
        "_deserialize": staticmethod(lambda reference: reference),
        "__reduce_ex__": refuse_pickle,
        "__class_getitem__": classmethod(types.GenericAlias),
    }.items():
        setattr(RRef, name, member)
    RRef.__module__ = __name__


_extend_references()


def _all_gather(obj, worker_names=None, timeout: float = UNSET_TIMEOUT) -> dict:
    """What each worker gave, by name, once all of them have called it."""
    worker = _calls.current_worker()
    names = [one.name for one in get_worker_infos()]
    if unknown := set(worker_names or ()) - set(names):
        raise errors.of_kind("invalid", f"could not find destination {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    chosen = sorted(worker_names) if worker_names else names
    limit = worker.default_timeout if timeout == UNSET_TIMEOUT else timeout
    _C.check_seconds("timeout", limit)
    started = time.monotonic()
    mine = pickle.dumps(obj)
    left = limit - (time.monotonic() - started)
    if limit > 0 and left <= 0:
        raise errors.of_kind("timed out", f"timed out in _all_gather after {limit:.2f} seconds: the object was pickled too slowly")
    return dict(zip(chosen, map(pickle.loads, worker.gather(mine, chosen if worker_names else [], max(left, 0.0)))))


def _wait_all_workers(timeout: float = UNSET_TIMEOUT) -> None:
    _all_gather(None, timeout=timeout)


def _barrier(worker_names) -> None:
    _all_gather(None, set(worker_names))


class _Agent:
    """What programs for torch.distributed.rpc ask its agent for."""

    def __getattr__(self, name):
        return getattr(_calls.current_worker(), name)

    def get_worker_info(self, worker=None):
        if isinstance(worker, int):
            return next(one for one in get_worker_infos() if one.id == worker)
        return get_worker_info(worker)

    def get_worker_infos(self):
        return get_worker_infos()

    def _get_device_map(self, worker):
        return _calls.device_map_of(worker.name)

    def get_debug_info(self):
        return {"agent.calls": _calls.current_worker().debug()}


def _current_agent():
    _calls.current_worker()
    return _Agent()


def _stop_at_exit():
    if _calls.has_worker():
        _calls.current_worker().stop_at_exit()


def install() -> None:
    """Puts this at torch.distributed.rpc and torch.distributed.autograd, also where torch has neither."""
    from . import autograd

    _calls.print_failures()
    here = sys.modules[__name__]
    for name, source in (("torch.distributed.rpc", here), ("torch.distributed.autograd", autograd)):
        module = sys.modules.get(name)
        if module is None:
            try:
                module = importlib.import_module(name)
            except ImportError:
                module = sys.modules[name] = types.ModuleType(name, source.__doc__)
                setattr(dist, name.rpartition(".")[2], module)
        for public in source.__all__:
            setattr(module, public, getattr(source, public))
    rpc = sys.modules["torch.distributed.rpc"]
    rpc._wait_all, rpc._set_rpc_timeout = wait_all, _set_rpc_timeout
    rpc.WorkerInfo, rpc._get_current_rpc_agent = WorkerInfo, _current_agent
    rpc._is_current_rpc_agent_set, rpc.PyRRef = _calls.has_worker, RRef
    torch._jit_internal.RRef = RRef  # in annotations of TorchScript
    api = getattr(rpc, "api", None)
    from . import optim

    importlib.import_module("torch.distributed.optim").DistributedOptimizer = optim.DistributedOptimizer
    for name, ours in {
        **{name: getattr(here, name) for name in __all__},
        "_all_gather": _all_gather,
        "_get_current_rpc_agent": _current_agent,
        "_barrier": _barrier,
        "_thread_local_var": _thread_local_var,
        "_wait_all": wait_all,
        "_wait_all_workers": _wait_all_workers,
    }.items():
        if api is not None:
            setattr(api, name, ours)
