"""What a Python program adds to the trace of its run, which TORCHSPAN_TRACE=FOLDER or `torchspan run --trace` requests.

    with trace.span("step", number):  # reports measure spans of this name
        loss = train_step()
    trace.log_scalar("loss", loss.item(), number)

They belong to the worker of torchspan.rpc, else to that of torch.distributed.rpc's backend TORCHSPAN, else to the default group
of the backend "torchspan". A process that has none of them records nothing. The trace has the calls of both kinds of workers.
"""

import contextlib

from . import _calls, distributed, torch_rpc

__all__ = ["log_scalar", "span"]


def _runtime():
    if _calls.has_worker():
        return _calls.current_worker().runtime
    agent = torch_rpc._current_agent()
    if agent is not None:
        return agent.runtime
    world = distributed._world_of_default_group()
    return None if world is None else world.runtime


@contextlib.contextmanager
def span(name: str, number: int = 0):
    """Shows the block as a span `name`, with a number. Costs some microseconds."""
    runtime = _runtime()
    opened = runtime.span(name, number) if runtime is not None else None
    try:
        yield
    finally:
        if opened is not None:
            opened.close()


def log_scalar(name: str, value: float, step: "int | None" = None) -> None:
    """Adds a point to the curve `name` of the report and of TensorBoard. Without `step`, the values of a name are numbered."""
    runtime = _runtime()
    if runtime is not None:
        runtime.log_scalar(name, value, step)
