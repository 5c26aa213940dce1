"""torchspan.pipeline: losses and gradients of one process, exceptions, deaths, state."""

import copy
import functools
import gc
import itertools
import os
import pickle
import random
import signal
import threading
import time
import unittest

import torch
from torch import nn

import processes
from processes import Native, run
from torchspan import pipeline, rpc

processes.LIMIT = 180  # many pipelines in one world
SEEDS = int(os.environ.get("TORCHSPAN_PYTHON_SEEDS", "40"))
WIDTH = 4


def raised_by(call):
    try:
        call()
    except BaseException as error:  # noqa: B902  the caller judges it
        return error
    return None


# ---- layers


class Dense(nn.Module):
    """Not linear, so that an error in one layer changes all gradients."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)))

    def back(self, x):
        return torch.tanh(x @ self.linear.weight)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen = self.seen + 1  # another tensor
        return self.norm(x)


class Cube(torch.autograd.Function):
    """Without second factors of autograd, in Python."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.save_for_backward(x)
        ctx.fails = fails
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("no cube")
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2, None


class Cubed(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.fails = fails

    def forward(self, x):
        return Cube.apply(torch.tanh(self.linear(x)), self.fails)


class Fork(nn.Module):
    """Returns several values, not all of them tensors."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale, None, 2, 0.25, True, pipeline.Unsplit(self.scale * 2)


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x, nothing, two, quarter, yes, doubled):
        if (nothing, two, quarter, yes) != (None, 2, 0.25, True) or type(yes) is not bool or doubled.dim() != 0:
            raise AssertionError((nothing, two, quarter, yes, doubled))
        return self.linear(x) * doubled


def halved(x):
    return x / 2


def mean_square(output, target):
    return (output - target).square().mean()


# ---- the oracle: the same layers in one process


class Model:
    """`layers`: (factory, arguments) by number; a function stands for itself. `uses`: (layer, method or None)."""

    def __init__(self, layers, uses=None, ties=()):
        self.layers, self.ties = layers, ties
        self.uses = uses or [(layer, None) for layer in range(len(layers))]

    def described(self):
        described, first = pipeline.Layers(), {}
        for layer, method in self.uses:
            if layer in first:
                described.reuse(first[layer], method)
            elif isinstance(self.layers[layer], tuple):
                first[layer] = described.add(self.layers[layer][0], *self.layers[layer][1:])
            else:
                first[layer] = described.add_function("function", self.layers[layer])
        for tie in self.ties:
            described.tie(*((first[layer], name) for layer, name in tie))
        return described

    def build(self, seed):
        """Builds the layers with their weights of a pipeline of that seed."""
        self.modules = []
        for number, layer in enumerate(self.layers):
            torch.manual_seed(pipeline.seed_of_layer(seed, number))
            self.modules.append(layer[0](*layer[1:]) if isinstance(layer, tuple) else layer)
        for (first, name), *others in self.ties:
            for other, same in others:
                owner, _, member = same.rpartition(".")
                setattr(self.modules[other].get_submodule(owner), member, self.modules[first].get_parameter(name))

    def parameters(self):
        return list(dict.fromkeys(p for m in self.modules if isinstance(m, nn.Module) for p in m.parameters()))

    def run(self, x, seed=None, step=0, micro_batch=0):
        values = x if isinstance(x, tuple) else (x,)
        for order, (layer, method) in enumerate(self.uses):
            if seed is not None:
                torch.manual_seed(pipeline.seed_of_use(seed, step, order, micro_batch))
            call = self.modules[layer] if method is None else getattr(self.modules[layer], method)
            result = call(*values)
            result = result if isinstance(result, tuple) else (result,)
            values = tuple(one.tensor if isinstance(one, pipeline.Unsplit) else one for one in result)
        return values[0] if len(values) == 1 else values

    def step(self, x, y, loss_fn, micro_batches, seed=None, step=0, first_micro_batch=0, rows=None):
        total = 0.0
        parts = min(micro_batches, len(y))
        for number, (inputs, targets) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts))):
            output = self.run(inputs, seed, step, first_micro_batch + number)
            if seed is not None:
                torch.manual_seed(pipeline.seed_of_use(seed, step, len(self.uses), first_micro_batch + number))
            share = loss_fn(output, targets) * (len(targets) / (rows or len(y)))
            share.backward()
            total += share.item()
        return total


def numbers(rows, seed):
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def differences(pipe, model, tolerance=1e-12):
    """The parameters and buffers of this worker whose gradients or values differ from the model's."""
    found = []
    for number, module in pipe.modules.items():
        twin = model.modules[number]
        expected = dict(twin.named_parameters(remove_duplicate=False))
        for name, parameter in module.named_parameters():
            other = expected[name]
            if (parameter.grad is None) != (other.grad is None):
                found.append((number, name, parameter.grad, other.grad))
            elif other.grad is not None and not torch.allclose(parameter.grad, other.grad, tolerance, tolerance):
                found.append((number, name, (parameter.grad - other.grad).abs().max().item()))
            if not torch.allclose(parameter, other, tolerance, tolerance):
                found.append((number, name, "value"))
        for name, buffer in module.named_buffers():
            if not torch.allclose(buffer.double(), twin.get_buffer(name).double(), tolerance, tolerance):
                found.append((number, name, buffer, twin.get_buffer(name)))
    return found


def compare(model, seed=1, rows=7, steps=2, **options):
    """Trains a pipeline and the model in this process; returns what differs."""
    options = {"micro_batches": 3, **options}
    described = model.described()
    model.build(seed)
    expected = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pipeline.Pipeline(described, seed=seed, **options) as pipe:
        mine = pipe.parameters()
        optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9) if mine else None
        found = []
        for step in range(steps):
            x, y = numbers(rows, 10 * seed + step), numbers(rows, 10 * seed + step + 5)
            state = torch.get_rng_state()
            loss = pipe.train_step(x, y, mean_square)
            if not torch.equal(state, torch.get_rng_state()):
                found.append("the generator's state changed")
            wanted = model.step(x, y, mean_square, options["micro_batches"], seed, step)
            if abs(loss - wanted) > 1e-12:
                found.append((loss, wanted))
            found += differences(pipe, model)
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
            expected.step()
            expected.zero_grad()
        pipe.eval()
        for module in model.modules:
            if isinstance(module, nn.Module):
                module.eval()
        output = pipe.infer(x)
        if output is not None and not torch.allclose(output, model.run(x), 1e-12, 1e-12):
            found.append("infer")
        return found


