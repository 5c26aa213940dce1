"""torchspan.optim, CheckpointManager and trace, against optimizers and modules of one process."""

import copy
import glob
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import torch
import torch.distributed as dist

from calls_test import Layer, at_rank_0, raised_by
from examples_test import COMMAND
from processes import Calls, Failed, Group, Native, free_port, run
from torchspan import CheckpointManager, autograd, optim, rpc, trace

# Of each kind: TorchSpan's name, the class of torch.optim, options.
KINDS = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adam", torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.95), "amsgrad": True}),
    ("adamw", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    ("adamax", torch.optim.Adamax, {}),
    ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.1}),
    ("adadelta", torch.optim.Adadelta, {"rho": 0.8}),
    ("rmsprop", torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    ("rprop", torch.optim.Rprop, {"etas": (0.4, 1.3), "step_sizes": (1e-5, 10)}),
]


def batch(step):
    return torch.full((2, 3), 0.1 * step + 0.2, dtype=torch.double)


class Remote:
    """Two layers on two workers, and what trains them from worker0."""

    def __init__(self):
        self.layers = [rpc.remote(f"worker{owner}", Layer, args=(owner,)) for owner in (1, 2)]
        self.references = [layer.rpc_sync().references() for layer in self.layers]

    def step(self, optimizer, number, max_norm=None, scale=1.0):
        """Returns the norm of the gradients, if it clips them."""
        with autograd.context() as context:
            loss = self.layers[1].rpc_sync().forward(self.layers[0].rpc_sync().forward(batch(number))).sum() * scale
            autograd.backward(context, [loss])
            norm = optimizer.clip_grad_norm(context, *max_norm) if max_norm else None
            optimizer.step(context)
        return norm

    def values(self):
        return [value for layer in self.layers for value in layer.rpc_sync().values()]


