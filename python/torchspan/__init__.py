"""TorchSpan for PyTorch programs: the backend "torchspan" of torch.distributed, and BackendType.TORCHSPAN of its RPC.

    import torch.distributed as dist
    dist.init_process_group("torchspan")

    import torchspan
    from torch.distributed import rpc
    rpc.init_rpc("worker0", rank=0, world_size=2, backend=rpc.BackendType.TORCHSPAN)

Importing this package registers both; for process groups, torch 2.14 and later do it themselves.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys
import sysconfig

import torch

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError("torchspan needs the global interpreter lock: use a Python that is not free-threaded")

_ADVICE = "Build it for this environment, in a clone of TorchSpan: pip install --no-build-isolation --force-reinstall --no-deps ."


def _load_module():
    """The module of this release of torch: each has a folder, as `torch_2_15`, with one for each Python."""
    package = pathlib.Path(__file__).parent
    release = ".".join(torch.__version__.split(".")[:2])
    folder = package / f"torch_{release.replace('.', '_')}"
    spec = importlib.machinery.PathFinder.find_spec(f"{__name__}._C", [str(folder)])
    if spec is None or spec.loader is None:
        built = [f"torch {path.parent.name[6:].replace('_', '.')} ({path.suffixes[0][1:]})" for path in sorted(package.glob("torch_*/_C.*.so"))]
        raise ImportError(
            f"torchspan was built for {', '.join(built) or 'no release of torch'}, and this is torch {torch.__version__} "
            f"({sys.implementation.cache_tag}). {_ADVICE}"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"the module of torchspan for torch {release} cannot be loaded ({error}). {_ADVICE}") from error
    return module


_C = _load_module()

from . import autograd, errors, optim, pipeline, rpc, torch_rpc, trace  # noqa: E402
from .checkpoint import CheckpointManager  # noqa: E402
from .distributed import register, use_for_gloo  # noqa: E402

__version__ = _C.version
__all__ = ["CheckpointManager", "autograd", "errors", "optim", "pipeline", "register", "rpc", "trace", "use_for_gloo"]

register()
torch_rpc.register()
