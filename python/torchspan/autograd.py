"""Distributed autograd of torchspan.rpc, with the names of torch.distributed.autograd.

    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", forward, args=(batch,)).sum()
        autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
"""

import torch

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
    """
    if mode not in ("smart", "fast"):
        raise ValueError(f"torchspan.autograd: mode is {mode!r}; expected 'smart' or 'fast'")
    worker = _calls.current_worker()
    _check(worker, context_id)
    worker.backward(context_id, list(roots), retain_graph, mode == "fast", timeout, stall)


def get_gradients(context_id: int) -> "dict[torch.Tensor, torch.Tensor]":
    """The gradients of this worker's parameters in the context."""
    worker = _calls.current_worker()
    _check(worker, context_id)
    return dict(worker.gradients(context_id))


def _check(worker, context_id) -> None:
    if not worker.has_context(context_id):
        raise errors.of_kind(
            "invalid",
            f"Could not find autograd context with id: {context_id}: this worker took no part in it, or it has ended",
        )