class Local:
    """The same in one process, with torch.optim."""

    def __init__(self):
        self.layers = [Layer(1), Layer(2)]
        self.parameters = [list(layer.parameters()) for layer in self.layers]

    def step(self, optimizer, number, max_norm=None, scale=1.0):
        optimizer.zero_grad()
        (self.layers[1](self.layers[0](batch(number))).sum() * scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(sum(self.parameters, []), *max_norm).item() if max_norm else None
        optimizer.step()
        return norm

    def values(self):
        return [value for layer in self.layers for value in layer.values()]


def same(ours, theirs):
    return all(torch.allclose(a, b, atol=1e-12, rtol=1e-12) for a, b in zip(ours, theirs, strict=True))


def all_in(references):
    return sum(references, [])


class Optimizers(unittest.TestCase):
    def check(self, body, size=3):
        result = run(size, at_rank_0(body), world=Native())[0]
        self.assertNotIsInstance(result, Failed, result)
        return result

    def test_optimizers_by_name_and_by_class_step_as_in_one_process(self):
        def body(size):
            wrong = []
            for name, kind, options in KINDS:
                local = Local()
                oracle = kind(all_in(local.parameters), **options)
                for chosen in (name, kind):
                    remote = Remote()
                    optimizer = optim.DistributedOptimizer(chosen, all_in(remote.references), **options)
                    for number in range(5):
                        remote.step(optimizer, number)
                        if chosen is name:
                            local.step(oracle, number)
                    if not same(remote.values(), local.values()):
                        wrong.append(str(chosen))
            return wrong

        self.assertEqual(self.check(body), [])

    def test_groups_and_schedules_of_torch_change_the_rates_on_the_owners(self):
        def body(size):
            wrong = []
            schedules = [
                lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
                lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
                lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=8, cycle_momentum=False),
                lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                    optimizer, [lambda step: 1 / (step + 1), lambda step: 0.9**step]
                ),
            ]
            for number, schedule in enumerate(schedules):
                for chosen in ("adamw", torch.optim.AdamW):
                    remote, local = Remote(), Local()

                    def grouped(parameters):
                        return [{"params": parameters[0], "lr": 0.02}, {"params": parameters[1], "weight_decay": 0.2}]

                    optimizer = optim.DistributedOptimizer(chosen, grouped(remote.references), lr=0.05)
                    oracle = torch.optim.AdamW(grouped(local.parameters), lr=0.05)
                    ours, theirs = schedule(optimizer), schedule(oracle)
                    for step in range(6):
                        remote.step(optimizer, step)
                        local.step(oracle, step)
                        ours.step()
                        theirs.step()
                    if ours.get_last_lr() != theirs.get_last_lr() or not same(remote.values(), local.values()):
                        wrong.append((number, chosen))
            optimizer.set_lr(0.0)
            before = remote.values()
            remote.step(optimizer, 6)
            return wrong, same(before, remote.values())

        self.assertEqual(self.check(body), ([], True))

    def test_the_norm_of_all_owners_clips_as_in_one_process(self):
        def body(size):
            wrong = []
            for chosen in ("sgd", torch.optim.SGD):
                for norm in ((0.01,), (100.0,), (0.01, 1.0), (0.01, 3.0), (0.01, math.inf)):
                    remote, local = Remote(), Local()
                    optimizer = optim.DistributedOptimizer(chosen, all_in(remote.references), lr=0.5, momentum=0.9)
                    oracle = torch.optim.SGD(all_in(local.parameters), lr=0.5, momentum=0.9)
                    for step in range(3):
                        ours = remote.step(optimizer, step, max_norm=norm)
                        theirs = local.step(oracle, step, max_norm=norm)
                        if not math.isclose(ours, theirs, rel_tol=1e-12):
                            wrong.append((chosen, norm, ours, theirs))
                    if not same(remote.values(), local.values()):
                        wrong.append((chosen, norm))
            zero = remote.step(optimizer, 1, max_norm=(1.0,), scale=0.0)
            unscaled = remote.values()
            local.step(oracle, 1, scale=0.0)
            bad = raised_by(lambda: optimizer.clip_grad_norm(1, 0.0))
            return wrong, zero, same(unscaled, local.values()), type(bad).__name__

        self.assertEqual(self.check(body), ([], 0.0, True, "ValueError"))

    def test_a_state_has_the_form_of_one_process_and_moves_between_owners_and_to_torch(self):
        def body(size):
            wrong = []
            for name, kind, options in KINDS:
                remote, local = Remote(), Local()
                optimizer = optim.DistributedOptimizer(name, all_in(remote.references), **options)
                oracle = kind(all_in(local.parameters), **options)
                for number in range(3):
                    remote.step(optimizer, number)
                    local.step(oracle, number)
                ours, theirs = optimizer.state_dict(), oracle.state_dict()
                for index, entries in theirs["state"].items():
                    for entry, value in entries.items():
                        if value is not None and not torch.allclose(ours["state"][index][entry], value, atol=1e-12):
                            wrong.append((name, index, entry))
                # In reverse: on the other owner, and by the class; and from torch to ours.
                swapped = [rpc.remote(f"worker{owner}", Layer, args=(1,)) for owner in (2, 1)]
                for source, target in zip(remote.layers, swapped):
                    target.rpc_sync().load_state_dict(source.rpc_sync().state_dict())
                for chosen, state in ((name, ours), (kind, ours), (name, theirs)):
                    moved = Remote()
                    moved.layers = [rpc.remote(layer.owner(), copied, args=(layer,)) for layer in swapped]
                    moved.references = [layer.rpc_sync().references() for layer in moved.layers]
                    other = optim.DistributedOptimizer(chosen, all_in(moved.references), **{**options, "lr": 0.7})
                    other.load_state_dict(state)
                    again = Local()
                    for to, source in zip(again.layers, local.layers):
                        to.load_state_dict(source.state_dict())
                    continued = kind(all_in(again.parameters), **options)
                    continued.load_state_dict(copy.deepcopy(theirs))  # it keeps the tensors that it gets
                    for number in range(3, 5):
                        moved.step(other, number)
                        again.step(continued, number)
                    if not same(moved.values(), again.values()):
                        wrong.append((name, chosen))
            return wrong

        self.assertEqual(self.check(body), [])

    def test_wrong_use_is_named(self):
        def body(size):
            remote = Remote()
            references = all_in(remote.references)
            optimizer = optim.DistributedOptimizer("adam", references, lr=0.1)
            remote.step(optimizer, 0)
            saved = optimizer.state_dict()["param_groups"][0]
            optimizer.param_groups[0]["weight_decay"] = 0.5
            return [
                str(raised_by(lambda: optim.DistributedOptimizer("adamz", references))),
                str(raised_by(lambda: optim.DistributedOptimizer("adam", references, beta=0.1))),
                str(raised_by(lambda: optim.DistributedOptimizer("adam", references, lr="high"))),
                str(raised_by(lambda: optim.DistributedOptimizer("adam", references, lr=-1.0))),
                str(raised_by(lambda: optim.DistributedOptimizer("sgd", references))),
                str(raised_by(lambda: optim.DistributedOptimizer("adam", []))),
                str(raised_by(lambda: remote.step(optimizer, 1))),
                str(raised_by(lambda: optimizer.add_param_group({"params": references}))),
                str(raised_by(lambda: optim.DistributedOptimizer("adam", references + references[:1]))),
                str(raised_by(lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}))),
                str(raised_by(lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{**saved, "weight_decay": 2.0}]}))),
            ]

        texts = self.check(body)
        parts = [
            "there is no optimizer 'adamz'",
            "Adam has no option 'beta'",
            "lr is 'high'; expected a number",
            "lr = -1",
            "needs a learning rate",
            "no parameters",
            "weight_decay of group 0",
            "all its groups",
            "list it once",
            "groups of [4]",
            "weight_decay 2.0 for group 0",
        ]
        for text, part in zip(texts, parts, strict=True):
            self.assertIn(part, text)


