"""Checkpoints of Python programs: files that the package safetensors reads, complete for all ranks or not there.

    manager = torchspan.CheckpointManager("checkpoints", keep_last=3)
    manager.add("model", model)
    manager.add("optimizer", optimizer)
    manager.add("progress", progress := {"samples": 0})  # numbers and texts are in a dict or a list
    for step in range(manager.restore_or(0), 1000):
        train_step()
        manager.save(step + 1)
    manager.close()
"""

import base64
import collections
import itertools
import json
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _C, _calls, distributed, errors, rpc

__all__ = ["CheckpointManager"]

_numbers = itertools.count(1)


class CheckpointManager:
    """Saves and restores the registered objects of all ranks as one checkpoint, which exists for all of them or for none.

    The ranks are the workers of torchspan.rpc (`participants`: the names of those that have this manager; None: all), or the
    ranks of torch.distributed's default group, of any backend, or this process. Every rank registers its objects under the
    same names, and calls save() and restore() in the same order. directory: on a file system that all ranks share. save()
    returns when the state is copied; with asynchronous=False when the checkpoint is complete. timeout: seconds of each
    wait for other ranks; 0: no limit. rng: also saves torch's default generators of every rank.
    """

    def __init__(
        self,
        directory,
        *,
        keep_last: int = 3,
        keep_best: int = 0,
        lower_is_better: bool = True,
        asynchronous: bool = True,
        rng: bool = True,
        participants=None,
        name: str = "manager",
        timeout: float = 1800.0,
    ):
        options = _C.CheckpointOptions()
        options.directory = str(directory)
        options.keep_last, options.keep_best, options.lower_is_better = keep_last, keep_best, lower_is_better
        options.asynchronous, options.rng = asynchronous, rng
        options.participants, options.name, options.timeout = list(participants or []), name, timeout
        self._own_worker = None
        worker = _calls.current_worker() if _calls.has_worker() else None
        if worker is None and dist.is_initialized() and dist.get_world_size() > 1:
            worker = self._own_worker = _join_ranks(timeout)
        self._manager = _C.CheckpointManager(worker, options)

    def add(self, name: str, value) -> None:
        """Registers a module, an optimizer, a schedule or another object with state_dict() and load_state_dict(), a tensor, a
        torch.Generator, a dict or list of plain values, or a reference to such an object on another worker.

        Ranks that register the same name have replicas, whose plain values must be equal.
        """
        self._manager.add(name, _adapter(name, value), False)

    def add_per_rank(self, name: str, value) -> None:
        """Registers an object whose state differs between ranks, such as a sampler; as many ranks as saved it can restore it."""
        self._manager.add(name, _adapter(name, value), True)

    def save(self, step: int, *, metric: "float | None" = None) -> None:
        """Saves the state after `step` steps. If the previous save failed, raises its error instead, on all ranks."""
        self._manager.save(step, metric)

    def wait(self) -> None:
        """Returns when the last save() is a checkpoint; raises if it failed."""
        self._manager.wait()

    def restore(self) -> "int | None":
        """Restores the newest undamaged checkpoint and returns its step; None if there is none."""
        return self._manager.restore()

    def restore_or(self, first_step: int) -> int:
        """The same, or returns `first_step` if there is no checkpoint."""
        found = self.restore()
        return first_step if found is None else found

    def close(self) -> None:
        """Waits for the last save(), and lets the other ranks go. The manager cannot be used afterwards."""
        if self._manager is None:
            return
        manager, worker = self._manager, self._own_worker
        self._manager = self._own_worker = None
        try:
            manager.wait()
        finally:
            del manager
            if worker is not None:
                worker.shutdown(0.0)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            return self.close()
        # The others must not wait for this rank, nor this rank for them.
        manager, worker = self._manager, self._own_worker
        self._manager = self._own_worker = None
        if worker is not None:
            worker.stop()
        del manager

    def __del__(self):
        if getattr(self, "_own_worker", None) is not None:
            self._manager = None
            self._own_worker.stop_at_exit()