def even(layers, stages):
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def dense(count):
    return [(Dense,)] * count


def every_schedule(rank, size, checkpoint):
    found = []
    for schedule in pipeline._SCHEDULES:
        several = schedule in ("interleaved", "zb1p", "zbv", "dualpipev")
        stages = size * (2 if several else 1)
        layers = [(Dense, 0.3), (Cubed,), halved, (Dense,), (Cubed,), (Dense, 0.3)]
        wrong = compare(
            Model(layers), schedule=schedule, checkpoint=checkpoint, balance=even(6, stages), micro_batches=6, rows=13
        )
        found += [(schedule, checkpoint, wrong)] if wrong else []
    return found


PATTERNS = {
    "A B A": Model(dense(2), [(0, None), (1, None), (0, None)]),
    "A B A B through another method": Model(dense(2), [(0, None), (1, None), (0, "back"), (1, "back")]),
    "three layers": Model(dense(3), [(0, None), (1, None), (2, None), (1, None), (0, "back"), (2, None), (2, None)]),
    "a layer of two stages": Model(dense(3), [(0, None), (1, None), (2, None), (0, None)]),
    "tied": Model(dense(3), ties=[[(0, "linear.weight"), (2, "linear.weight")]]),
    "several values": Model([(Dense,), (Fork,), (Join,), (Dense,)]),
    "batch norm": Model([(Dense,), (Norm,), (Dense,), (Norm,)]),
}


def every_pattern(rank, size, checkpoint):
    found = []
    for (pattern, model), schedule in itertools.product(PATTERNS.items(), ("arrival", "gpipe", "1f1b")):
        stages = min(len(model.layers), size)
        if rank >= stages:
            continue
        if schedule == "arrival" and pattern == "batch norm":
            continue  # running statistics depend on the order
        workers = [f"worker{stage}" for stage in range(stages)]
        balance = even(len(model.layers), stages)
        wrong = compare(model, schedule=schedule, checkpoint=checkpoint, balance=balance, workers=workers, rows=9)
        found += [(pattern, schedule, checkpoint, wrong)] if wrong else []
    return found


def random_plans(rank, size, first, count):
    found = []
    for seed in range(first, first + count):
        choose = random.Random(seed)
        kinds = [(Dense,), (Dense, 0.4), (Cubed,), halved]
        layers = [choose.choice(kinds[:3])] + [choose.choice(kinds) for _ in range(choose.randint(1, 5))]
        uses, used = [], []
        for layer in range(len(layers)):
            uses.append((layer, None))
            used.append(layer)
            while choose.random() < 0.4:
                again = choose.choice(used)
                back = isinstance(layers[again], tuple) and layers[again][0] is Dense and choose.random() < 0.5
                uses.append((again, "back" if back else None))
        stages = choose.randint(1, len(layers))
        cuts = sorted(choose.sample(range(1, len(layers)), stages - 1))
        balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)])]
        places = [choose.randrange(size) for _ in range(stages)]
        options = {
            "balance": balance,
            "workers": [f"worker{place}" for place in places],
            "micro_batches": choose.randint(1, 5),
            "schedule": choose.choice(["arrival", "gpipe", "1f1b"]),
            "checkpoint": choose.choice(pipeline._CHECKPOINTS),
            "rows": choose.randint(1, 11),
        }
        if options["checkpoint"] != "never" and choose.random() < 0.5:
            options["checkpoint_layers"] = choose.sample(range(len(layers)), choose.randint(1, len(layers)))
        if rank not in places:
            continue
        wrong = compare(Model(layers, uses), seed=seed, **options)
        found += [(f"seed {seed}", options, uses, wrong)] if wrong else []
    return found


def replicas(rank, size):
    model = Model([(Dense, 0.3), (Dense,), (Dense,)], ties=[[(0, "linear.weight"), (2, "linear.weight")]])
    found = []
    with pipeline.Pipeline(model.described(), replicas=2, micro_batches=2, seed=3) as pipe:
        model.build(3)
        x, y = numbers(10, 1), numbers(10, 2)
        mine = slice(0, 6) if pipe.replica == 0 else slice(6, 10)
        for step in range(2):
            loss = pipe.train_step(x[mine], y[mine], mean_square)
            wanted = sum(
                model.step(x[part], y[part], mean_square, 2, 3, step, first_micro_batch=2 * replica, rows=10)
                for replica, part in enumerate((slice(0, 6), slice(6, 10)))
            )
            found += [(loss, wanted)] if abs(loss - wanted) > 1e-12 else []
            found += differences(pipe, model)
        for part in range(2):
            rows = slice(5 * part, 5 * part + 5)
            pipe.train_step(x[rows], y[rows], mean_square, gradient_scale=0.5, no_sync=part == 0)
        norm = pipe.clip_grad_norm(1e-3)
        total = sum(p.grad.square().sum() for n, p in pipe.named_parameters() if n == "layers.0.linear.weight")
        return found, pipe.replica, norm, float(total)