def copied(layer):
    """A copy of a layer of this worker."""
    made = Layer(1)
    made.load_state_dict(layer.local_value().state_dict())
    return made


class Training:
    """A small training of one process, with everything that a checkpoint may have."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(7, 4), torch.nn.Dropout(0.3), torch.nn.LayerNorm(4), torch.nn.Linear(4, 7, bias=False)
        )
        self.model[3].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=3),
                torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4]),
            ],
            milestones=[3],
        )
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.generator = torch.Generator().manual_seed(seed)
        self.average = torch.zeros(7, 4)
        self.progress, self.losses = {"seen": 0, (1, "key"): float("inf"), "kind": torch.float64}, []

    def manager(self, folder, **options):
        manager = CheckpointManager(folder, **options)
        for name, value in vars(self).items():
            manager.add(name, value)
        return manager

    def step(self):
        tokens = torch.randint(0, 7, (5,), generator=self.generator)
        loss = torch.nn.functional.cross_entropy(self.model(tokens), tokens)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.plateau.step(loss.item())
        self.average += self.model[0].weight.detach()
        self.progress["seen"] += len(tokens)
        self.losses.append(loss.item())


def read_safetensors(file):
    """Tensors by name, as the format's description says."""
    data = pathlib.Path(file).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    types = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
    return {
        name: torch.frombuffer(
            bytearray(data[8 + size :][slice(*entry["data_offsets"])]), dtype=types[entry["dtype"]]
        ).reshape(entry["shape"])
        for name, entry in json.loads(data[8 : 8 + size]).items()
        if name != "__metadata__"
    }


