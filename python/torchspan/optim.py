"""Optimizers whose parameters are on several workers of torchspan.rpc."""

import threading

import torch

from . import _calls, autograd, rpc

__all__ = ["DistributedOptimizer"]


class _OwnerOptimizer:
    """The optimizer of the parameters of one owner."""

    def __init__(self, optimizer_class, parameters, args, kwargs):
        self._optimizer = optimizer_class([rref.local_value() for rref in parameters], *args, **kwargs)
        self._lock = threading.Lock()

    def step(self, context_id):
        gradients = autograd.get_gradients(context_id)
        with self._lock:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = gradients.get(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def state_dict(self):
        with self._lock:
            return self._optimizer.state_dict()

    def load_state_dict(self, state):
        with self._lock:
            self._optimizer.load_state_dict(state)


@_calls.own
def _make(optimizer_class, parameters, args, kwargs):
    return _OwnerOptimizer(optimizer_class, parameters, args, kwargs)


class DistributedOptimizer:
    """Steps the parameters behind `params_rref` on their owners, with one `optimizer_class` of torch.optim on each.

    Further arguments go to that class. step(context) uses the gradients of that context, and returns when all owners have
    stepped; a failure of one is raised after all have answered.
    """

    def __init__(self, optimizer_class, params_rref, *args, **kwargs):
        owners = {}
        for parameter in params_rref:
            owners.setdefault(parameter.owner(), []).append(parameter)
        self._optimizers = {
            owner: rpc.remote(owner, _make, args=(optimizer_class, parameters, args, kwargs))
            for owner, parameters in owners.items()
        }
        for optimizer in self._optimizers.values():
            optimizer._created().wait()

    def step(self, context_id: int) -> None:
        self._on_all("step", context_id)

    def state_dict(self) -> dict:
        """The state of each owner's optimizer, by the owner's name."""
        names = [owner.name for owner in self._optimizers]
        return dict(zip(names, self._on_all("state_dict")))

    def load_state_dict(self, states: dict) -> None:
        if missing := [owner.name for owner in self._optimizers if owner.name not in states]:
            raise ValueError(f"torchspan.optim: the state has nothing for {', '.join(missing)}")
        calls = [
            optimizer.rpc_async().load_state_dict(states[owner.name]) for owner, optimizer in self._optimizers.items()
        ]
        for call in calls:
            call.wait()

    def _on_all(self, method, *args):
        calls = [getattr(optimizer.rpc_async(), method)(*args) for optimizer in self._optimizers.values()]
        torch.futures.collect_all(calls).wait()
        return [call.wait() for call in calls]