# ---- failures


class Breaks(nn.Module):
    """Raises once when it is asked to."""

    when = None

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        if Breaks.when == self.number:
            Breaks.when = None
            raise LookupError(f"layer {self.number} broke")
        return torch.tanh(self.linear(x))


def failing_loss(output, target):
    raise ZeroDivisionError("no loss")


def text_of(error):
    return f"{type(error).__module__}.{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"


def breaking(count=2):
    layers = pipeline.Layers()
    for number in range(count):
        layers.add(Breaks, number, name=f"breaks{number}")
    return layers


def exceptions(rank, size):
    texts = []
    x, y = numbers(6, 1), numbers(6, 2)
    with pipeline.Pipeline(breaking(size), micro_batches=3) as pipe:
        for broken in range(size):
            Breaks.when = broken
            error = raised_by(lambda: pipe.train_step(x, y, mean_square))
            trace = []
            frame = error.__traceback__
            while frame:
                trace.append(frame.tb_frame.f_code.co_name)
                frame = frame.tb_next
            texts.append((text_of(error), "forward" in trace))
            Breaks.when = None
        texts.append((text_of(raised_by(lambda: pipe.train_step(x, y, failing_loss))), True))
        texts.append((text_of(raised_by(lambda: pipe.train_step(x, y, lambda output, target: 3.0))), True))
        for parameter in pipe.parameters():
            parameter.grad = None
        return texts, pipe.train_step(x, y, mean_square)


def failing_backward(rank, size, schedule):
    layers = pipeline.Layers()
    layers.add(Dense)
    layers.add(Cubed, True)
    with pipeline.Pipeline(layers, micro_batches=4, schedule=schedule) as pipe:
        return text_of(raised_by(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square)))


def cannot_be_built(rank, size):
    layers = pipeline.Layers()
    layers.add(Dense)
    layers.add(Dense, "much", name="wrong")
    return text_of(raised_by(lambda: pipeline.Pipeline(layers)))


def wrong_values(rank, size):
    class Dictionary(nn.Module):
        def forward(self, x):
            return {"x": x}

    layers = pipeline.Layers()
    layers.add(Dense)
    layers.add(Dictionary)
    with pipeline.Pipeline(layers) as pipe:
        return text_of(raised_by(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square)))


def killed_in_a_step(rank, size):
    class Dies(nn.Module):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGKILL)

    layers = pipeline.Layers()
    layers.add(Dense)
    layers.add(Dies)
    pipe = pipeline.Pipeline(layers, micro_batches=2)
    first = raised_by(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square))
    again = raised_by(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square))
    return text_of(first), text_of(again)


def interrupted(rank, size):
    """Worker 0 waits for a gradient from worker 1, which has not begun the step."""
    with pipeline.Pipeline(breaking(), micro_batches=2) as pipe:
        x, y = numbers(6, 1), numbers(6, 2)
        if rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            error = raised_by(lambda: pipe.train_step(x, y, mean_square))
            rpc.rpc_sync("worker1", _let_go)
        else:
            _gone.wait(30)
            error = raised_by(lambda: pipe.train_step(x, y, mean_square))
        return text_of(error), pipe.train_step(x, y, mean_square)


def interrupted_at_creation(rank, size):
    """Worker 1 does not create the pipeline."""
    if rank == 1:
        _gone.wait(30)
        return None
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    error = raised_by(lambda: pipeline.Pipeline(breaking(), micro_batches=2))
    seconds = time.monotonic() - started
    rpc.rpc_sync("worker1", _let_go)
    return text_of(error), seconds


_gone = threading.Event()


def _let_go():
    _gone.set()


def stalled(rank, size):
    pipe = pipeline.Pipeline(breaking(), timeout=1.0)
    if rank == 1:
        _gone.wait(30)
        return ""
    error = raised_by(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square))
    rpc.rpc_sync("worker1", _let_go)
    return text_of(error)


def wrong_use(rank, size):
    def kinds(*calls):
        return [text_of(raised_by(call)) for call in calls]

    layers = pipeline.Layers()
    first = layers.add(Dense)
    layers.add(Dense)
    here = kinds(
        lambda: pipeline.Pipeline(layers, schedule="2f2b"),
        lambda: pipeline.Pipeline(layers, checkpoint=True),
        lambda: pipeline.Pipeline(layers, micro_batches=1.5),
        lambda: layers.add(3),
        lambda: layers.add(nn.ReLU(), 1),
        lambda: layers.add_function("relu", nn.ReLU()),
        lambda: pipeline.Layers().reuse(first),
    )
    everywhere = kinds(
        lambda: pipeline.Pipeline(layers, balance=[1, 2]),
        lambda: pipeline.Pipeline(layers, micro_batches=1 + rank),
        lambda: pipeline.Pipeline(layers, workers=["worker0", "nobody"]),
        lambda: pipeline.Pipeline(layers, replicas=3),
    )
    different = pipeline.Layers()
    different.add(Dense)
    different.add(Dense if rank == 0 else Cubed)
    everywhere += kinds(lambda: pipeline.Pipeline(different))
    shared = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    sharing = pipeline.Layers()
    sharing.add(shared)
    sharing.add(nn.Sequential, shared)
    everywhere += kinds(lambda: pipeline.Pipeline(sharing))
    pipe = pipeline.Pipeline(layers, micro_batches=2)
    everywhere += kinds(lambda: pipe.train_step(numbers(6, 1), numbers(5, 2), mean_square))
    pipe.close()
    everywhere += kinds(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square), lambda: pipe.parameters())
    return here, everywhere


