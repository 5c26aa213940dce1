"""What ranks see when others die, stop, differ, or have another secret; and what processes may do around a world."""

import atexit
import gc
import os
import pathlib
import signal
import tempfile
import threading
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

import processes
import torchspan


class Disagreeing(processes.Group):
    """A world of which each rank has its own opinion of the size."""

    def __init__(self, sizes, timeout=20):
        super().__init__(timeout=timeout)
        self.sizes = sizes

    def begin(self):
        self.size = self.sizes[self.rank]
        os.environ["REFUSED"] = self.store + ".refused"
        try:
            super().begin()
        finally:
            if self.rank >= self.sizes[0]:
                pathlib.Path(os.environ["REFUSED"]).touch()


def until_one_is_refused(rank, size):
    while not os.path.exists(os.environ["REFUSED"]):
        time.sleep(0.01)
    return True


def killed(rank, size):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.001)
    except torchspan.errors.DisconnectedError as error:
        return str(error), time.monotonic() - started
    return "nothing was raised", 0


def stopped(rank, size):
    """Rank 1 is stopped by a signal; rank 0 continues it later."""
    pids = torch.zeros(size, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", 0
    started = time.monotonic()
    try:
        text = raised_by(lambda: dist.all_reduce(torch.ones(2)))
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)
    return text, time.monotonic() - started


def late(rank, size):
    if rank == 1:
        time.sleep(3)
        return "", 0
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(2))
    except torchspan.errors.TimedOutError as error:
        return str(error), time.monotonic() - started
    return "nothing was raised", 0


def raised_by(call):
    try:
        call()
    except Exception as error:
        assert isinstance(error, dist.DistBackendError) == isinstance(error, torchspan.errors.Error)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def different_shapes(rank, size):
    return raised_by(lambda: dist.all_reduce(torch.ones(2 + rank)))


def wrong_arguments(rank, size):
    texts = [
        raised_by(lambda: dist.all_gather([torch.empty(2)] * (size - 1), torch.ones(2))),
        raised_by(lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(7))),
        raised_by(lambda: dist.all_to_all_single(torch.empty(2 * size + 1), torch.ones(2 * size + 1))),
        raised_by(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG)),
        raised_by(lambda: dist.all_reduce(torch.ones(2).expand(3, 2))),
    ]
    good = torch.ones(2)
    dist.all_reduce(good)  # none of these breaks the group
    return texts, good


def on_other_devices(rank, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    elsewhere, here = torch.ones(size, device="meta"), torch.ones(size)
    texts = [
        raised_by(lambda: backend.allreduce([elsewhere])),
        raised_by(lambda: backend.broadcast(elsewhere, 0)),
        raised_by(lambda: backend.allgather([[here] * size], [elsewhere])),
        raised_by(lambda: backend._allgather_base(elsewhere, torch.ones(1))),
        raised_by(lambda: backend._reduce_scatter_base(torch.ones(1, device="meta"), here)),
        raised_by(lambda: backend.alltoall_base(here, elsewhere, [], [])),
        raised_by(lambda: backend.send([elsewhere], 1 - rank, 0)),
        raised_by(lambda: backend.recv([elsewhere], 1 - rank, 0)),
    ]
    dist.all_reduce(here)  # none of these breaks the group
    return texts, here


def after_destroy(rank, size):
    """Calls of groups that the program still knows."""
    world, part = dist.group.WORLD, dist.new_group()
    backend = part._get_backend(torch.device("cpu"))
    pending = dist.all_reduce(torch.ones(1), group=part, async_op=True)
    dist.destroy_process_group(part)
    pending.wait()
    calls = [lambda: part.allreduce([torch.ones(1)]), lambda: part.barrier(), lambda: part.send([torch.ones(1)], 1 - rank, 0)]
    texts = [raised_by(call) for call in calls]
    good = torch.ones(1)
    dist.all_reduce(good)
    dist.destroy_process_group()
    calls = [lambda: world.allreduce([torch.ones(1)]).wait(), lambda: backend.barrier(), lambda: dist.all_reduce(torch.ones(1))]
    return texts, good.item(), [raised_by(call) for call in calls]


def resources():
    """What groups could leave behind: descriptors, threads, mappings, and kilobytes."""
    memory = next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(list(open("/proc/self/maps"))), int(memory)]