class Divided:
    """A training whose parameters are DTensors: rows that do not divide evenly, a part that is empty, a tied weight.

    layout: "rows" of fully_shard; "hybrid": copies on half of the ranks; "columns": fully_shard of tensor-parallel layers.
    """

    def __init__(self, size, layout, seed=1):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(seed)
        width = 8 if layout == "columns" else 7  # torch's tensor-parallel layers must be divided evenly
        layers = [torch.nn.Linear(*sizes) for sizes in ((3, width), (width, 2), (2, width), (width, 2))]
        self.model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:]).double()
        self.model[4].weight = self.model[2].weight
        if layout == "columns":
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
            self.model[4].weight = torch.nn.Parameter(self.model[2].weight.detach().clone())  # torch cannot tie these
            parallelize_module(self.model, mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = mesh["rows"]
        elif layout == "hybrid":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "rows"))
        else:
            mesh = init_device_mesh("cpu", (size,))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, number):
        """On the same batch on all ranks, so that their number does not matter."""
        self.model(batch(number)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def manager(self, folder):
        manager = CheckpointManager(folder)
        manager.add("model", self.model)
        manager.add("optimizer", self.optimizer)
        return manager

    def values(self):
        whole = [parameter.full_tensor() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            whole += [self.optimizer.state[parameter][entry].full_tensor() for entry in ("exp_avg", "exp_avg_sq")]
        return [value.detach() for value in whole]


class Checkpoints(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def results(self, size, body, world=None, *arguments):
        results = run(size, body, *arguments, world=world or Native())
        self.assertEqual([one for one in results if isinstance(one, Failed)], [])
        return results

    def test_a_restored_training_continues_as_if_it_had_not_ended(self):
        for asynchronous in (True, False):
            with self.subTest(asynchronous=asynchronous):
                folder = f"{self.folder}/{asynchronous}"
                whole = Training()
                with whole.manager(folder, asynchronous=asynchronous) as manager:
                    self.assertEqual(manager.restore_or(0), 0)
                    for number in range(8):
                        whole.step()
                        if number < 4:
                            manager.save(number + 1)
                resumed = Training(seed=2)
                with resumed.manager(folder) as manager:
                    self.assertEqual(manager.restore(), 4)
                for _ in range(4):
                    resumed.step()
                self.assertEqual(resumed.losses, whole.losses)
                self.assertEqual(resumed.progress, whole.progress)
                self.assertTrue(torch.equal(resumed.average, whole.average))
                self.assertEqual(resumed.plateau.state_dict(), whole.plateau.state_dict())

    def test_the_best_and_the_newest_remain_and_safetensors_reads_them(self):
        training = Training()
        with training.manager(self.folder, keep_last=2, keep_best=1) as manager:
            for number, metric in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
                training.step()
                manager.save(number, metric=metric)
        steps = sorted(glob.glob(f"{self.folder}/step-*"))
        self.assertEqual([int(step[-8:]) for step in steps], [1, 3, 4])
        tensors = read_safetensors(glob.glob(f"{steps[-1]}/*.safetensors")[0])
        self.assertTrue(torch.equal(tensors["model.0.weight"], training.model[0].weight))
        self.assertNotIn("model.3.weight", tensors)  # the same tensor
        self.assertTrue(torch.equal(tensors["optimizer.state.0.exp_avg"], training.optimizer.state_dict()["state"][0]["exp_avg"]))

    def test_ranks_save_together_and_other_numbers_of_ranks_restore(self):
        folder = self.folder

        def save(rank, size):
            training = Training()
            own = {"rank": rank}
            with training.manager(folder) as manager:
                if rank == 1:
                    manager.add("table", torch.full((3,), 7.0))
                manager.add_per_rank("own", own)
                for number in range(3):
                    training.step()
                    manager.save(number + 1)
            return training.losses

        def restore(rank, size):
            training, own, table = Training(seed=2), {}, torch.zeros(3)
            with training.manager(folder) as manager:
                manager.add("table", table)
                if size == 2:
                    manager.add_per_rank("own", own)
                step = manager.restore()
            return step, training.losses, own, table.tolist()

        for world in (Native, lambda: Group("torchspan"), lambda: Group("gloo")):
            shutil.rmtree(folder)
            losses = self.results(2, save, world())[0]
            self.assertEqual(self.results(2, restore, world()), [(3, losses, {"rank": rank}, [7.0] * 3) for rank in range(2)])
            self.assertEqual(self.results(3, restore, world()), [(3, losses, {}, [7.0] * 3)] * 3)
            self.assertEqual(restore(0, 1), (3, losses, {}, [7.0] * 3))

    def test_parts_of_dtensors_are_saved_and_restored_by_any_number_of_ranks(self):
        folder = self.folder

        def save(rank, size, layout):
            training = Divided(size, layout)
            with training.manager(folder) as manager:
                for number in range(3):
                    training.step(number)
                manager.save(3)
            saved = training.values()
            training.step(3)
            return saved, training.values()

        def restore(rank, size, layout):
            training = Divided(size, layout, seed=2)
            with training.manager(folder) as manager:
                step = manager.restore()
            restored = training.values()
            training.step(step)
            placements = {str(parameter.placements) for parameter in training.model.parameters()}
            divided = {str(state["exp_avg"].placements) for state in training.optimizer.state.values()}
            return step, restored, training.values(), placements == divided

        for saver, sizes, layouts in (
            ("rows", (3, 2, 5), ("rows",)),
            ("hybrid", (4,), ("rows", "hybrid")),
            ("columns", (4,), ("columns",)),
        ):
            with self.subTest(saver):
                shutil.rmtree(folder, ignore_errors=True)
                saved, continued = self.results(sizes[0], save, Group("torchspan"), saver)[0]
                (file,) = glob.glob(f"{folder}/step-*/*-00001-of-*.safetensors") + glob.glob(f"{folder}/step-*/model.safetensors")
                self.assertTrue(read_safetensors(file))
                for size, layout in itertools.product(sizes, layouts):
                    for step, restored, values, alike in self.results(size, restore, Group("torchspan"), layout):
                        self.assertEqual((step, alike), (3, True))
                        for expected, got in zip(saved, restored, strict=True):
                            self.assertTrue(torch.equal(expected, got))
                        for expected, got in zip(continued, values, strict=True):
                            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    def test_a_dtensor_without_a_place_is_refused(self):
        folder = self.folder

        def body(rank, size):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor, Partial, Shard
            from torch.distributed.tensor.placement_types import _StridedShard

            mesh = init_device_mesh("cpu", (size,))
            ranges = DTensor.from_local(torch.ones(4), mesh, [_StridedShard(0, split_factor=2)])
            sums = DTensor.from_local(torch.ones(3), mesh, [Partial()])
            rows = DTensor.from_local(torch.full((2, 2), 1.0 * rank), mesh, [Shard(0)])
            errors = []
            for value in (sums, {"rows": rows}, ranges):
                with CheckpointManager(folder) as manager:
                    manager.add("value", value)
                    errors.append(str(raised_by(lambda: manager.save(1))))
            with CheckpointManager(folder) as manager:
                manager.add("rows", rows)
                manager.save(2)
            other = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)])
            with CheckpointManager(folder) as manager:
                manager.add("rows", other)
                manager.restore()
            return errors, other.full_tensor()[:, 0].tolist()

        for errors, rows in self.results(2, body, Group("torchspan")):
            self.assertIn("partial sums", errors[0])
            self.assertIn("rows is a DTensor", errors[1])
            self.assertIn("more than one range", errors[2])
            self.assertEqual(rows, [0, 0, 1, 1])

    def test_an_exception_in_the_block_of_a_manager_does_not_wait_for_other_ranks(self):
        folder = self.folder

        def body(rank, size):
            began = time.monotonic()
            try:
                with CheckpointManager(folder) as manager:
                    manager.add("x", {"a": 1})
                    if rank == 1:
                        raise LookupError("on one rank")
                    torch.distributed.recv(torch.zeros(1), 1)
            except LookupError:
                return time.monotonic() - began
            except Exception:
                return 0.0

        self.assertLess(self.results(2, body, Group("torchspan", destroy=False))[1], 10)

    def test_ranks_with_different_values_all_learn_it(self):
        folder = self.folder

        def body(rank, size):
            with CheckpointManager(folder) as manager:
                manager.add("progress", {"seen": rank})
                return str(raised_by(lambda: manager.save(1)))

        for text in self.results(2, body):
            self.assertIn("progress", text)
        self.assertEqual(glob.glob(f"{folder}/step-*"), [])

    def test_remote_layers_and_their_optimizer_restore_on_other_workers(self):
        folder = self.folder

        def train(remote, optimizer, steps):
            for number in steps:
                remote.step(optimizer, number)
            return remote.values()

        def manager_of(remote, optimizer):
            manager = CheckpointManager(folder, participants=["worker0"])
            manager.add("first", remote.layers[0])
            manager.add("second", remote.layers[1])
            manager.add("optimizer", optimizer)
            return manager

        def save(size):
            remote = Remote()
            optimizer = optim.DistributedOptimizer("adam", all_in(remote.references), lr=0.05)
            train(remote, optimizer, range(3))
            with manager_of(remote, optimizer) as manager:
                manager.save(3)
            return train(remote, optimizer, range(3, 6))

        def restore(size):
            remote = Remote()
            remote.layers = [rpc.remote(f"worker{size - 1}", Layer, args=(9 + place,)) for place in range(2)]
            remote.references = [layer.rpc_sync().references() for layer in remote.layers]
            optimizer = optim.DistributedOptimizer("adam", all_in(remote.references), lr=0.5)
            with manager_of(remote, optimizer) as manager:
                step = manager.restore()
            return step, train(remote, optimizer, range(3, 6))

        whole = self.results(3, at_rank_0(save))[0]
        for size in (4, 3):
            step, resumed = self.results(size, at_rank_0(restore))[0]
            self.assertEqual(step, 3)
            self.assertTrue(same(resumed, whole))

    def test_a_kill_in_the_middle_of_a_save_leaves_the_last_checkpoint(self):
        large = torch.zeros(1 << 22, dtype=torch.double)
        for wait_for in ("*.partial*", "*.partial*/*.safetensors*"):
            child = os.fork()
            if child == 0:
                try:
                    manager = CheckpointManager(self.folder, keep_last=1)
                    manager.add("large", large)
                    first = manager.restore_or(0)
                    for number in range(first, 1 << 20):
                        large.fill_(number)
                        manager.save(number)
                finally:
                    os._exit(1)
            saved = 0
            while saved < 3:  # then in the middle of a later one
                steps = glob.glob(f"{self.folder}/step-????????")
                saved = max([saved, *(int(step[-8:]) for step in steps)])
                self.assertEqual(os.waitpid(child, os.WNOHANG)[0], 0)
                time.sleep(0.001)
            while not glob.glob(f"{self.folder}/{wait_for}"):
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            manager = CheckpointManager(self.folder)
            manager.add("large", large.fill_(-1))
            step = manager.restore()
            self.assertGreaterEqual(step, saved)
            self.assertEqual(large.unique().tolist(), [float(step)])
            manager.close()

    def test_what_does_not_fit_is_named(self):
        with Training().manager(self.folder) as manager:
            manager.save(1)

        def restored(**objects):
            manager = CheckpointManager(self.folder)
            for name, value in objects.items():
                manager.add(name, value)
            return str(raised_by(manager.restore))

        wider = Training().model
        wider[2] = torch.nn.LayerNorm(5)
        for text, parts in (
            (restored(model=torch.nn.Linear(4, 7)), ["'model'", "has no 'bias', 'weight'", "has no '0.weight', '2.bias'"]),
            (restored(model=wider), ["model.2.weight", "[4]", "[5]"]),
            (restored(average=torch.zeros(2)), ["average", "[7, 4]"]),
            (restored(losses={}), ["'losses'", "has a list, and the program a dict"]),
            (restored(missing={}), ["missing"]),
            (str(raised_by(lambda: CheckpointManager(self.folder).add("x", 7))), ["'x', a int", "dict or list"]),
            (str(raised_by(lambda: CheckpointManager(self.folder, keep_last=0))), ["keep_last is 0"]),
        ):
            for part in parts:
                self.assertIn(part, text)