def replaced_parameters(rank, size):
    with pipeline.Pipeline(breaking()) as pipe:
        if rank == 1:
            pipe.modules[1].linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64))
        return text_of(raised_by(lambda: pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square)))


def failing_mode(rank, size):
    class Fixed(Dense):
        def train(self, mode=True):
            if mode:
                return super().train(mode)
            raise PermissionError("it always trains")

    layers = pipeline.Layers()
    layers.add(Fixed)
    with pipeline.Pipeline(layers) as pipe:
        return text_of(raised_by(pipe.eval)), pipe.train() is pipe


def used_inside(rank, size):
    layers = pipeline.Layers()
    held = []
    layers.add_function("inside", lambda x: held[0].infer(x))
    held.append(pipeline.Pipeline(layers))
    return text_of(raised_by(lambda: held[0].infer(numbers(2, 1))))


# ---- the rest


def forward_and_backward(rank, size):
    model = Model([(Dense,), (Dense,)])
    with pipeline.Pipeline(model.described(), micro_batches=3, seed=1) as pipe:
        model.build(1)
        x, y = numbers(7, 1), numbers(7, 2)
        output = pipe.forward(x)
        if output is not None:
            mean_square(output, y).backward()
        pipe.backward()
        model.step(x, y, mean_square, 1)
        found = differences(pipe, model)
        output = pipe.forward(x)
        pipe.backward(torch.zeros_like(output) if output is not None else None)
        found += differences(pipe, model)
        with torch.no_grad():
            loss = pipe.train_step(x, y, mean_square)
        return found + differences(pipe, model), loss, float(mean_square(model.run(x), y)), output is None


def overlapping(rank, size):
    """staleness 1: gradients are those of the step before."""
    model = Model([(Dense,), (Dense,)])
    with pipeline.Pipeline(model.described(), micro_batches=3, seed=1, staleness=1) as pipe:
        model.build(1)
        x, y = numbers(7, 1), numbers(7, 2)
        first = pipe.train_step(x, y, mean_square)
        loss = pipe.finish()
        wanted = model.step(x, y, mean_square, 3)
        return differences(pipe, model), first != first, abs(loss - wanted) < 1e-12


def state(rank, size):
    """A restored pipeline with another split goes on as the first one would have."""

    def trained(pipe, steps):
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            loss = pipe.train_step(numbers(6, step), numbers(6, step + 1), mean_square)
            optimizer.step()
        return loss

    layers = Model([(Dense, 0.5), (Norm,), (Dense, 0.5)]).described()
    pipe = pipeline.Pipeline(layers, balance=[1, 2], micro_batches=2, seed=1)
    trained(pipe, range(3))
    whole = {}
    for other in rpc._all_gather(pipe.state_dict()).values():
        whole.update(other)
    restored = pipeline.Pipeline(layers, balance=[2, 1], micro_batches=2, seed=1)
    restored.load_state_dict(whole)
    names = [name for name, _ in restored.named_parameters()]
    missing = text_of(raised_by(lambda: restored.load_state_dict({})))
    return trained(pipe, range(3, 5)) == trained(restored, range(3, 5)), names, sorted(whole), missing


def report(rank, size):
    with pipeline.Pipeline(breaking(), micro_batches=2, schedule="gpipe") as pipe:
        pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square)
        last = pipe.last_step()
        actions = {name: [action for action, _, _ in one.actions] for name, one in last.workers.items()}
        return pipe.plan, pipe.plan_svg()[:4], last.step, last.micro_batches, actions


def torch_features(rank, size):
    """Hooks, autocast, saved-tensor hooks and torch.utils.checkpoint of the program."""
    seen = []
    model = Model([(Dense,), (Dense,)])
    found = []
    for checkpoint, schedule in itertools.product(pipeline._CHECKPOINTS, ("1f1b", "zb_h1")):
        with pipeline.Pipeline(model.described(), micro_batches=2, seed=1, checkpoint=checkpoint, schedule=schedule) as pipe:
            model.build(1)
            for module in pipe.modules.values():
                module.register_forward_hook(lambda *_: seen.append("forward"))
            for parameter in pipe.parameters():
                parameter.register_hook(lambda gradient: seen.append("gradient") or gradient * 2)
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient * 2)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append("saved") or t, lambda t: t):
                pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square)
            model.step(numbers(6, 1), numbers(6, 2), mean_square, 2)
            found += differences(pipe, model)
    return found, sorted(set(seen))


class Recomputes(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.dense, self.reentrant = Dense(), reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.dense, x, use_reentrant=self.reentrant)


def checkpoint_of_torch(rank, size):
    found = []
    for reentrant, schedule in itertools.product((True, False), ("1f1b", "zb_h1")):
        found += compare(Model([(Dense,), (Recomputes, reentrant)]), schedule=schedule)
    return found