def many_groups(rank, size, count):
    found = []
    for number in range(count):
        group = dist.new_group(list(range(size)))
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        if number in (count // 4, count - 1):
            dist.barrier()
            found.append(resources())
    return found


def two_worlds(rank, size):
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    dist.init_process_group(
        "torchspan", init_method="file://" + os.environ["SECOND_STORE"], rank=rank, world_size=size
    )
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def two_worlds_at_one_store(rank, size):
    store = dist.FileStore(os.environ["SECOND_STORE"], size)
    values = []
    for round in range(3):
        dist.init_process_group("torchspan", store=dist.PrefixStore("same", store), rank=rank, world_size=size)
        value = torch.ones(1)
        dist.all_reduce(value)
        values.append(value.item())
        dist.destroy_process_group()
    return values


def outputs_of_lists(rank, size):
    """Autograd notices that an output changed which it had saved."""
    texts = []
    for write in (
        lambda out, x: dist.all_gather([out, torch.zeros(2)], x),
        lambda out, x: dist.all_to_all_single(out, x),
    ):
        w, out = torch.ones(2, requires_grad=True), torch.zeros(2)
        y = (w * out).sum()
        write(out, torch.ones(2))
        texts.append(raised_by(y.backward))
    return texts


def with_data_loader(rank, size):
    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    total = torch.zeros(1)
    for _ in range(3):
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
            part = batch.sum()
            dist.all_reduce(part)
            total += part
    return total.item()


def forked(rank, size, way):
    """A child of a rank that uses the group, ends as `way` says, and changes nothing for the others."""
    value = torch.ones(1)
    dist.all_reduce(value)
    child = os.fork()
    if child == 0:
        text = raised_by(lambda: dist.all_reduce(torch.ones(1)))
        good = "is a fork of" in text
        if way == "destroy":
            raised_by(dist.destroy_process_group)
        if way == "end":
            atexit._run_exitfuncs()
        os._exit(0 if good else 1)
    status = os.waitpid(child, 0)[1]
    if rank == 0:
        time.sleep(0.5)  # rank 1 waits for this rank, and looks whether it has left
    for _ in range(20):
        dist.all_reduce(value)
    return status, value.item()


def forked_meanwhile(rank, size, forks):
    """Children of a rank whose threads are in calls, and their copies of an operation that was pending."""
    group, ended = dist.new_group(), threading.Event()
    backend = group._get_backend(torch.device("cpu"))

    def call():
        flag = torch.zeros(1)
        while flag.item() < size:  # until all ranks have made their forks
            flag.fill_(float(ended.is_set()))
            dist.all_reduce(flag, group=group)

    caller = threading.Thread(target=call)
    caller.start()
    statuses = []
    for _ in range(forks):
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        child = os.fork()
        if child == 0:
            # Not dist.all_reduce(): a thread of the parent may have held the mutex of torch's flight recorder.
            texts = [raised_by(lambda: backend.allreduce(torch.ones(1)))]
            texts += [] if pending.is_completed() else [raised_by(pending.wait)]
            pending = None
            os._exit(0 if all("is a fork of" in text for text in texts) else 1)
        statuses.append(os.waitpid(child, 0)[1])
        pending.wait()
    ended.set()
    caller.join()
    return statuses


def pending_work(rank, size):
    return dist.all_reduce(torch.ones(10), async_op=True) is not None


def nothing_but_exit(rank, size):
    dist.all_reduce(torch.ones(1))
    return True


def end_of_a_program(rank, size):
    """What rank 0 sees when rank 1 ends without destroy_process_group()."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        atexit._run_exitfuncs()
        os._exit(0)

    def call_until_it_fails():
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.001)

    return raised_by(call_until_it_fails)


def allocated(rank, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    tensor.fill_(rank + 1)
    dist.all_reduce(tensor)
    return tensor.sum().item()


def reduced_into(rank, size):
    """Whether reduce_scatter_tensor() writes to views with gaps, to part of its input, and in the group's memory."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    equal = []
    for count in (1, 1000, 200000):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            wholes = [(torch.arange(size * count) % 100 + r).to(dtype) for r in range(size)]
            wanted = sum(whole.long() for whole in wholes)[rank * count : (rank + 1) * count].to(dtype)
            shared = backend.allocate_tensor(size * count, dtype=dtype, device=torch.device("cpu"))
            for whole in (wholes[rank].clone(), shared.copy_(wholes[rank])):
                gaps = torch.zeros(count, 2, dtype=dtype)[:, 0]
                dist.reduce_scatter_tensor(gaps, whole)
                inside = whole[rank * count : (rank + 1) * count]
                dist.reduce_scatter_tensor(inside, whole)
                equal += [torch.equal(gaps, wanted), torch.equal(inside, wanted)]
    return equal


def dropped(rank, size):
    outputs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outputs, torch.full((3,), float(rank)), async_op=True)  # nobody waits
    dist.barrier()
    end = time.monotonic() + 10
    while time.monotonic() < end and outputs[size - 1][0] != size - 1:
        time.sleep(0.01)
    return torch.stack(outputs)


