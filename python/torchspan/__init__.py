"""TorchSpan for PyTorch programs: the backend "torchspan" of torch.distributed, and BackendType.TORCHSPAN of its RPC.

    import torch.distributed as dist
    dist.init_process_group("torchspan")

    import torchspan
    from torch.distributed import rpc
    rpc.init_rpc("worker0", rank=0, world_size=2, backend=rpc.BackendType.TORCHSPAN)

Importing this package registers both; for process groups, torch 2.14 and later do it themselves.
"""

import sysconfig

import torch

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError("torchspan needs the global interpreter lock: use a Python that is not free-threaded")

_ADVICE = "Build it for this environment, in a clone of TorchSpan: pip install --no-build-isolation --force-reinstall --no-deps ."

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"torchspan has no module for torch {torch.__version__} and this Python ({error}). {_ADVICE}"
    ) from error

if _C.torch_version.split(".")[:2] != torch.__version__.split("+")[0].split(".")[:2]:
    raise ImportError(
        f"torchspan {_C.version} was built for torch {_C.torch_version}, and this is torch {torch.__version__}. {_ADVICE}"
    )

from . import autograd, errors, optim, pipeline, rpc, torch_rpc, trace  # noqa: E402
from .checkpoint import CheckpointManager  # noqa: E402
from .distributed import register, use_for_gloo  # noqa: E402

__version__ = _C.version
__all__ = ["CheckpointManager", "autograd", "errors", "optim", "pipeline", "register", "rpc", "trace", "use_for_gloo"]

register()
torch_rpc.register()