def not_closed(rank, size):
    pipe = pipeline.Pipeline(breaking(), micro_batches=2)
    pipe.train_step(numbers(6, 1), numbers(6, 2), mean_square)
    not_closed.kept = pipe
    return True


def in_a_fork(rank, size):
    pipe = pipeline.Pipeline(breaking(), micro_batches=2)
    x, y = numbers(6, 1), numbers(6, 2)
    pipe.train_step(x, y, mean_square)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        error = raised_by(lambda: pipe.train_step(x, y, mean_square))
        os.write(theirs, text_of(error).encode())
        pipe.close()
        os._exit(7)
    text = os.read(ours, 10000).decode()
    _, status = os.waitpid(child, 0)
    loss = pipe.train_step(x, y, mean_square)
    pipe.close()
    return text, os.waitstatus_to_exitcode(status), loss == loss


def many(rank, size):
    """Pipelines one after another leave no modules behind."""
    import weakref

    left = []
    for _ in range(20):
        with pipeline.Pipeline(breaking()) as pipe:
            pipe.train_step(numbers(4, 1), numbers(4, 2), mean_square)
            left += [weakref.ref(module) for module in pipe.modules.values()]
            del pipe
    gc.collect()
    return sum(one() is not None for one in left)


# ---- skips, caches, tables, balances


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x, skips=None):
        y = torch.tanh(self.linear(x))
        if skips is not None:
            skips.stash("kept", y * 2)
            skips.stash("nothing", None)
            self.skips = skips
        return y


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x, skips):
        if skips.pop("nothing") is not None:
            raise AssertionError("a None became something else")
        return torch.tanh(self.linear(x)) + skips.pop("kept")


def skipping(reused):
    """down, dense, up; twice with the same layers, in spaces of their own, if `reused`."""
    layers = pipeline.Layers()
    down = layers.add(Down).stashes("kept", "nothing").in_space("outer")
    dense = layers.add(Dense)
    if reused:
        layers.reuse(down).stashes("kept", "nothing").in_space("inner")
        up = layers.add(Up).pops("kept", "nothing").in_space("inner")
        layers.reuse(dense)
        layers.reuse(up).pops("kept", "nothing").in_space("outer")
    else:
        layers.add(Up).pops("kept", "nothing").in_space("outer")
    return layers


def skip_oracle(reused, x):
    torch.manual_seed(pipeline.seed_of_layer(1, 0))
    down = Down()
    torch.manual_seed(pipeline.seed_of_layer(1, 1))
    dense = Dense()
    torch.manual_seed(pipeline.seed_of_layer(1, 2))
    up = Up()

    def rise(x, kept):
        return torch.tanh(up.linear(x)) + kept

    first = down(x)
    middle = dense(first)
    if reused:
        second = down(middle)
        middle = dense(rise(second, second * 2))
    return rise(middle, first * 2), [down, dense, up]


def skips(rank, size):
    found = []
    for reused, checkpoint, schedule in itertools.product((False, True), pipeline._CHECKPOINTS, ("1f1b", "gpipe", "arrival")):
        x, y = numbers(7, 1), numbers(7, 2)
        output, modules = skip_oracle(reused, x)
        wanted = mean_square(output, y)
        wanted.backward()
        options = {"checkpoint": checkpoint, "schedule": schedule, "micro_batches": 3, "balance": even(3, size), "seed": 1}
        with pipeline.Pipeline(skipping(reused), **options) as pipe:
            loss = pipe.train_step(x, y, mean_square)
            wrong = [] if abs(loss - wanted.item()) < 1e-12 else [(loss, wanted.item())]
            for number, module in pipe.modules.items():
                for mine, other in zip(module.parameters(), modules[number].parameters()):
                    if not torch.allclose(mine.grad, other.grad, 1e-12, 1e-12):
                        wrong.append(number)
            late = [module.skips for module in pipe.modules.values() if hasattr(module, "skips")]
            texts = [str(raised_by(lambda: one.stash("kept", x))) for one in late]
            if any("while it runs" not in text for text in texts):
                wrong.append(texts)
        found += [(reused, checkpoint, schedule, wrong)] if wrong else []
    return found


class Wrong(nn.Module):
    def forward(self, x, skips):
        skips.stash("other", x)
        return x


def undeclared(rank, size):
    layers = pipeline.Layers()
    layers.add(Wrong).stashes("kept")
    layers.add(Up).pops("kept", "nothing")
    texts = [str(raised_by(lambda: pipeline.Pipeline(layers)))]
    layers = pipeline.Layers()
    layers.add(Wrong).stashes("kept")
    layers.add_function("second", lambda x, skips: skips.pop("kept")).pops("kept")
    with pipeline.Pipeline(layers) as pipe:
        texts.append(str(raised_by(lambda: pipe.infer(numbers(2, 1)))))
    return texts


class Closes(nn.Module):
    def forward(self, x):
        closes[0].close()
        return x


closes = []


def closed_by_a_layer(rank, size):
    layers = pipeline.Layers()
    layers.add(Closes)
    layers.add(Dense)
    pipe = pipeline.Pipeline(layers)
    closes[:] = [pipe]
    text = str(raised_by(lambda: pipe.train_step(numbers(2, 1), numbers(2, 2), mean_square)))
    closes.clear()
    pipe.close()
    return text


