"""Pipelines: the layers of a torch.nn model on several workers of torchspan.rpc, and micro-batches that flow through them.

    layers = pipeline.Layers()                               # the same on every worker
    for _ in range(4):
        layers.add(torch.nn.Linear, 96, 96)                  # built on its owner only
    with pipeline.Pipeline(layers, micro_batches=8) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())     # of this worker's layers
        optimizer.zero_grad()
        loss = pipe.train_step(x, y, torch.nn.functional.mse_loss)
        optimizer.step()
"""

import functools
import operator
from typing import NamedTuple

import torch

from . import _C, _calls

__all__ = [
    "Cache",
    "DeferredBatchNorm",
    "LayerCache",
    "Layers",
    "Pipeline",
    "Skips",
    "StepReport",
    "Unsplit",
    "Use",
    "WorkerReport",
    "balance_by_size",
    "balance_by_time",
    "convert_deferred_batch_norm",
    "seed_of_layer",
    "seed_of_use",
]

# stash(name, tensor) and pop(name): what a layer sends to a later one, past those between them. While its forward runs.
Skips = _C.Skips
# `active`, and `tensors`, a list to replace: what a layer keeps between calls of infer(x, cache). While its forward runs.
LayerCache = _C.LayerCache
# What all layers of this worker keep between calls of infer(x, cache): for text that is generated token by token.
Cache = _C.PipelineCache

seed_of_layer = _C.seed_of_layer
seed_of_use = _C.seed_of_use