def _join_ranks(timeout):
    """A worker for the ranks of a program without torchspan.rpc; they find each other through the default group's store."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    return _C.join_worker(
        dist.PrefixStore(f"torchspan.checkpoint/{next(_numbers)}", store),
        f"rank{rank}",
        rank,
        dist.get_world_size(),
        distributed._host_of(store),
        1,
        timeout,
        False,
        _calls.Hooks([]),
    )


def _adapter(name, value):
    if isinstance(value, rpc.RRef):
        return _Stateful(name, _Remote(value))
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if isinstance(value, torch.nn.Module):
        return _Module(value)
    if isinstance(value, torch.Tensor):
        return _Tensor(value)
    if isinstance(value, torch.Generator):
        return _Generator(value)
    if isinstance(value, (dict, list)):
        return _Container(name, value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _Stateful(name, value)
    raise TypeError(
        f"torchspan: a checkpoint cannot save '{name}', a {type(value).__name__}: register a module, an optimizer, an object with "
        "state_dict() and load_state_dict(), a tensor, a torch.Generator, or a dict or list that holds the value"
    )


class _Remote:
    """The state of an object on another worker."""

    def __init__(self, rref):
        self._rref = rref

    def state_dict(self):
        return self._rref.rpc_sync(timeout=0).state_dict()

    def load_state_dict(self, state):
        self._rref.rpc_sync(timeout=0).load_state_dict(state)


class _Tensor:
    def __init__(self, tensor):
        self._tensor = tensor

    def save(self):
        return _listed("", self._tensor)

    def load(self, reader):
        target, offset = _part("", self._tensor)
        if offset is not None:
            reader.read_shard("", target, offset)


class _Generator:
    def __init__(self, generator):
        self._generator = generator

    def save(self):
        return [("", self._generator.get_state())]

    def load(self, reader):
        self._generator.set_state(reader.read("").clone())


class _Module:
    """Parameters and buffers by name, a tensor with several names once; other entries of the state as one text.

    Of a DTensor, each rank saves and reads its own part, in a file of the whole: other ranks, of any number, may continue.
    """

    def __init__(self, module):
        self._module = module

    def save(self):
        tensors, others = self._split()
        return [item for names, tensor in tensors for item in _listed(names[0], tensor)] + [
            item for key, value in others.items() for item in _encoded(key, value)
        ]

    def load(self, reader):
        state, unexpected, missing = {}, set(reader.names()), []
        tensors, others = self._split()
        for names, tensor in tensors:
            saved = next((name for name in names if reader.has(name)), None)
            if saved is None:
                missing.append(names[0])
                continue
            reader.check(saved, tensor)
            unexpected.difference_update(names)
            state.update(dict.fromkeys(names, (saved, tensor)))
        unexpected = {name for name in unexpected if not any(name.startswith(f"{key}.") for key in others)}
        faults = [f"the checkpoint has no {_some(missing)}"] if missing else []
        faults += [f"the module has no {_some(unexpected)}"] if unexpected else []
        if faults:
            raise ValueError("; ".join(faults))
        read = {name: _read_as(reader, saved, tensor) for name, (saved, tensor) in state.items()}
        read.update({key: _decoded(key, reader) for key in others})
        self._module.load_state_dict(read)

    def _split(self):
        """(names, tensor) of each tensor, and the other entries of the state."""
        known, others = {}, {}
        for name, value in self._module.state_dict().items():
            if not isinstance(value, torch.Tensor):
                others[name] = value
                continue
            local = value.detach().to_local() if _is_divided(value) else value
            # An empty part has no memory, but its storage tells whether two names are one tensor.
            place = (local.untyped_storage()._cdata, local.storage_offset())
            known.setdefault((place, value.dtype, value.shape, value.stride()), ([], value))[0].append(name)
        return list(known.values()), others


class _Stateful:
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, name, value):
        self._name, self._value = name, value

    def save(self):
        return _encoded("", self._value.state_dict(), self._parameters())

    def load(self, reader):
        self._value.load_state_dict(_decoded("", reader, self._parameters()))

    def _parameters(self):
        """Of an optimizer of torch: its DTensors, by the names of their state."""
        if not isinstance(self._value, torch.optim.Optimizer):
            return {}
        parameters = (parameter for group in self._value.param_groups for parameter in group["params"])
        return {f"state.{number}": parameter for number, parameter in enumerate(parameters) if _is_divided(parameter)}


class _Container:
    """A dict or list of the program, whose content changes."""

    def __init__(self, name, value):
        self._name, self._value = name, value

    def save(self):
        return _encoded("", self._value)

    def load(self, reader):
        saved = _decoded("", reader)
        if not isinstance(saved, dict if isinstance(self._value, dict) else list):
            raise ValueError(f"the checkpoint has a {type(saved).__name__}, and the program a {type(self._value).__name__}")
        self._value.clear()
        (self._value.update if isinstance(saved, dict) else self._value.extend)(saved)


# ---- DTensors: each rank has a part


def _is_divided(tensor):
    return hasattr(tensor, "device_mesh")


def _part(name, tensor):
    """This rank's part of a tensor and its offset in the whole; the offset is None if this rank has nothing of it."""
    tensor = tensor.detach()
    if not _is_divided(tensor):
        return tensor, [0] * tensor.dim()
    if any(placement.is_partial() for placement in tensor.placements):
        raise errors.of_kind(
            "unsupported", f"{name or 'the tensor'} is a DTensor of partial sums: save what its redistribute() or full_tensor() returns"
        )
    local = tensor.to_local()
    if tensor.device_mesh.get_coordinate() is None or (local.numel() == 0 and tensor.numel() > 0):
        return local, None
    shape, offset = _box(tensor)
    if shape != list(local.shape):
        raise errors.of_kind(
            "unsupported",
            f"{name or 'the tensor'} is a DTensor of placements {tensor.placements}, which give this rank more than one range of it: "
            "save it with torch.distributed.checkpoint, or its full_tensor()",
        )
    return local, offset