class RunningSum(nn.Module):
    """Adds all rows of a sequence up to now, as attention reads all tokens up to now."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x, cache):
        sums = x.cumsum(1) * self.scale
        if cache.active:
            self.cache = cache
            if cache.tensors:
                sums = sums + cache.tensors[0][:, None]
            cache.tensors = [sums[:, -1]]
        return sums


def cached(rank, size):
    layers = pipeline.Layers()
    for _ in range(3):
        layers.add(RunningSum).keeps_cache()
    x = torch.arange(24.0, dtype=torch.float64).reshape(2, 12)
    with pipeline.Pipeline(layers, micro_batches=2) as pipe:
        whole = pipe.infer(x)
        cache = pipeline.Cache()
        parts = [pipe.infer(part, cache) for part in x.split(5, 1)]
        late = next((str(raised_by(lambda: m.cache.tensors)) for m in pipe.modules.values()), "")
        return (whole is None) or torch.allclose(torch.cat(parts, 1), whole, 1e-12, 1e-12), "not active" in late


def tables(rank, size):
    from torch.distributed.pipelining.schedules import _Action

    def trained(**options):
        with pipeline.Pipeline(Model(dense(3)).described(), balance=even(3, size), micro_batches=4, seed=1, **options) as pipe:
            loss = pipe.train_step(numbers(8, 1), numbers(8, 2), mean_square)
            return loss, pipe.schedule_csv()

    loss, csv = trained(schedule="gpipe")
    again, same = trained(schedule_csv=csv)
    actions = [str(_Action.from_str(cell)) for cell in csv.splitlines()[rank].split(",")]
    errors = [
        str(raised_by(lambda: trained(schedule_csv=csv.replace("0F1", "0X1")))),
        str(raised_by(lambda: trained(schedule="gpipe", schedule_csv=csv))),
    ]
    return again == loss, same == csv, actions, errors


class Slow(Dense):
    def forward(self, x):
        for _ in range(200):
            x = super().forward(x)
        return x


def balances(rank, size):
    layers = pipeline.Layers()
    for kind in (Dense, Dense, Dense, Slow):
        layers.add(kind)
    sample = numbers(8, 1) if rank == 0 else None
    by_time = pipeline.balance_by_time(layers, 2, sample)
    by_size = pipeline.balance_by_size(layers, 2, sample, parameter_scale=100)
    wrong = str(raised_by(lambda: pipeline.balance_by_time(layers, 2, torch.ones(3, 3) if rank == 0 else None)))
    return by_time, sum(by_size), wrong


class Normed(nn.Module):
    """Also with a norm inside, which another one of its kind shares."""

    def __init__(self, deferred):
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(WIDTH, dtype=torch.float64), nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
        if deferred:
            pipeline.convert_deferred_batch_norm(self)

    def forward(self, x):
        return torch.tanh(self.first(x))


def deferred_norms(rank, size, **options):
    layers = pipeline.Layers()
    layers.add(pipeline.DeferredBatchNorm, WIDTH, momentum=None, dtype=torch.float64)
    layers.add(Normed, True)
    layers.add(Normed, True)
    plain = nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64)
    with pipeline.Pipeline(layers, seed=1, balance=[2, 1], micro_batches=3, **options) as pipe:
        for step in range(3):
            halves = [numbers(6, 2 * step), 3 + 2 * numbers(6, 2 * step + 1)]
            plain(torch.cat(halves) if "replicas" in options else halves[0])
            x = halves[pipe.replica]
            pipe.train_step(x, x, mean_square)
        pipe.eval().infer(halves[0])
        assert all(part.num_batches_tracked == 3 for module in pipe.modules.values() for part in module.modules() if hasattr(part, "num_batches_tracked"))
        first = pipe.modules.get(0)
        found = [] if first is None else [(a - b).abs().max().item() for a, b in zip(first.buffers(), plain.buffers())]
        return found, sorted(name for name in pipe.state_dict() if "running_mean" in name)


def deferred_norm_alone(rank, size):
    """As torch's outside of a pipeline; copies and pickles are norms of their own."""
    mine, torchs = pipeline.DeferredBatchNorm(WIDTH, dtype=torch.float64), nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    for _ in range(2):
        x = numbers(5, 3).requires_grad_()
        y = x.detach().clone().requires_grad_()
        mine(x).pow(3).sum().backward()
        torchs(y).pow(3).sum().backward()
        assert torch.allclose(x.grad, y.grad) and torch.allclose(mine.weight.grad, torchs.weight.grad)
        torchs.zero_grad()
        mine, other = copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))
        assert torch.equal(other.running_var, mine.running_var)
    mine.load_state_dict(torchs.state_dict())
    assert torch.allclose(mine.eval()(x), torchs.eval()(x))
    frozen = nn.BatchNorm2d(3)
    frozen.weight.requires_grad_(False)
    converted = pipeline.convert_deferred_batch_norm(frozen.eval())
    assert converted.weight is frozen.weight and not converted.weight.requires_grad and not converted.training
    return str(raised_by(lambda: mine(torch.ones(WIDTH)))), str(raised_by(lambda: pipeline.Pipeline(Model(dense(size)).described(), offload=True)))