class Traces(unittest.TestCase):
    def test_spans_and_scalars_are_in_the_trace_and_in_the_report(self):
        def body(rank, size):
            for number in range(1, 6):
                with trace.span("step", number), trace.span("augment"):
                    trace.log_scalar("loss", 1.0 / number, number)
            return True

        for world in (Native, Group):
            with self.subTest(world=world), tempfile.TemporaryDirectory() as folder:
                results = run(2, body, world=world(), environment=lambda rank: {"TORCHSPAN_TRACE": folder})
                self.assertEqual(results, [True, True])
                for file in pathlib.Path(folder).iterdir():
                    data = file.read_bytes()
                    self.assertTrue(b"augment" in data and b"loss" in data, file)
                if COMMAND:
                    subprocess.run([COMMAND, "report", folder, "-o", f"{folder}/run.html"], check=True, capture_output=True)
                    page = pathlib.Path(f"{folder}/run.html").read_text()
                    self.assertTrue("augment" in page and "loss" in page)

    def test_calls_of_both_kinds_of_workers_are_in_the_trace_beside_a_group(self):
        def torch_calls(rank, size):
            from torch.distributed import rpc as torch_rpc

            with trace.span("part of the program"):
                torch_rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1))
            return True

        def our_calls(rank, size):
            rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1))
            with trace.span("part of the program"):
                dist.barrier()
            return True

        class NativeAndGroup(Native):
            def begin(self):
                super().begin()
                dist.init_process_group("torchspan", init_method=f"file://{self.store}.group", rank=self.rank, world_size=self.size)

            def end(self):
                dist.destroy_process_group()
                super().end()

        for world, body, name in ((Calls, torch_calls, b"SCRIPT_CALL"), (NativeAndGroup, our_calls, b"aten::add")):
            with self.subTest(world=world), tempfile.TemporaryDirectory() as folder:
                environment = {"TORCHSPAN_TRACE": folder, "TORCHSPAN_METRICS_PORT": str(free_port())}
                results = run(2, body, world=world(), environment=lambda rank: {**environment, "LOCAL_RANK": str(rank)})
                self.assertEqual(results, [True, True])
                files = [file.read_bytes() for file in pathlib.Path(folder).iterdir()]
                self.assertEqual(len(files), 4 if world is NativeAndGroup else 2)
                self.assertEqual(len([data for data in files if name in data and b"part of the program" in data]), 2)
                if COMMAND:
                    subprocess.run([COMMAND, "trace", folder, "-o", f"{folder}/run.json"], check=True, capture_output=True)
                    events = json.loads(pathlib.Path(f"{folder}/run.json").read_text())["traceEvents"]
                    self.assertIn("s", {event["ph"] for event in events})  # an arrow from a call to its handler begins

    def test_without_a_worker_nothing_is_recorded(self):
        with trace.span("step"):
            trace.log_scalar("loss", 1.0)


if __name__ == "__main__":
    unittest.main()