def futures(rank, size):
    work = dist.all_reduce(torch.full((4,), float(rank)), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return doubled.wait()


def monitored(rank, size):
    others = dist.new_group([0, 1])
    if rank == 2:
        time.sleep(1)
        return ""
    text = raised_by(lambda: dist.monitored_barrier(timeout=timedelta(milliseconds=300)))
    dist.barrier(group=others)  # rank 0 serves the store of the others
    return text


def aborted(rank, size):
    group = dist.new_group()
    if rank == 0:
        time.sleep(0.2)
        group._get_backend(torch.device("cpu")).abort()
        return raised_by(lambda: dist.all_reduce(torch.ones(1), group=group))
    return raised_by(lambda: dist.all_reduce(torch.ones(1), group=group))


def sizes_that_do_not_fit(rank, size):
    """Texts of what each rank raised where another one sent another size, and that the group goes on."""
    own = torch.full((3 if rank == 0 else 1,), float(rank))
    texts = [raised_by(lambda: dist.all_gather([torch.zeros(3), torch.zeros(3)], own))]
    rows, output = torch.ones(2, 2), torch.zeros(4 if rank == 0 else 2, 2)
    splits = ([1, 1], [1, 3]) if rank == 0 else ([1, 1], [1, 1])
    texts.append(raised_by(lambda: dist.all_to_all_single(output, rows, splits[1], splits[0])))
    parts = [torch.ones(1), torch.ones(2)]
    texts.append(raised_by(lambda: dist.reduce_scatter(torch.zeros(3), parts)))
    total = torch.ones(1)
    dist.all_reduce(total)
    return texts, total.item()


def premultiplied(rank, size):
    operation = dist._make_nccl_premul_sum(0.25)
    output, whole = torch.zeros(2), torch.ones(4)
    return [
        raised_by(call)
        for call in (
            lambda: dist.all_reduce(whole, op=operation),
            lambda: dist.reduce(whole, 0, op=operation),
            lambda: dist.reduce_scatter_tensor(output, whole, op=operation),
            lambda: dist.reduce_scatter(output, [output, output], op=operation),
        )
    ]


def other_shapes(rank, size):
    """Messages match by elements, as over Gloo."""
    received = torch.zeros(2, 4)[:, :2]
    if rank == 1:
        dist.send(torch.arange(4.0), 0)
        dist.send(torch.arange(4.0).reshape(2, 2).t(), 0)
        return [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    first = torch.zeros(2, 2)
    dist.recv(first, 1)
    dist.recv(received)
    return first.tolist(), received.tolist()


def many_callbacks(rank, size):
    """More callbacks that wait than a pool may have threads."""
    hold = threading.Event()
    if rank == 1:
        time.sleep(1)  # the callbacks of rank 0 are there before its operations complete
        for _ in range(301):
            dist.all_reduce(torch.ones(1))
        return True
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(300)]
    futures = [work.get_future().then(lambda _: hold.wait(30)) for work in works]
    dist.all_reduce(torch.ones(1))
    time.sleep(0.5)
    hold.set()
    return all(future.wait() for future in futures)


def last_reference(rank, size):
    """A callback drops the last reference to the process group, on the thread that runs callbacks."""
    group = dist.group.WORLD
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda _, keep=group: time.sleep(0.5))
    work.wait()
    del group, work
    dist.destroy_process_group()
    gc.collect()
    time.sleep(1)
    return True


def completed_futures(rank, size):
    values = []
    for early in (True, False) * 25:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        future = work.get_future() if early else None
        work.wait()
        future = future or work.get_future()
        values.append(future.value()[0].item())
    return set(values)


