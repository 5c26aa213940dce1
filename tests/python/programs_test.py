"""Random programs over three workers of torchspan.rpc, against the same programs in one process.

TORCHSPAN_PYTHON_SEEDS=FIRST+COUNT, or COUNT, chooses other seeds; a failure names the one that repeats it.
"""

import contextlib
import os
import random
import threading
import unittest
from dataclasses import dataclass

import torch

from calls_test import Layer, raised_by
from processes import Native, run
from torchspan import autograd, rpc

FIRST, _, COUNT = os.environ.get("TORCHSPAN_PYTHON_SEEDS", "200").rpartition("+")
SEEDS = range(int(FIRST or 0), int(FIRST or 0) + int(COUNT))
WORKERS = [f"worker{rank}" for rank in range(3)]
THREADS = (1, 4, 16)  # that serve calls; by group of seeds
GROUP = 20


class Planned(Exception):
    """What a program raises on purpose."""


class Box:
    """Of a class of the program: pickled, its tensors apart."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def sum(self):
        return Box(self.first + self.second, None)


# ---- what runs on the other workers


def chain(path, value, fail=-1):
    """The layers of the path, each on its owner, by nested calls; raises before the layer number `fail`."""
    if fail == 0:
        raise Planned(len(path))
    if not path:
        return value
    first, rest = path[0], path[1:]
    value = first.local_value()(value) if first.is_owner() else first.rpc_sync().forward(value)
    if not rest:
        return chain(rest, value, fail - 1)
    return rpc.rpc_sync(rest[0].owner_name(), chain, args=(rest, value, fail - 1))


async def coroutine(path, value, fail=-1):
    for place, layer in enumerate(path):
        if place == fail:
            raise Planned(len(path) - place)
        value = await layer.rpc_async().forward(value)
    if fail == len(path):
        raise Planned(0)
    return value


@rpc.functions.async_execution
def chained_future(path, value, fail=-1):
    if fail == 0:
        raise Planned(len(path))
    return rpc.rpc_async(path[0].owner_name(), chain, args=(path, value, fail))


def fetch_and_add(reference, other):
    return reference.to_here() + other


def in_containers(values, *, more):
    return {"sums": [values["pair"][0] + values["pair"][1], more], "text": "unused"}


def box_sum(box):
    return box.sum()


# ---- programs: what is computed from what, for both sides


@dataclass
class Step:
    how: str
    source: int
    other: int
    path: "list[int]"
    worker: str
    detached: bool  # called under no_grad(), which sends arguments detached; the callee records what it computes
    fail: int


@dataclass
class Program:
    """Each step makes one value from earlier ones; the losses are weighted sums of them, differentiated one after another."""

    driver: str
    mode: str
    steps: "list[Step]"
    losses: "list[dict[int, float]]"

    @staticmethod
    def random(choose, layer_count):
        mode = choose.choice(["smart", "smart", "fast"])
        paths = ["forward", "forward_async", "chain", "coroutine", "future", "reference", "reference_as_argument"]
        steps = []
        for number in range(choose.randint(1, 6)):
            how = choose.choice([*paths, "containers", "box", "operator"])
            steps.append(
                Step(
                    how=how,
                    source=choose.randrange(number + 1),
                    other=choose.randrange(number + 1),
                    path=[choose.randrange(layer_count) for _ in range(choose.randint(1, 3))],
                    worker=choose.choice(WORKERS),
                    detached=how not in ("forward_async", "containers") and choose.random() < 0.1,
                    fail=choose.randint(0, 3) if mode == "smart" and choose.random() < 0.15 else -1,
                )
            )
        everything = range(len(steps) + 1)
        losses = []
        for _ in range(choose.randint(1, 2) if mode == "smart" else 1):
            used = [one for one in everything if mode == "fast" or choose.random() < 0.6] or [len(steps)]
            losses.append({one: choose.uniform(0.5, 2) for one in used})
        return Program(choose.choice(WORKERS), mode, steps, losses)

    def run(self, compute):
        """The values; `compute(step, x, y)` makes one, or None if it raised what it should."""
        values = [torch.full((2, 3), 0.3, dtype=torch.double, requires_grad=True)]
        for step in self.steps:
            value = compute(step, values[step.source], values[step.other])
            values.append(values[step.source] * 2 if value is None else value)
        return values

    def loss(self, weights, values):
        return sum(values[place].sum() * weight for place, weight in weights.items())


def remotely(layers, step, x, y):
    with torch.no_grad() if step.detached else contextlib.nullcontext():
        return call(layers, step, x, y)


def call(layers, step, x, y):
    path = [layers[place] for place in step.path]
    functions = {"chain": chain, "coroutine": coroutine, "future": chained_future}
    if step.how in functions and 0 <= step.fail <= len(path):
        function = functions[step.how]
        error = raised_by(lambda: rpc.rpc_sync(step.worker, function, args=(path, x, step.fail)))
        if type(error) is not Planned or error.args != (len(path) - step.fail,):
            raise AssertionError(f"{step}: {error!r}")
        return None
    if step.how in functions:
        return rpc.rpc_sync(step.worker, functions[step.how], args=(path, x))
    if step.how == "forward":
        return path[0].rpc_sync().forward(x)
    if step.how == "forward_async":
        pair = [path[0].rpc_async().forward(x), path[-1].rpc_async().forward(y)]
        return pair[0].wait() + pair[1].wait()
    if step.how == "reference":
        return rpc.remote(step.worker, chain, args=(path, x)).to_here()
    if step.how == "reference_as_argument":
        reference = rpc.remote(step.worker, chain, args=(path, x))
        return rpc.rpc_sync(path[0].owner(), fetch_and_add, args=(reference, y))
    if step.how == "containers":
        sums = rpc.rpc_sync(step.worker, in_containers, args=({"pair": (x, y)},), kwargs={"more": x})["sums"]
        return sums[0] * sums[1]
    if step.how == "box":
        return rpc.rpc_sync(step.worker, box_sum, args=(Box(x, y),)).first
    return rpc.rpc_sync(step.worker, torch.mul, args=(x, y))


def locally(layers, step, x, y):
    if step.detached:
        x, y = x.detach(), y.detach()

    def along(value, path=step.path):
        for place in path:
            value = layers[place](value)
        return value

    if step.how in ("chain", "coroutine", "future"):
        return None if 0 <= step.fail <= len(step.path) else along(x)
    if step.how == "forward":
        return along(x, step.path[:1])
    if step.how == "forward_async":
        return along(x, step.path[:1]) + along(y, step.path[-1:])
    if step.how == "reference":
        return along(x)
    if step.how == "reference_as_argument":
        return along(x) + y
    if step.how == "containers":
        return (x + y) * x
    if step.how == "box":
        return x + y
    return x * y


def drive(program, layers):
    """Runs the program from this worker, in a context: the losses, and the gradients of its start and of all parameters."""
    with autograd.context() as context:
        values = program.run(lambda *step: remotely(layers, *step))
        losses = [program.loss(weights, values) for weights in program.losses]
        roots = [loss for loss in losses if loss.requires_grad]
        for root in roots:
            autograd.backward(context, [root], retain_graph=root is not roots[-1], mode=program.mode, stall=10)
        gradients = [autograd.get_gradients(context).get(values[0])]
        for layer in layers:
            gradients += layer.rpc_sync().gradients(context)
    return [loss.detach() for loss in losses], gradients


def in_one_process(program, layer_seeds):
    layers = [Layer(seed) for seed in layer_seeds]
    values = program.run(lambda *step: locally(layers, *step))
    losses = [program.loss(weights, values) for weights in program.losses]
    if roots := [loss for loss in losses if loss.requires_grad]:
        sum(roots).backward()
    gradients = [values[0].grad] + [parameter.grad for layer in layers for parameter in layer.parameters()]
    return [loss.detach() for loss in losses], gradients


def same(a, b):
    if a is None or b is None:
        return a is None and b is None
    return torch.allclose(a, b, atol=1e-12, rtol=1e-12)


def check(seed):
    """What is wrong: one to four programs at once, of several workers and threads, with the same layers."""
    choose = random.Random(seed)
    layer_seeds = [seed * 10 + place for place in range(choose.randint(2, 4))]
    layers = [rpc.remote(choose.choice(WORKERS), Layer, args=(one,)) for one in layer_seeds]
    programs = [Program.random(choose, len(layers)) for _ in range(choose.choice([1, 1, 2, 3, 4]))]
    found = [None] * len(programs)

    def run_one(place):
        try:
            found[place] = rpc.rpc_sync(programs[place].driver, drive, args=(programs[place], layers))
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run_one, args=(place,)) for place in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = []
    for program, got in zip(programs, found):
        wanted = in_one_process(program, layer_seeds)
        if isinstance(got, Exception):
            wrong.append(f"seed {seed}: {type(got).__name__}: {got} ({got.__cause__}) in {program}")
            continue
        for name, ours, theirs in zip(("losses", "gradients"), got, wanted):
            different = [place for place, pair in enumerate(zip(ours, theirs)) if not same(*pair)]
            if different or len(ours) != len(theirs):
                place = (different or [-1])[0]
                wrong.append(f"seed {seed}: {name} {different} of {program}: {ours[place]}, expected {theirs[place]}")
    return wrong


class Programs(unittest.TestCase):
    maxDiff = None

    def test_random_programs_have_the_values_and_gradients_of_one_process(self):
        """Layers on all workers, called in all ways, by several programs at once, SMART and FAST, with exceptions between."""

        def body(rank, size, seeds):
            return [fault for seed in seeds for fault in check(seed)] if rank == 0 else []

        for group in range(SEEDS.start // GROUP, -(-SEEDS.stop // GROUP)):
            seeds = [seed for seed in range(group * GROUP, (group + 1) * GROUP) if seed in SEEDS]
            result = run(3, body, seeds, world=Native(threads=THREADS[group % len(THREADS)]))
            self.assertEqual(result, [[], [], []], f"TORCHSPAN_PYTHON_SEEDS={seeds[0]}+{len(seeds)} repeats it")


if __name__ == "__main__":
    unittest.main()
