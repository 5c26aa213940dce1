"""Distributed autograd of torchspan.rpc, with the names of torch.distributed.autograd.

    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", forward, args=(batch,)).sum()
        autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
"""

import gc
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from . import _C, _calls, errors

__all__ = ["backward", "context", "get_gradients"]


class context:
    """Records the tensors that calls of this thread send, so that backward() can follow them back. Its value is the id."""

    def __enter__(self) -> int:
        worker = _calls.current_worker()
        try:
            self._context = _C.Context(worker)
        except errors.Error as error:
            raise errors.of_kind(error.kind, f"Already have an autograd context id for this thread: {error}") from None
        return self._context.id

    def __exit__(self, *_) -> None:
        self._context.close()


def backward(
    context_id: int,
    roots: "list[torch.Tensor]",
    retain_graph: bool = False,
    *,
    mode: str = "smart",
    timeout: float = 600.0,
    stall: float = 2.0,
) -> None:
    """Differentiates the roots, scalars, through all workers; gradients accumulate in the context on each of them.

    mode "smart" finds out which of the tensors that were sent take part; "fast" takes all of them for parts of the roots, and
    fails after `stall` seconds without progress with the names of those that are not. timeout: of the pass, in seconds.
    After the pass, DistributedDataParallel modules of this worker that took part average their gradients in the context.
    """
    if mode not in ("smart", "fast"):
        raise ValueError(f"torchspan.autograd: mode is {mode!r}; expected 'smart' or 'fast'")
    worker = _calls.current_worker()
    _check(worker, context_id)
    if hooked := worker.backward(context_id, list(roots), retain_graph, mode == "fast", timeout, stall):
        _run_hooks(worker, context_id, hooked)


def _run_hooks(worker, context_id, hooked) -> None:
    """Hooks such as those of DistributedDataParallel run in torch's engine and change `.grad`, which is as before afterwards."""
    used = [parameter for parameter, _ in hooked]
    # With find_unused_parameters, the others of a module get the averages of the workers that used them.
    others = _others_of_modules(used)
    parameters = used + others
    kept = [_own(parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        if others:  # of earlier passes; the hooks average what the context has
            before = dict(worker.gradients(context_id))
            for parameter in others:
                parameter.grad = before[parameter].clone() if parameter in before else None
        torch.autograd.backward(used, [gradient for _, gradient in hooked])
        for parameter in parameters:
            if parameter.grad is not None:
                worker.replace_gradient(context_id, parameter, _own(parameter.grad))
    finally:
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient


# The DistributedDataParallel module of each parameter that had a hook, or None, as weak references.
_modules = WeakIdKeyDictionary()


def _others_of_modules(used) -> "list[torch.nn.Parameter]":
    """The parameters beside `used` of the DistributedDataParallel modules that have some of these."""
    if any(parameter not in _modules or _has_ended(_modules[parameter]) for parameter in used):
        for parameter in used:
            _modules[parameter] = _no_module
        for module in gc.get_objects():
            if issubclass(type(module), DistributedDataParallel):
                for parameter in module.parameters():
                    _modules[parameter] = weakref.ref(module)
    modules = {id(module): module for module in (_modules[parameter]() for parameter in used) if module is not None}
    taken = {id(parameter) for parameter in used}
    return [
        parameter
        for module in modules.values()
        if module.find_unused_parameters
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in taken
    ]


def _no_module():
    return None


def _has_ended(module) -> bool:
    """Another module may have the parameter now."""
    return module is not _no_module and module() is None


def get_gradients(context_id: int) -> "dict[torch.Tensor, torch.Tensor]":
    """The gradients of this worker's parameters in the context."""
    worker = _calls.current_worker()
    _check(worker, context_id)
    return dict(worker.gradients(context_id))


def _own(gradient):
    """`gradient`, or a copy if it is part of a bucket, which the next reduction overwrites."""
    return gradient.clone() if gradient is not None and gradient._is_view() else gradient


def _check(worker, context_id) -> None:
    if not worker.has_context(context_id):
        raise errors.of_kind(
            "invalid",
            f"Could not find autograd context with id: {context_id}: this worker took no part in it, or it has ended",
        )
