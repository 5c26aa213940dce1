"""Optimizers whose parameters are on several workers of torchspan.rpc."""

import copy
import itertools
import threading

import torch

from . import _C, _calls, autograd, rpc

__all__ = ["DistributedOptimizer"]

# Optimizers of one worker may share parameters, as those of several trainers do: their steps run one at a time.
_STEPPING = threading.Lock()

# Options of torch.optim that are two of TorchSpan's.
_PAIRS = {"betas": ("beta1", "beta2"), "etas": ("eta_minus", "eta_plus"), "step_sizes": ("step_min", "step_max")}


def _by_own_names(options):
    """Options of torch.optim with the names that they have in TorchSpan."""
    own = {name: value for name, value in options.items() if name not in _PAIRS}
    for name, pair in _PAIRS.items():
        if name in options:
            own.update(zip(pair, options[name]))
    return own


def _own_options(kind, options):
    """All options of TorchSpan's optimizer `kind`, with the names that they have in torch.optim."""
    full = _C.optimizer_options(kind, _by_own_names(options))
    for name, (first, second) in _PAIRS.items():
        if first in full:
            full[name] = (full.pop(first), full.pop(second))
    return full


class _TorchSteps:
    """An optimizer of torch.optim. `groups`: options with "params" and "indices", the numbers of the parameters in all groups."""

    def __init__(self, optimizer_class, groups, args, kwargs):
        self._indices = [index for group in groups for index in group["indices"]]
        given = [{name: value for name, value in group.items() if name != "indices"} for group in groups]
        only_parameters = len(given) == 1 and len(given[0]) == 1
        self._optimizer = optimizer_class(given[0]["params"] if only_parameters else given, *args, **kwargs)

    def change(self, options):
        for group, changed in zip(self._optimizer.param_groups, options):
            group.update(changed)

    def step(self, context, factor):
        gradients = autograd.get_gradients(context)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                gradient = gradients.get(parameter)
                parameter.grad = gradient if gradient is None or factor == 1 else gradient * factor
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters(self):
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def state(self):
        return {self._indices[place]: entries for place, entries in self._optimizer.state_dict()["state"].items()}

    def load(self, state, options):
        place_of = {index: place for place, index in enumerate(self._indices)}
        now = self._optimizer.state_dict()["param_groups"]
        groups = [{**saved, "params": group["params"]} for saved, group in zip(options, now)]
        self._optimizer.load_state_dict(
            {"state": {place_of[index]: entries for index, entries in state.items()}, "param_groups": groups}
        )


class _OwnSteps:
    """An optimizer of TorchSpan, whose steps run without the GIL."""

    def __init__(self, kind, groups):
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        made = []
        for group in groups:
            names = [str(index) for index in group["indices"]]
            options = {name: value for name, value in _options(group).items() if name != "indices"}
            made.append((kind, _by_own_names(options), group["params"], names))
        self._optimizer = _C.Optimizer(made)

    def change(self, options):
        self._optimizer.lrs = [changed.get("lr", rate) for changed, rate in zip(options, self._optimizer.lrs)]

    def step(self, context, factor):
        self._optimizer.step(_calls.current_worker(), context, factor)

    def parameters(self):
        return self._parameters

    def state(self):
        found = {}
        for name, value in self._optimizer.state(copied=True):
            parts = name.split(".")  # group.0.parameter.12.exp_avg
            if len(parts) == 5:
                found.setdefault(int(parts[3]), {})[parts[4]] = value.float() if parts[4] == "step" else value
        return {index: entries for index, entries in found.items() if entries.keys() != {"step"} or entries["step"] > 0}

    def load(self, state, options):
        loaded = []
        for name, value in self._optimizer.state(copied=False):
            parts = name.split(".")
            if parts[2] == "kind":
                loaded.append((name, value))
            elif parts[2] == "lr":
                loaded.append((name, torch.tensor(options[int(parts[1])]["lr"], dtype=torch.double)))
            elif parts[4] == "step":
                entries = state.get(int(parts[3]), {"step": 0})
                # An optimizer of torch.optim that needs no number of steps has none.
                loaded.append((name, torch.tensor(int(entries.get("step", 1)))))
                path = name[: -len("step")]
                loaded += [(path + entry, kept) for entry, kept in entries.items() if entry != "step" and kept is not None]
        self._optimizer.load_state(loaded)


