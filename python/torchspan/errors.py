"""What operations of process groups and calls of torchspan.rpc raise, by what the program can do about it.

    try:
        dist.all_reduce(tensor)
    except torchspan.errors.DisconnectedError as error:
        ...  # the text names the rank and its process

All are torch.distributed.DistBackendError. Texts begin with "torchspan: ".
"""

import torch.distributed as dist


class Error(dist.DistBackendError):
    """A failure of a process group, or of a call, over TorchSpan. `kind` is its kind in C++."""

    kind = "unknown"


class InvalidError(Error):
    """Ranks made different calls, or the world cannot form as they are configured: mend what the text names."""

    kind = "invalid"


class RemoteFailureError(Error):
    """Code of another rank raised an exception, which the text contains."""

    kind = "remote failure"


class DisconnectedError(Error):
    """Another rank died or left: restart it, or go on without it."""

    kind = "disconnected"


class TimedOutError(Error):
    """A time limit passed: the text names the ranks that are late."""

    kind = "timed out"


class CancelledError(Error):
    """The group was aborted or destroyed."""

    kind = "cancelled"


class OverloadedError(Error):
    """A bounded queue is full: the text names its limit."""

    kind = "overloaded"


class DeniedError(Error):
    """Another rank has not proved the job's secret, or a file's permissions are wrong."""

    kind = "denied"


class UnsupportedError(Error):
    """This backend cannot do it: the text names what can."""

    kind = "unsupported"


def class_of(kind: str) -> "type[Error]":
    """The class of a kind."""
    return next((one for one in Error.__subclasses__() if one.kind == kind), Error)


def of_kind(kind: str, text: str) -> Error:
    """The error of a kind, with a text that does not begin with "torchspan: " yet."""
    return class_of(kind)(f"torchspan: {text}")