class Failures(unittest.TestCase):
    def test_sizes_that_do_not_fit_are_refused_and_name_the_rank(self):
        (first, total), (second, other) = processes.run(2, sizes_that_do_not_fit)
        self.assertEqual((total, other), (2.0, 2.0))
        for text, wanted in zip(first, (r"rank 1 sent .*\[1\].*\[3\]", r"rank 1 sent .*\[1, 2\].*\[3, 2\]", "output has 3 elements")):
            self.assertRegex(text, wanted)
        self.assertRegex(second[0], "rank 1 sent")

    def test_a_premultiplied_sum_is_refused(self):
        for texts in processes.run(2, premultiplied):
            for text in texts:
                self.assertRegex(text, "PREMUL_SUM is NCCL's")

    def test_messages_match_by_elements(self):
        first, second = processes.run(2, other_shapes)
        self.assertEqual(first, second)

    def test_more_callbacks_may_wait_than_there_are_threads(self):
        self.assertEqual(processes.run(2, many_callbacks), [True, True])

    def test_a_callback_may_drop_the_last_reference_to_its_group(self):
        self.assertEqual(processes.run(2, last_reference, world=processes.Group(destroy=False)), [True, True])

    def test_a_future_is_complete_after_its_wait(self):
        self.assertEqual(processes.run(2, completed_futures), [{2.0}] * 2)

    def test_a_killed_rank_is_named_on_all_others_within_a_second(self):
        for results in [processes.run(3, killed, world=processes.Group(destroy=False))]:
            for rank in (0, 2):
                text, seconds = results[rank]
                self.assertRegex(text, r"worker1 \(rank 1, pid \d+")
                self.assertLess(seconds, 2)

    def test_a_stopped_rank_is_named(self):
        text, seconds = processes.run(2, stopped, world=processes.Group(timeout=2, destroy=False))[0]
        self.assertRegex(text, r"TimedOutError: torchspan: .*worker1 \(rank 1")
        self.assertLess(seconds, 10)

    def test_a_late_rank_is_named_after_the_timeout(self):
        text, seconds = processes.run(2, late, world=processes.Group(timeout=1, destroy=False))[0]
        self.assertRegex(text, r"timed out.*all_reduce\(Float \[2\], sum\).*worker1 \(rank 1")
        self.assertGreater(seconds, 0.5)

    def test_different_shapes_fail_on_all_ranks(self):
        for text in processes.run(3, different_shapes, world=processes.Group(destroy=False)):
            self.assertRegex(text, r"InvalidError: torchspan: invalid.*all_reduce\(Float \[2\].*all_reduce\(Float \[3\]")

    def test_wrong_arguments_are_refused_and_break_nothing(self):
        for result in processes.run(3, wrong_arguments):
            texts, good = result
            for text, expected in zip(
                texts, ["2 outputs", "expected 3 times", "split sizes|divide", "average|kAvg|floating", "share memory"]
            ):
                self.assertRegex(text, expected)
                self.assertNotIn("nothing was raised", text)
            self.assertEqual(good.tolist(), [3, 3])

    def test_another_secret_is_denied_on_both_sides(self):
        folder = tempfile.mkdtemp()
        for rank in range(2):
            path = f"{folder}/{rank}"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(bytes([rank + 1]) * 32)
        results = processes.run(
            2, nothing_but_exit, world=processes.Group(timeout=5), environment=lambda rank: {"TORCHSPAN_SECRET_FILE": f"{folder}/{rank}"}
        )
        self.assertRegex(results[1].text, "denied|secret")
        self.assertEqual(results[1].type_name, "DeniedError")
        self.assertIsInstance(results[0], processes.Failed)

    def test_ranks_with_different_world_sizes_are_named_at_once(self):
        for result in processes.run(2, nothing_but_exit, world=Disagreeing([3, 2])):
            self.assertEqual(result.type_name, "InvalidError")
            self.assertRegex(result.text, "rank 0 has world_size 3, and rank 1 has 2: give all ranks the same")
            self.assertLess(result.seconds, 10)

    def test_a_rank_beyond_the_world_is_refused_and_the_others_go_on(self):
        results = processes.run(3, until_one_is_refused, world=Disagreeing([2, 2, 3]))
        self.assertEqual(results[:2], [True, True])
        self.assertEqual(results[2].type_name, "InvalidError")
        self.assertRegex(results[2].text, "rank 2 has world_size 3, and rank 0 has 2: give all ranks the same")

    def test_ranks_that_do_not_join_are_named(self):
        for result in processes.run(2, nothing_but_exit, world=Disagreeing([4, 4], timeout=2)):
            self.assertEqual(result.type_name, "TimedOutError")
            self.assertRegex(result.text, "ranks 2, 3 of a world of 4 did not join in time: start them, or give")

    def test_tensors_on_other_devices_are_refused_and_break_nothing(self):
        for texts, good in processes.run(2, on_other_devices):
            for text in texts:
                self.assertRegex(text, r"UnsupportedError: .*takes tensors on CPUs, and one is on meta: pass its cpu\(\), or")
            self.assertEqual(good.tolist(), [2, 2])

    def test_calls_of_destroyed_groups_are_refused(self):
        for texts, good, later in processes.run(2, after_destroy, world=processes.Group(destroy=False)):
            for text in texts:
                self.assertRegex(text, r"CancelledError: .*destroy_process_group\(\) has ended .*: make another one with new_group\(\)")
            self.assertEqual(good, 2)
            self.assertRegex(later[0], r"CancelledError: .*make another one with init_process_group\(\)")
            self.assertRegex(later[1], r"CancelledError: .*make another one with new_group\(\)")
            self.assertRegex(later[2], "has not been initialized, please make sure to call init_process_group")

    def test_a_thousand_groups_leave_nothing(self):
        for before, after in processes.run(2, many_groups, 1000):
            self.assertEqual(before[:2], after[:2])
            self.assertLess(after[2] - before[2], 50)  # allocators make some
            self.assertLess(after[3] - before[3], 4 << 10)

    def test_a_process_can_be_part_of_one_world_after_another(self):
        path = tempfile.mkdtemp() + "/store"
        self.assertEqual(processes.run(2, two_worlds, environment=lambda rank: {"SECOND_STORE": path}), [2, 2])

    def test_worlds_may_follow_each_other_at_one_store(self):
        path = tempfile.mkdtemp() + "/store"
        world = processes.Group(destroy=False)
        world.begin = lambda: None
        self.assertEqual(
            processes.run(2, two_worlds_at_one_store, world=world, environment=lambda rank: {"SECOND_STORE": path}), [[2, 2, 2]] * 2
        )

    def test_outputs_that_autograd_saved_are_noticed(self):
        for texts in processes.run(2, outputs_of_lists):
            for text in texts:
                self.assertRegex(text, "modified by an inplace operation")

    def test_data_loaders_may_fork_workers_meanwhile(self):
        self.assertEqual(processes.run(2, with_data_loader), [2 * 3 * 496.0] * 2)

    def test_a_forked_child_leaves_its_parent_alone(self):
        for way in ("exit", "end", "destroy"):
            with self.subTest(way=way):
                self.assertEqual(processes.run(2, forked, way), [(0, 2.0**21)] * 2)

    def test_a_process_may_fork_while_its_threads_call(self):
        self.assertEqual(processes.run(2, forked_meanwhile, 50), [[0] * 50] * 2)

    def test_pending_work_does_not_keep_a_process(self):
        self.assertEqual(processes.run(2, pending_work, world=processes.Group(destroy=False)), [True, True])

    def test_a_program_may_end_without_destroying_its_group(self):
        self.assertEqual(processes.run(3, nothing_but_exit, world=processes.Group(destroy=False)), [True] * 3)

    def test_a_program_that_ends_leaves_its_world(self):
        text = processes.run(2, end_of_a_program, world=processes.Group(destroy=False))[0]
        self.assertRegex(text, r"worker1 \(rank 1.* left")

    def test_tensors_of_the_group(self):
        self.assertEqual(processes.run(2, allocated), [3000.0, 3000.0])

    def test_reduce_scatter_writes_to_any_output(self):
        self.assertEqual(processes.run(3, reduced_into), [[True] * 36] * 3)

    def test_an_operation_that_nobody_waits_for_writes_its_results(self):
        for result in processes.run(3, dropped):
            self.assertEqual(result[:, 0].tolist(), [0, 1, 2])

    def test_futures_complete_without_a_waiter(self):
        for result in processes.run(2, futures):
            self.assertEqual(result.tolist(), [2.0] * 4)

    def test_a_monitored_barrier_names_the_late_rank_and_breaks_nothing(self):
        results = processes.run(3, monitored, world=processes.Group(destroy=False))
        if "only implemented for GLOO" in results[0]:
            self.skipTest("this torch has it for Gloo alone")
        for rank in (0, 1):
            self.assertRegex(results[rank], "Rank 2 failed")

    def test_abort_ends_the_operations_of_all_ranks(self):
        for text in processes.run(2, aborted):
            self.assertRegex(text, r"rank 0 called abort\(\)")


if __name__ == "__main__":
    unittest.main()
