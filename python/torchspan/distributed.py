"""The backend "torchspan" of torch.distributed: collectives on CPUs over shared memory, and encrypted between hosts."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import _C, _calls

_NAME = "torchspan"
_LEAVE_TIMEOUT = timedelta(seconds=30)
# Left at the end of the interpreter, for programs that do not call destroy_process_group().
_worlds: "list[_C.ObservedWorld]" = []


def register() -> None:
    """Registers the backend "torchspan". Importing the package does this; so does torch 2.14 and later by itself."""
    if _NAME.upper() not in dist.Backend._plugins:
        # CUDA tensors, too, so that a text of ours refuses them.
        dist.Backend.register_backend(_NAME, _create(_NAME), extended_api=True, devices=["cpu", "cuda"])


def use_for_gloo() -> None:
    """Makes init_process_group("gloo") and new_group(backend="gloo") use TorchSpan, for programs that name Gloo.

    Call it on every rank, before the first process group is made. Needs torch 2.14 or later.
    """
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        raise RuntimeError(
            f"torchspan.use_for_gloo() needs torch 2.14 or later, and this is {torch.__version__}: "
            'name the backend in the program: init_process_group("torchspan")'
        )
    dist.Backend._plugins["GLOO"] = dist.Backend._BackendPlugin(_create("gloo"), True)


def _create(name):
    def create(options, backend_options):
        timeout = options.timeout
        ranks = list(options.global_ranks_in_group)
        world = _world_of_default_group() if ranks else None
        if world is not None:
            return _C.make_backend(world, ranks, name, options.group_id, False, timeout)
        world = _C.join_world(
            options.store, options.group_rank, options.group_size, _host_of(options.store), timeout
        )
        _calls.at_exit(_leave_worlds)
        _worlds[:] = [*(known for known in _worlds if known.get() is not None), world.observe()]
        return _C.make_backend(world, [], name, options.group_id, True, timeout)

    return create


def _world_of_default_group():
    """The world of which a new group is a part; None if the default group has another backend."""
    if not dist.is_initialized():
        return None
    try:
        backend = c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend.world if isinstance(backend, _C.Backend) else None


def _host_of(store) -> str:
    """Where the program's TCPStore runs; empty for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "")


def _leave_worlds() -> None:
    for known in _worlds:
        try:
            world = known.get()
            if world is not None:
                world.leave(_LEAVE_TIMEOUT)
        except Exception:  # the others learn of the end anyway
            pass
