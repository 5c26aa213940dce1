"""What operations of process groups raise, by what the program can do about it.

    try:
        dist.all_reduce(tensor)
    except torchspan.errors.DisconnectedError as error:
        ...  # the text names the rank and its process

All are torch.distributed.DistBackendError. Texts begin with "torchspan: ".
"""

import torch.distributed as dist


class Error(dist.DistBackendError):
    """A failure of a process group over TorchSpan."""


class InvalidError(Error):
    """Ranks made different calls, or the world cannot form as they are configured: mend what the text names."""


class RemoteFailureError(Error):
    """Code of another rank raised an exception, which the text contains."""


class DisconnectedError(Error):
    """Another rank died or left: restart it, or go on without it."""


class TimedOutError(Error):
    """A time limit passed: the text names the ranks that are late."""


class CancelledError(Error):
    """The group was aborted or destroyed."""


class OverloadedError(Error):
    """A bounded queue is full: the text names its limit."""


class DeniedError(Error):
    """Another rank has not proved the job's secret, or a file's permissions are wrong."""


class UnsupportedError(Error):
    """This backend cannot do it: the text names what can."""