# In the order of torchspan::pipeline::Schedule and ActivationCheckpoint.
_SCHEDULES = ("arrival", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb1p", "zbv", "dualpipev")
_CHECKPOINTS = ("never", "except_last", "always")


class Unsplit:
    """A tensor without rows in an input, a target or a layer's result: every micro-batch gets all of it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class DeferredBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalization for micro-batches: arguments and state are those of torch.nn.BatchNorm1d to 3d.

    Normalizes each micro-batch with its own statistics, but updates the running ones once per step, with those of the whole
    batch, all replicas included. Outside of a pipeline every forward is a step.
    """

    def _check_input_dim(self, input):
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"DeferredBatchNorm takes inputs of 2 to 5 dimensions, channels second, not of {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        return self._statistics().forward(input, self.training, self._own())

    def _own(self):
        return [self.weight, self.bias, self.running_mean, self.running_var, self.num_batches_tracked]

    def _statistics(self):
        """The C++ side, which gathers while a step runs. Copies of this module have one of their own."""
        if "_gathering" not in self.__dict__:
            self.__dict__["_gathering"] = _C.DeferredBatchNorm(self.num_features, self.eps, self.momentum, self._own())
        return self.__dict__["_gathering"]

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_gathering"}


def convert_deferred_batch_norm(module: torch.nn.Module) -> torch.nn.Module:
    """Replaces each BatchNorm1d to 3d in `module` by a DeferredBatchNorm with the same parameters and buffers; returns it.

    For layers of a pipeline, before they are added. As torch.nn.SyncBatchNorm.convert_sync_batchnorm().
    """
    plain = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    converted = {}  # a module may have several parents or names

    def convert(one):
        if isinstance(one, plain):
            norm = DeferredBatchNorm(one.num_features, one.eps, one.momentum, one.affine, one.track_running_stats)
            norm._parameters.update(one._parameters)
            norm._buffers.update(one._buffers)
            return norm.train(one.training)
        for name, child in one._modules.items():
            if child is not None:
                one._modules[name] = once(child)
        return one

    def once(one):
        if id(one) not in converted:
            converted[id(one)] = one, convert(one)  # with what the number stands for
        return converted[id(one)][1]

    return once(module)


class Use:
    """A use of a layer, for Layers.reuse() and tie(). `layer`: the layer's number, in the order of add()."""

    def __init__(self, layers: "Layers", layer: int, method_name: "str | None"):
        self.layers, self.layer = layers, layer
        self._method = method_name
        self._stashes, self._pops, self._space, self._cached = [], [], "", False

    def stashes(self, *names: str) -> "Use":
        """Its forward gets `skips`, and stashes tensors under these names for later layers: skips.stash("name", tensor)."""
        self._stashes += names
        return self

    def pops(self, *names: str) -> "Use":
        """Its forward gets `skips`, and pops what earlier layers stashed: skips.pop("name"), each once."""
        self._pops += names
        return self

    def in_space(self, space: str) -> "Use":
        """Keeps the names of this use apart from those of other spaces: for a layer that is used more than once."""
        self._space = space
        return self

    def keeps_cache(self) -> "Use":
        """Its forward gets `cache`, a LayerCache, which is active in infer(x, cache)."""
        self._cached = True
        return self

    def _described(self):
        return self.layer, self._method, self._stashes, self._pops, self._space, self._cached


class WorkerReport(NamedTuple):
    """What a worker ran in a step. `actions`: (name, start, end), such as ("2F5", 0.001, 0.002): the forward of layer range 2
    for micro-batch 5. Seconds from the step's start."""

    actions: "list[tuple[str, float, float]]"
    idle: float
    peak_micro_batches: float


class StepReport(NamedTuple):
    """The last successful step. `workers`: by name."""

    step: int
    micro_batches: int
    seconds: float
    workers: "dict[str, WorkerReport]"


class _Layer:
    """A layer on its owner, for the C++ side."""

    def __init__(self, name, built):
        if not isinstance(built, torch.nn.Module):
            raise TypeError(
                f"torchspan.pipeline: what builds layer '{name}' returned a {type(built).__qualname__}: return a "
                "torch.nn.Module; for a function, use Layers.add_function()"
            )
        self.name, self.module = name, built
        self.statistics = [part._statistics() for part in built.modules() if isinstance(part, DeferredBatchNorm)]
        self._parameters = list(built.named_parameters())
        self._replaced = None

    def begin_step(self):
        """The pipeline knows the parameters that the module had when it was built."""
        now = dict(self.module.named_parameters())
        self._replaced = next((name for name, parameter in self._parameters if now.get(name) is not parameter), None)

    def run(self, method, repeated, *args, **given):
        if self._replaced is not None:
            raise ValueError(
                f"torchspan.pipeline: parameter '{self._replaced}' of layer '{self.name}' was replaced after the pipeline was "
                "created: change its value in place, or make another pipeline"
            )
        call = self.module if method is None else getattr(self.module, method)
        return self._run_again(call, args, given) if repeated else call(*args, **given)

    def _run_again(self, call, args, given):
        """Restores the buffers: a recomputed forward must not count twice."""
        kept = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in self.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        try:
            return call(*args, **given)
        finally:
            for buffers, name, buffer, value in kept:
                buffers[name] = buffer
                buffer.data.copy_(value)  # not a change to the graph, which may have saved it


class _Function:
    module = None

    def __init__(self, function):
        self._function = function

    def run(self, method, repeated, *args, **given):
        return self._function(*args, **given)


class Layers:
    """The layers of a model in the order in which a micro-batch passes them; the same on all workers.

    A layer gets what the one before it returned, the members of a tuple as arguments. It returns a tensor, or a tuple of
    tensors, numbers, bools and None.
    """

    def __init__(self):
        self._specs, self._uses, self._ties = [], [], []

    def add(self, factory, *args, name: "str | None" = None, **kwargs) -> Use:
        """Adds the module that factory(*args, **kwargs) returns; only its owner calls that. Or an existing module.

        name: in errors and plans; default: that of the class or function.
        """
        if not callable(factory):
            raise TypeError(
                f"torchspan.pipeline: Layers.add() got a {type(factory).__qualname__}: give a class or function that "
                "builds a torch.nn.Module, and its arguments"
            )
        if isinstance(factory, torch.nn.Module):
            if args or kwargs:
                raise TypeError("torchspan.pipeline: Layers.add() got an existing module, which takes no arguments")
            name, existing, build = name or type(factory).__name__, _tensors_in([factory]), lambda: factory
        else:
            name = name or getattr(factory, "__name__", type(factory).__name__)
            existing = _tensors_in([*args, *kwargs.values()])
            build = functools.partial(factory, *args, **kwargs)
        return self._append(name, lambda: _Layer(name, build()), existing)

    def add_function(self, name: str, function) -> Use:
        """Adds a function without parameters to train."""
        if isinstance(function, torch.nn.Module):
            raise TypeError(f"torchspan.pipeline: '{name}' is a module, not a function: use Layers.add()")
        return self._append(name, lambda: _Function(function), [])

    def reuse(self, use: Use, method_name: "str | None" = None) -> Use:
        """Uses a layer again, through its forward or another method. It stays with its owner."""
        return self._used(self._layer(use), method_name)

    def tie(self, *parameters: "tuple[Use, str]") -> None:
        """Ties parameters of layers on any stages: tie((embedding, "weight"), (projection, "weight")).

        Each layer keeps its copy; all begin with the values of the first, and get the sum of all their gradients.
        """
        self._ties.append([(self._layer(use), name) for use, name in parameters])

    def _append(self, name, build, existing):
        self._specs.append((name, build, existing))
        return self._used(len(self._specs) - 1, None)

    def _used(self, layer, method_name):
        self._uses.append(Use(self, layer, method_name))
        return self._uses[-1]

    def _described(self):
        return self._specs, [use._described() for use in self._uses], self._ties

    def _layer(self, use):
        if not isinstance(use, Use) or use.layers is not self:
            raise ValueError("torchspan.pipeline: expected what add(), add_function() or reuse() of the same Layers returned")
        return use.layer


class Pipeline:
    """Splits each batch into micro-batches and runs them through the layers' owners, which all make the same calls.

    Results and gradients are those of the plain model on each micro-batch. A failure ends the step on all workers: where a
    layer or the loss raised, with that exception; elsewhere with one of torchspan.errors that names the layer, the worker
    and the text. Used by one thread at a time.

    balance: distinct layers of each stage; default: even.
    workers: the owner of each stage, by name; default: stage s is on rank s modulo the world size.
    schedule: "1f1b", "gpipe", "arrival", "interleaved", "zb_h1", "zb_h2", "zb1p", "zbv" or "dualpipev".
    schedule_csv: instead, a table of training steps as torch.distributed.pipelining writes and loads it; or "torchspan schedule".
    checkpoint: which micro-batches recompute their activations: "except_last", "never" or "always".
    checkpoint_layers: the only layers that do; Use objects or numbers.
    replicas: copies of the pipeline for data parallelism.
    seed: makes initial weights and dropout depend on nothing else; see seed_of_layer() and seed_of_use().
    timeout: seconds that one action, or the wait for another worker to begin a step, may take.
    staleness: 1 overlaps steps: train_step() ends the batch of the call before it.
    offload: keeps the inputs of checkpointed layers on the host between forward and backward; for layers on devices.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        balance=(),
        workers=(),
        micro_batches: int = 1,
        schedule: str = "1f1b",
        schedule_csv: "str | None" = None,
        checkpoint: str = "except_last",
        checkpoint_layers=(),
        replicas: int = 1,
        seed: "int | None" = None,
        timeout: float = 600.0,
        max_in_flight: int = 0,
        staleness: int = 0,
        offload: bool = False,
        name: str = "pipeline",
    ):
        if schedule_csv is not None and schedule != "1f1b":
            raise ValueError("torchspan.pipeline: give a schedule or a schedule_csv, not both")
        options = {
            "balance": [operator.index(count) for count in balance or ()],
            "workers": [str(getattr(worker, "name", worker)) for worker in workers or ()],
            "micro_batches": operator.index(micro_batches),
            "schedule": _index("schedule", schedule, _SCHEDULES),
            "schedule_csv": schedule_csv,
            "checkpoint": _index("checkpoint", checkpoint, _CHECKPOINTS),
            "checkpoint_layers": [use.layer if isinstance(use, Use) else operator.index(use) for use in checkpoint_layers],
            "replicas": operator.index(replicas),
            "seed": None if seed is None else operator.index(seed) % 2**64,
            "timeout": float(timeout),
            "max_in_flight": operator.index(max_in_flight),
            "staleness": operator.index(staleness),
            "offload": bool(offload),
            "name": name,
        }
        self._pipeline = _C.Pipeline(_calls.current_worker(), *layers._described(), options)
        self._layers = self._pipeline.layers()

    def train_step(self, x, y, loss_fn, gradient_scale: float = 1.0, no_sync: bool = False) -> float:
        """Runs forward, loss and backward of one batch, and returns the loss, the mean over the rows, on every worker.

        Only the first layer's owner reads `x`, only the last layer's owner `y`; elsewhere they may be None. loss_fn(output,
        target) returns the mean over a micro-batch's rows. Gradients are added to `.grad`. gradient_scale: 1/k averages k
        steps. no_sync: with replicas, leaves the exchange of gradients to the next step without it. Under torch.no_grad(),
        only computes the loss.
        """
        self._begin_step()
        return self._pipeline.train_step(x, y, loss_fn, gradient_scale, no_sync)

    def finish(self) -> float:
        """With staleness 1: ends the last batch, and returns its loss."""
        return self._pipeline.finish()

    def infer(self, x, cache: "Cache | None" = None):
        """Runs the forward without gradients; returns the output on the last layer's owner, None elsewhere.

        cache: for the next piece of a sequence; layers keep their state in it (Use.keeps_cache()). One on each worker, given
        to the same calls, on all replicas. If a call fails, it is as before.
        """
        return self._pipeline.infer(x, cache)

    def forward(self, x):
        """Runs the forward for backward(); returns the output on the last layer's owner, None elsewhere."""
        self._begin_step()
        return self._pipeline.forward(x)

    def backward(self, gradients=None) -> None:
        """Runs the backward of the last forward(), on all workers.

        gradients: of its output, on the last layer's owner; default: what the caller's own backward left in its `.grad`.
        """
        if gradients is None:
            gradients = []
        self._pipeline.backward([gradients] if isinstance(gradients, torch.Tensor) else list(gradients))

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales the gradients of all workers to a total norm of at most `max_norm`; returns the norm before that."""
        return self._pipeline.clip_grad_norm(max_norm, norm_type)

    def train(self, mode: bool = True) -> "Pipeline":
        """Sets the mode of this worker's modules."""
        self._pipeline.train(mode)
        return self

    def eval(self) -> "Pipeline":
        return self.train(False)

    @property
    def modules(self) -> "dict[int, torch.nn.Module]":
        """The modules of this worker's layers, by number. Their parameters must not be replaced by others."""
        return {number: layer.module for number, layer in self._layers.items()}

    def parameters(self) -> "list[torch.nn.Parameter]":
        """Those of this worker's layers, each once."""
        return self._pipeline.parameters()

    def named_parameters(self) -> "list[tuple[str, torch.nn.Parameter]]":
        """Those of parameters(), with names that do not depend on who owns the layer: "layers.2.weight"."""
        return list(zip(self._pipeline.parameter_names(), self._pipeline.parameters()))

    def state_dict(self) -> dict:
        """The state of this worker's modules, as "layers.2.weight", and the number of training steps.

        Those of all workers together fit any number of workers.
        """
        state = {
            f"layers.{number}.{name}": value
            for number, module in self.modules.items()
            for name, value in module.state_dict().items()
        }
        state["training_steps"] = self._pipeline.training_steps
        return state

    def load_state_dict(self, state: dict) -> None:
        """Restores this worker's modules; ignores the layers of others."""
        for number, module in self.modules.items():
            prefix = f"layers.{number}."
            module.load_state_dict({name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)})
        self._pipeline.training_steps = state.get("training_steps", self._pipeline.training_steps)

    @property
    def plan(self) -> str:
        """One line for each layer range: stage, worker, layers, links."""
        return self._pipeline.plan()

    def plan_svg(self) -> str:
        """The plan as a drawing."""
        return self._pipeline.plan_svg()

    @property
    def replica(self) -> int:
        """The replica of this worker."""
        return self._pipeline.replica()

    @property
    def training_steps(self) -> int:
        """How many training steps have succeeded; seed_of_use() depends on it."""
        return self._pipeline.training_steps

    def last_step(self) -> StepReport:
        """What each worker of this replica ran in the last successful step."""
        step, micro_batches, seconds, workers = self._pipeline.last_step()
        return StepReport(step, micro_batches, seconds, {name: WorkerReport(*one) for name, one in workers.items()})

    def schedule_csv(self) -> str:
        """The table of the last step, as torch.distributed.pipelining reads it: a row for each worker."""
        return self._pipeline.schedule_csv()

    def close(self) -> None:
        """Frees the layers, and lets the other workers know if a step has not ended. Before rpc.shutdown()."""
        self._layers = {}
        self._pipeline.close()

    def _begin_step(self):
        for layer in self._layers.values():
            layer.begin_step()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def balance_by_time(layers: Layers, stages: int, sample, *, repeats: int = 3, workers=()) -> "list[int]":
    """A balance for Pipeline by the measured time of each layer's forward and backward.

    Called by `workers`, by default all: the first one builds all layers, runs `sample`, one micro-batch, through them
    `repeats` times, and all get its result. Elsewhere `sample` may be None.
    """
    return _balance(layers, stages, sample, 0.0, repeats, workers)


def balance_by_size(
    layers: Layers, stages: int, sample, *, parameter_scale: float = 2.0, repeats: int = 3, workers=()
) -> "list[int]":
    """The same by memory: activations, and parameters times `parameter_scale`, which stands for gradients and optimizers."""
    if parameter_scale <= 0:
        raise ValueError(f"torchspan.pipeline: parameter_scale is {parameter_scale}; it must be above 0")
    return _balance(layers, stages, sample, float(parameter_scale), repeats, workers)


def _balance(layers, stages, sample, parameter_scale, repeats, workers):
    names = [str(getattr(worker, "name", worker)) for worker in workers or ()]
    return _C.balance(
        _calls.current_worker(),
        *layers._described(),
        operator.index(stages),
        sample,
        parameter_scale,
        operator.index(repeats),
        names,
    )


def _index(option, value, values) -> int:
    if value not in values:
        raise ValueError(f"torchspan.pipeline: {option} is {value!r}; expected {', '.join(map(repr, values))}")
    return values.index(value)


def _tensors_in(arguments) -> "list[torch.Tensor]":
    """What layers on different workers may not share: the parameters and buffers of modules, and tensors."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, torch.nn.Module):
            found += [*argument.parameters(), *argument.buffers()]
    return found