class MoreOfLayers(unittest.TestCase):
    def test_deferred_norms_have_the_statistics_of_the_whole_batch(self):
        for options in ({}, {"checkpoint": "always"}, {"replicas": 2, "workers": ["worker0", "worker1", "worker2", "worker3"]}):
            results = processes.run(4 if "replicas" in options else 2, functools.partial(deferred_norms, **options), world=Native())
            self.assertLess(max(results[0][0]), 1e-12, options)
            self.assertEqual(results[0][1], ["layers.0.running_mean", "layers.1.first.0.running_mean"])

    def test_a_deferred_norm_outside_of_a_pipeline_is_torchs(self):
        for few, offloaded in processes.run(2, deferred_norm_alone, world=Native()):
            self.assertRegex(few, "2 to 5 dimensions")
            self.assertRegex(offloaded, "offload")

    def test_a_layer_cannot_close_its_pipeline(self):
        for text in run(2, closed_by_a_layer, world=Native()):
            self.assertIn("call it from one thread, and not from its layers", text)

    def test_skips_pass_the_layers_between_under_every_schedule_and_checkpoint(self):
        for size in (1, 2, 3):
            self.assertEqual(run(size, skips, world=Native()), [[]] * size)

    def test_skips_that_were_not_declared_are_refused(self):
        for texts in run(2, undeclared, world=Native()):
            self.assertIn("nothing", texts[0])
            self.assertIn("'other'", texts[1])

    def test_a_cache_continues_a_sequence(self):
        for size in (1, 2):
            self.assertEqual(run(size, cached, world=Native()), [(True, True)] * size)

    def test_tables_are_those_of_torch_and_can_be_given(self):
        for rank, (equal, same, actions, errors) in enumerate(run(2, tables, world=Native())):
            self.assertTrue(equal and same)
            self.assertEqual(sorted(actions), [f"{rank}{kind}{number}" for kind in "BF" for number in range(4)])
            self.assertIn("column", errors[0])
            self.assertIn("not both", errors[1])

    def test_balances_follow_what_layers_cost(self):
        for rank, (by_time, layers, wrong) in enumerate(run(2, balances, world=Native())):
            self.assertEqual((by_time, layers), ([3, 1], 4))
            self.assertIn("mat1" if rank == 0 else "layer 'Dense'", wrong)


class Oracle(unittest.TestCase):
    def test_all_schedules_and_checkpoints_give_losses_and_gradients_of_one_process(self):
        for size, checkpoint in itertools.product((1, 2, 3), pipeline._CHECKPOINTS):
            self.assertEqual(run(size, every_schedule, checkpoint, world=Native()), [[]] * size)

    def test_layers_can_be_used_many_times_and_from_several_stages_and_tied(self):
        for size, checkpoint in itertools.product((1, 2, 3), pipeline._CHECKPOINTS):
            self.assertEqual(run(size, every_pattern, checkpoint, world=Native()), [[]] * size)

    def test_random_plans_give_losses_and_gradients_of_one_process(self):
        for size, first in itertools.product((2, 3), range(0, SEEDS, 10)):
            self.assertEqual(run(size, random_plans, 1000 * size + first, 10, world=Native()), [[]] * size)

    def test_replicas_train_like_one_process_with_all_rows(self):
        results = run(4, replicas, world=Native())
        self.assertEqual([one[:2] for one in results], [([], 0), ([], 0), ([], 1), ([], 1)])
        self.assertEqual(len({one[2] for one in results}), 1)
        self.assertGreater(results[0][2], 1e-3)

    def test_an_output_can_be_differentiated_by_the_program(self):
        for found, loss, wanted, empty in run(2, forward_and_backward, world=Native()):
            self.assertEqual(found, [])
            self.assertAlmostEqual(loss, wanted, delta=1e-12)

    def test_steps_can_overlap(self):
        self.assertEqual(run(2, overlapping, world=Native()), [([], True, True)] * 2)

    def test_hooks_of_the_program_run(self):
        self.assertEqual(run(2, torch_features, world=Native()), [([], ["forward", "gradient", "saved"])] * 2)

    def test_layers_can_recompute_by_themselves(self):
        self.assertEqual(run(2, checkpoint_of_torch, world=Native()), [[]] * 2)