def _box(tensor):
    """Shape and offset of this rank's part of a DTensor; None, None if it is not one range in each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    for place, placement in enumerate(tensor.placements):
        # fully_shard() of a dimension that tensor-parallel layers divide: it cuts each of their `split_factor` pieces.
        pieces = getattr(placement, "split_factor", 1)
        if pieces > 1:
            later = [at for at in range(place + 1, mesh.ndim) if tensor.placements[at].is_shard(placement.dim)]
            if pieces != math.prod(mesh.size(at) for at in later):
                return None, None
    try:
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    except AssertionError:  # torch's answer to pieces that such a cut does not divide evenly
        return None, None
    return list(shape), list(offset)


def _listed(name, tensor):
    """What save() lists of a tensor: (name, tensor), or (name, part, shape of the whole, offset), or nothing."""
    if not _is_divided(tensor):
        return [(name, tensor)]
    local, offset = _part(name, tensor)
    return [] if offset is None else [(name, local, list(tensor.shape), offset)]


def _read_as(reader, saved, like):
    """The saved tensor; if `like` is a DTensor, as one with the same placements, of which this rank reads its part."""
    if not _is_divided(like):
        return reader.read(saved)
    from torch.distributed.tensor import DTensor

    local, offset = _part(saved, like)
    if offset is not None:
        local = reader.read_part(saved, list(local.shape), offset)
    # torch would exchange the shapes of all parts, and check them, if this did not state the whole's.
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# ---- nested values: their tensors by name, the rest as one JSON text, in which an object {kind: content} is what JSON lacks

_MAPPINGS = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


def _encoded(name, value, parameters=None):
    """`parameters`: those of an optimizer, whose state is divided as they are."""
    tensors = []
    text = json.dumps(_plain(name, value, tensors, parameters or {}))
    return [(name, text), *tensors]


def _parameter_of(path, shape, parameters):
    """The parameter to whose state the tensor at `path` belongs, if they have the same shape."""
    owner, _, entry = path.rpartition(".")
    parameter = parameters.get(owner) if entry != "step" else None
    return parameter if parameter is not None and list(parameter.shape) == list(shape) else None


def _plain(path, value, tensors, parameters):
    """What JSON writes for the value; tensors are appended with their names."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        path = path or "tensor"
        if _is_divided(value):
            parameter = _parameter_of(path, value.shape, parameters)
            if parameter is None or parameter.placements != value.placements:
                raise errors.of_kind(
                    "unsupported",
                    f"{path} is a DTensor that is neither a module's nor the state of a parameter with the same placements: save it "
                    "with torch.distributed.checkpoint, or its full_tensor()",
                )
        tensors.extend(_listed(path, value))
        return {"tensor": path}

    def inside(key, one):
        return _plain(f"{path}.{key}" if path else str(key), one, tensors, parameters)

    if type(value) is list:
        return [inside(place, one) for place, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [inside(place, one) for place, one in enumerate(value)]}
    if isinstance(value, collections.defaultdict):
        value = dict(value)
    if type(value).__name__ in _MAPPINGS and isinstance(value, dict):
        return {type(value).__name__: [[_plain(path, key, tensors, {}), inside(key, one)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise TypeError(
        f"a checkpoint cannot hold {path or 'a value'} of type {type(value).__name__}: it holds tensors, numbers, strings, "
        "bytes, and lists, tuples and dicts of them"
    )


def _decoded(name, reader, parameters=None):
    def tensor(path):
        parameter = _parameter_of(path, reader.shape(path), parameters) if parameters else None
        if parameter is not None:
            return _read_as(reader, path, parameter)
        return reader.read(path).clone()  # a part of a mapped file otherwise, which then stays on the disk

    def value(plain):
        if isinstance(plain, list):
            return [value(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, content),) = plain.items()
        if kind == "tensor":
            return tensor(content)
        if kind == "tuple":
            return tuple(value(one) for one in content)
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "device":
            return torch.device(content)
        return _MAPPINGS[kind]({value(key): value(one) for key, one in content})

    return value(json.loads(reader.value(name)))


def _some(names):
    names = sorted(names)
    return ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