class _OwnerOptimizer:
    """The optimizer of the parameters of one owner."""

    def __init__(self, optimizer, groups, args, kwargs):
        groups = [{**group, "params": [rref.local_value() for rref in group["params"]]} for group in groups]
        made = _OwnSteps(optimizer, groups) if isinstance(optimizer, str) else _TorchSteps(optimizer, groups, args, kwargs)
        self._optimizer = made

    def step(self, context, options, factor):
        with _STEPPING:
            if options is not None:
                self._optimizer.change(options)
            self._optimizer.step(context, factor)

    def norm(self, context, norm_type):
        gradients = autograd.get_gradients(context)
        mine = [gradients[one] for one in self._optimizer.parameters() if one in gradients]
        return _C.gradient_norm(mine, norm_type)

    def state(self):
        with _STEPPING:
            return self._optimizer.state()

    def load(self, state, options):
        with _STEPPING:
            self._optimizer.load(state, options)


@_calls.own
def _make(optimizer, groups, args, kwargs):
    return _OwnerOptimizer(optimizer, groups, args, kwargs)


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps the parameters behind `params_rref` on their owners.

    optimizer: the name of one of TorchSpan's ("adam", "adamw", "sgd", "adagrad", …), which steps without the GIL, or a class of
    torch.optim. params_rref: references, or groups of them as in torch: [{"params": references, "lr": 0.1}, …]. Further
    arguments go to the optimizer. Changes of `param_groups`, as by a schedule of torch.optim.lr_scheduler, take effect at
    the next step.
    """

    def __init__(self, optimizer, params_rref, *args, **kwargs):
        given = list(params_rref)
        if not given:
            raise ValueError("torchspan.optim: there are no parameters: give references to them, or groups of references")
        grouped = isinstance(given[0], dict)
        groups = [dict(group, params=list(group["params"])) for group in given] if grouped else [{"params": given}]
        if isinstance(optimizer, str):
            optimizer = optimizer.lower().replace("_", "")
            if args:
                raise TypeError(f"torchspan.optim: give the options of '{optimizer}' by their names, such as lr=0.01")
            groups = [{"params": group["params"], **_own_options(optimizer, {**kwargs, **_options(group)})} for group in groups]
            args, kwargs, probed = (), {}, groups
        else:
            # Where it has no parameters, an optimizer of the class tells its options and their defaults.
            empty = [{**group, "params": [torch.nn.Parameter(torch.empty(0, 0))]} for group in groups]
            probed = optimizer(empty if grouped else empty[0]["params"], *args, **kwargs).param_groups
        self._make_on_owners(optimizer, groups, args, kwargs)
        super().__init__([{**_options(group), "params": [torch.empty(0)]} for group in probed], {})
        for group, mine in zip(self.param_groups, groups):
            group["params"] = mine["params"]
        self._sent = [_snapshot(group) for group in self.param_groups]
        self._scale = (None, 1.0)  # of the gradients of a context

    def _make_on_owners(self, optimizer, groups, args, kwargs):
        self._kind = optimizer
        self._owner_of = []  # of each parameter, in the order of the groups
        shares = {}
        for place, group in enumerate(groups):
            for reference in group["params"]:
                owner = reference.owner()
                if owner not in shares:
                    shares[owner] = [{**one, "params": [], "indices": []} for one in groups]
                shares[owner][place]["params"].append(reference)
                shares[owner][place]["indices"].append(len(self._owner_of))
                self._owner_of.append(owner)
        self._optimizers = {
            owner: rpc.remote(owner, _make, args=(optimizer, share, args, kwargs)) for owner, share in shares.items()
        }
        for made in self._optimizers.values():
            made._created().wait()

    def step(self, context_id: int) -> None:
        """Uses the gradients of that context. Returns when all owners have stepped; a failure is raised after all have answered."""
        now = [_snapshot(group) for group in self.param_groups]
        changes = [
            {name: value for name, value in options.items() if name not in sent or _differ(sent[name], value)}
            for options, sent in zip(now, self._sent)
        ]
        if fixed := self._fixed_change(now):
            raise ValueError(
                f"torchspan.optim: {fixed[1]} of group {fixed[0]} changed, and only lr of '{self._kind}' can: use "
                "the class of torch.optim, or another optimizer"
            )
        context, factor = self._scale
        self._on_all("step", context_id, changes if any(changes) else None, factor if context == context_id else 1.0)
        self._sent, self._scale = now, (None, 1.0)

    def _fixed_change(self, groups):
        """(group, option) of the first of these options that differs from the owners', whose optimizers cannot change it."""
        if isinstance(self._kind, str):
            for place, (options, sent) in enumerate(zip(groups, self._sent)):
                for name, value in options.items():
                    if name != "lr" and name in sent and _differ(sent[name], value):
                        return place, name
        return None

    def set_lr(self, lr: float) -> None:
        """Sets the rate of all groups, from the next step on."""
        for group in self.param_groups:
            group["lr"] = lr

    def clip_grad_norm(self, context_id: int, max_norm: float, norm_type: float = 2.0) -> float:
        """Returns the norm of the gradients of all parameters in the context, over all owners, as one vector.

        If it is above `max_norm`, the next step() with this context scales them by max_norm / (norm + 1e-6); those in the
        context do not change.
        """
        if not max_norm > 0:
            raise ValueError(f"torchspan.optim: max_norm is {max_norm}; expected a number above 0")
        norms = torch.tensor(self._on_all("norm", context_id, norm_type), dtype=torch.double)
        norm = torch.linalg.vector_norm(norms, norm_type).item()
        self._scale = (context_id, min(max_norm / (norm + 1e-6), 1.0) if norm == norm else norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: each context has its gradients."""

    def add_param_group(self, param_group) -> None:
        if hasattr(self, "_sent"):
            raise NotImplementedError("torchspan.optim: a DistributedOptimizer gets all its groups when it is made")
        super().add_param_group(param_group)

    def state_dict(self) -> dict:
        """What an optimizer of one process with the same groups has: the state by the number of the parameter, and the groups.

        It loads after parameters have moved to other workers, and into torch.optim's optimizer of the same kind.
        """
        state = {index: entries for share in self._on_all("state") for index, entries in share.items()}
        numbers = itertools.count()
        groups = [
            {**_options(group), "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict) -> None:
        groups, state = state_dict["param_groups"], state_dict["state"]
        counts = [len(group["params"]) for group in groups]
        mine = [len(group["params"]) for group in self.param_groups]
        if counts != mine:
            raise ValueError(f"torchspan.optim: the state has groups of {counts} parameters; expected groups of {mine}")
        options = [_options(group) for group in groups]
        if fixed := self._fixed_change(options):
            place, name = fixed
            value = options[place][name]
            raise ValueError(
                f"torchspan.optim: the state has {name} {value} for group {place}, and '{self._kind}' was made with "
                f"{self._sent[place][name]}, which cannot change: make it with {value}, or use the class of torch.optim"
            )
        calls = []
        for owner, made in self._optimizers.items():
            share = {index: entries for index, entries in state.items() if self._owner_of[index] == owner}
            calls.append(made.rpc_async().load(share, options))
        _calls.all_of(calls)
        for group, saved in zip(self.param_groups, options):
            group.update(saved)
        self._sent = [_snapshot(group) for group in self.param_groups]

    def _on_all(self, method, *args):
        return _calls.all_of([getattr(made.rpc_async(), method)(*args) for made in self._optimizers.values()])


def _options(group):
    return {name: value for name, value in group.items() if name != "params"}


def _snapshot(group):
    """Schedules change a learning rate that is a tensor in place."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for name, value in _options(group).items()
    }


def _differ(one, other):
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is not type(other) or not torch.equal(one, other)
    return one != other