class Failures(unittest.TestCase):
    def test_an_exception_is_raised_where_it_happened_and_named_elsewhere(self):
        first, second = run(2, exceptions, world=Native())
        for broken in range(2):
            here, there = (first, second) if broken == 0 else (second, first)
            text, from_forward = here[0][broken]
            self.assertTrue(text.startswith(f"builtins.LookupError: layer {broken} broke"), text)
            self.assertTrue(from_forward)
            if hasattr(BaseException, "add_note"):
                self.assertIn(f"forward of micro-batch 0 through layer 'breaks{broken}'", text)
            text, _ = there[0][broken]
            self.assertIn("torchspan.errors.RemoteFailureError", text)
            self.assertIn(f"layer 'breaks{broken}' (order {broken}, stage {broken} on 'worker{broken}')", text)
            self.assertIn(f"LookupError: layer {broken} broke", text)
        self.assertIn("builtins.ZeroDivisionError: no loss", second[0][2][0])
        self.assertIn("torchspan.errors.RemoteFailureError", first[0][2][0])
        self.assertIn("the loss: ZeroDivisionError: no loss", first[0][2][0])
        self.assertIn("builtins.TypeError: torchspan: the loss function returned a value of type float", second[0][3][0])
        self.assertEqual(first[1], second[1])

    def test_an_exception_in_the_backward_of_a_function_ends_the_step(self):
        for schedule in ("1f1b", "zb_h1"):
            first, second = run(2, failing_backward, schedule, world=Native())
            self.assertIn("torchspan.errors.RemoteFailureError", first)
            self.assertIn("no cube", first)
            self.assertIn("on 'worker1'", first)
            if schedule == "1f1b":
                self.assertTrue(second.startswith("builtins.ArithmeticError: no cube"), second)
            self.assertIn("no cube", second)

    def test_a_layer_that_cannot_be_built_fails_everywhere(self):
        first, second = run(2, cannot_be_built, world=Native())
        self.assertIn("torchspan.errors.RemoteFailureError", first)
        self.assertIn("layer 'wrong' (stage 1) could not be built on worker 'worker1': TypeError", first)
        self.assertTrue(second.startswith("builtins.TypeError"), second)

    def test_values_that_cannot_travel_are_refused(self):
        first, second = run(2, wrong_values, world=Native())
        self.assertIn("a value of type dict cannot go from layer to layer", first)
        self.assertTrue(second.startswith("builtins.TypeError"), second)

    def test_a_death_in_a_step_is_named(self):
        first, second = run(2, killed_in_a_step, world=Native(destroy=False))
        self.assertEqual(second.type_name, "Exit")
        for text in first:
            self.assertIn("torchspan.errors.DisconnectedError", text)
            self.assertIn("worker 'worker1' (rank 1), which owns stage 1, is unreachable", text)

    def test_an_interrupt_ends_a_wait_on_all_workers(self):
        (first, loss), (second, same) = run(2, interrupted, world=Native())
        self.assertIn("builtins.KeyboardInterrupt", first)
        self.assertIn("torchspan.errors.RemoteFailureError", second)
        self.assertIn("was interrupted on worker 'worker0'", second)
        self.assertEqual(loss, same)

    def test_an_interrupt_ends_the_wait_of_a_creation(self):
        text, seconds = run(2, interrupted_at_creation, world=Native())[0]
        self.assertIn("builtins.KeyboardInterrupt", text)
        self.assertLess(seconds, 4)

    def test_a_worker_that_does_not_come_is_named(self):
        first, _ = run(2, stalled, world=Native())
        self.assertIn("torchspan.errors.TimedOutError", first)
        self.assertIn("worker 'worker1' has not begun the step", first)

    def test_wrong_arguments_are_named(self):
        results = run(2, wrong_use, world=Native())
        for here, everywhere in results:
            for text, wanted in zip(
                here,
                (
                    "ValueError: torchspan.pipeline: schedule is '2f2b'; expected 'arrival', ",
                    "ValueError: torchspan.pipeline: checkpoint is True; expected 'never', 'except_last', 'always'",
                    "TypeError: 'float' object cannot be interpreted as an integer",
                    "TypeError: torchspan.pipeline: Layers.add() got a int",
                    "TypeError: torchspan.pipeline: Layers.add() got an existing module, which takes no arguments",
                    "TypeError: torchspan.pipeline: 'relu' is a module, not a function",
                    "ValueError: torchspan.pipeline: expected what add(), add_function() or reuse()",
                ),
            ):
                self.assertIn(wanted, text)
            for text, wanted in zip(
                everywhere,
                (
                    "balance",
                    "worker 'worker0' has \"micro_batches 1\", worker 'worker1' has \"micro_batches 2\"",
                    "nobody",
                    "replicas",
                    "worker 'worker0' has \"layers Dense, Dense\", worker 'worker1' has \"layers Dense, Cubed\"",
                    "share a parameter",
                    "the target has 5 rows, the input 6",
                    "the pipeline was closed: make another one",
                    "the pipeline was closed: make another one",
                ),
            ):
                self.assertIn(wanted, text)
                self.assertIn("torchspan.errors.InvalidError", text)

    def test_a_parameter_that_was_replaced_is_named(self):
        for text in run(2, replaced_parameters, world=Native()):
            self.assertIn("parameter 'linear.weight' of layer 'breaks1' was replaced", text)

    def test_an_exception_of_a_module_that_changes_its_mode_is_raised(self):
        self.assertEqual(run(1, failing_mode, world=Native()), [("builtins.PermissionError: it always trains ", True)])

    def test_a_layer_cannot_call_its_pipeline(self):
        self.assertIn("call it from one thread, and not from its layers", run(1, used_inside, world=Native())[0])


class Lifetime(unittest.TestCase):
    def test_a_restored_pipeline_goes_on_with_another_split(self):
        first, second = run(2, state, world=Native())
        self.assertTrue(first[0] and second[0], (first, second))
        self.assertIn("layers.0.linear.weight", first[1])
        self.assertEqual(first[2], second[2])
        self.assertIn("training_steps", first[2])
        self.assertIn("Missing key(s) in state_dict", first[3])

    def test_a_step_is_reported(self):
        for plan, svg, step, micro_batches, actions in run(2, report, world=Native()):
            self.assertIn("breaks1", plan)
            self.assertEqual((svg, step, micro_batches), ("<svg", 0, 2))
            self.assertEqual(actions["worker1"], ["1F0", "1F1", "1B1", "1B0"])

    def test_a_pipeline_that_is_not_closed_does_not_hold_the_program(self):
        self.assertEqual(run(2, not_closed, world=Native()), [True, True])
        self.assertEqual(run(2, not_closed, world=Native(destroy=False)), [True, True])

    def test_a_fork_cannot_use_the_pipeline_and_the_parent_goes_on(self):
        for text, code, good in run(2, in_a_fork, world=Native()):
            self.assertIn("fork", text)
            self.assertEqual((code, good), (7, True))

    def test_closed_pipelines_leave_no_modules(self):
        self.assertEqual(run(2, many, world=Native()), [0, 0])


if __name__ == "__main__":
    unittest.main()
