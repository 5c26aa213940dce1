"""torch.distributed.rpc over TorchSpan: deaths, time-outs, secrets, forks, ends, and worlds that workers join and leave."""

import atexit
import ctypes
import gc
import logging
import os
import pathlib
import pickle
import signal
import socket
import tempfile
import threading
import time
import unittest

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

import processes
import torchspan
from processes import Calls


# Its first message takes the seconds of importing torch._dynamo.
logging.getLogger("torch.distributed.rpc.api").disabled = True


def raised_by(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def seconds_and_error(future):
    started = time.monotonic()
    return raised_by(future.wait), time.monotonic() - started


def identity(value):
    return value


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def sleep_and_return(seconds, value):
    time.sleep(seconds)
    return value


def end_by_signal(number):
    os.kill(os.getpid(), number)


def pid():
    return os.getpid()


def wait_for(path):
    end = time.monotonic() + 20
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.01)


def tensors_of_all_kinds(rank, size):
    whole = torch.arange(24.0).reshape(4, 6)
    sent = [
        whole,
        whole.t(),
        whole[1:3, ::2],
        whole[0].expand(3, 6),
        torch.zeros(0, 5),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 3)),
        torch.ones(2, requires_grad=True),
        torch.ones(1 << 21),
    ]
    came = rpc.rpc_sync(f"worker{1 - rank}", identity, args=(sent,))
    itself = rpc.rpc_sync(f"worker{rank}", identity, args=(sent,))
    for received in (came, itself):
        for before, after in zip(sent, received, strict=True):
            assert before.dtype == after.dtype and before.shape == after.shape
            assert before.requires_grad == after.requires_grad
            assert torch.equal(before.to_dense(), after.to_dense())
    itself[0].zero_()
    return whole.sum().item()


def killed(rank, size, folder):
    victim = f"worker{size - 1}"
    if rank == size - 1:
        time.sleep(30)
    pending = [rpc.rpc_async(victim, sleep, args=(20,)) for _ in range(3)]
    if rank == 0:
        rpc.rpc_async(victim, end_by_signal, args=(signal.SIGKILL,))
    results = [seconds_and_error(future) for future in pending]
    later = raised_by(lambda: rpc.rpc_sync(victim, identity, args=(1,)))
    others = rpc.rpc_sync(f"worker{1 - rank}", identity, args=(rank,))
    end = seconds_and_error_of_shutdown()
    return results, later, others, end


def seconds_and_error_of_shutdown():
    started = time.monotonic()
    return raised_by(rpc.shutdown), time.monotonic() - started


def killed_before_shutdown(rank, size, victim):
    if rank == victim:
        time.sleep(1)  # the others wait for it in their shutdown
        os.kill(os.getpid(), signal.SIGKILL)
    return seconds_and_error_of_shutdown()


def stopped(rank, size):
    if rank == 1:
        return 0
    other = rpc.rpc_sync("worker1", pid)
    os.kill(other, signal.SIGSTOP)
    while pathlib.Path(f"/proc/{other}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.001)
    try:
        started = time.monotonic()
        text = raised_by(lambda: rpc.rpc_sync("worker1", identity, args=(1,), timeout=1))
        seconds = time.monotonic() - started
    finally:
        os.kill(other, signal.SIGCONT)
    return text, seconds, rpc.rpc_sync("worker1", identity, args=(5,))


def short_timeout(rank, size):
    return seconds_and_error(rpc.rpc_async(f"worker{1 - rank}", sleep, args=(1,), timeout=0.2))


def forked(rank, size, way):
    other = f"worker{1 - rank}"
    rpc.rpc_sync(other, identity, args=(1,))
    kept = rpc.remote(other, identity, args=(torch.ones(2),))
    child = os.fork()
    if child == 0:
        text = raised_by(lambda: rpc.rpc_async(other, identity, args=(1,)).wait())
        if way == "drop":
            del kept
        if way == "shutdown":
            raised_by(rpc.shutdown)
        code = 0 if "is a fork of" in text else 1
        if way == "end":
            atexit._run_exitfuncs()
            ctypes.CDLL(None).exit(code)  # with the destructors of static objects, torch's agent among them
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    for _ in range(20):
        rpc.rpc_sync(other, identity, args=(1,))
    return status, kept.to_here().sum().item()


def pending_work(rank, size):
    rpc.rpc_async(f"worker{1 - rank}", sleep, args=(2,))
    rpc.rpc_async(f"worker{1 - rank}", sleep, args=(30,))
    return True


def two_worlds(rank, size):
    first = rpc.rpc_sync(f"worker{1 - rank}", identity, args=(1,))
    rpc.shutdown()
    second = Calls().at(rank, size, os.environ["SECOND_STORE"])
    second.begin()
    return first, rpc.rpc_sync(f"worker{1 - rank}", identity, args=(2,))


def nested(depth):
    if depth == 0:
        return 0
    me = rpc.get_worker_info().id
    return 1 + rpc.rpc_sync(f"worker{1 - me}", nested, args=(depth - 1,))


def nested_once(rank, size):
    if rank == 1:
        return 1
    return rpc.rpc_sync(f"worker{1 - rank}", nested, args=(1,))


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path(self.path),))


def forked_meanwhile(rank, size, forks):
    """Children of a worker whose threads call and are called."""
    other, ended = f"worker{1 - rank}", threading.Event()

    def call():
        while not ended.is_set():
            rpc.rpc_sync(other, identity, args=(torch.ones(10),))

    caller = threading.Thread(target=call)
    caller.start()
    statuses = []
    for _ in range(forks):
        child = os.fork()
        if child == 0:
            os._exit(0 if "is a fork of" in raised_by(lambda: rpc.rpc_sync(other, identity, args=(1,))) else 1)
        statuses.append(os.waitpid(child, 0)[1])
    ended.set()
    caller.join()
    return statuses


def made_elsewhere():
    return torch.ones(2, device="meta")


def on_other_devices(rank, size):
    texts = [
        raised_by(lambda: rpc.rpc_sync(f"worker{1 - rank}", identity, args=(torch.ones(2, device="meta"),))),
        raised_by(lambda: rpc.rpc_sync(f"worker{1 - rank}", made_elsewhere)),
    ]
    return texts, rpc.rpc_sync(f"worker{1 - rank}", identity, args=(rank,))


def after_shutdown(rank, size):
    kept = rpc.remote(f"worker{1 - rank}", identity, args=(1,))
    kept.to_here()
    rpc.shutdown()
    return [raised_by(lambda: rpc.rpc_sync(f"worker{1 - rank}", identity, args=(1,))), raised_by(kept.to_here)]


class Disagreeing(Calls):
    """A world of which each worker has its own opinion of the size."""

    def begin(self):
        self.size = 3 - self.rank
        super().begin()


def bombed(rank, size, path):
    """Rank 1 sends pickled bytes to all sockets of the world without the secret."""
    sockets = 0
    if rank == 1:
        folder = os.environ["TORCHSPAN_RUNTIME_DIR"]
        for line in pathlib.Path("/proc/net/unix").read_text().splitlines():
            name = line.split()[-1]
            if not name.startswith(folder):
                continue
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(name)
                stranger.sendall(pickle.dumps(Bomb(path)) * 10)
                if pathlib.Path(name).name.startswith("observe."):  # which waits for a whole request, and reads none but text
                    stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(10)
                while stranger.recv(4096):
                    pass
            sockets += 1
    time.sleep(0.2)
    return sockets, rpc.rpc_sync(f"worker{1 - rank}", identity, args=(rank,))


def dynamic(rank, size, folder):
    """The workers come in any order; worker 2 leaves before the others."""
    agent = rpc.api._get_current_rpc_agent()
    end = time.monotonic() + 20
    while len(agent.get_worker_infos()) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    if rank == 2:
        known = sorted(worker.name for worker in agent.get_worker_infos())
        sums = [rpc.rpc_sync(f"worker{to}", torch.add, args=(torch.ones(1), 1)).item() for to in range(3)]
        pathlib.Path(folder, "came").touch()
        wait_for(folder + "/answered")
        return known, sums
    wait_for(folder + "/came")
    answer = rpc.rpc_sync("worker2", identity, args=(rank,))
    pathlib.Path(folder, f"answered{rank}").touch()
    wait_for(folder + f"/answered{1 - rank}")
    pathlib.Path(folder, "answered").touch()
    end = time.monotonic() + 20
    while len(agent.get_worker_infos()) > 2 and time.monotonic() < end:
        time.sleep(0.01)
    gone = raised_by(lambda: rpc.rpc_sync("worker2", identity, args=(1,)))
    other = rpc.rpc_sync(f"worker{1 - rank}", identity, args=(rank,))
    pathlib.Path(folder, f"done{rank}").touch()
    wait_for(folder + f"/done{1 - rank}")  # which may leave at any time from then on
    return answer, gone, other


def refused(rank, size):
    return (
        raised_by(lambda: rpc.rpc_sync("nobody", identity, args=(1,))),
        raised_by(lambda: rpc.rpc_sync(f"worker{1 - rank}", identity, args=(torch.empty(2, device="meta"),))),
        rpc.rpc_sync(f"worker{1 - rank}", identity, args=(1,)),
    )


answered = []


def note(seconds):
    time.sleep(seconds)
    answered.append(rpc.get_worker_info().name)


def joined(rank, size):
    """The agent's own join(), which waits for the calls of all workers and leaves the world as it is."""
    if rank == 0:
        rpc.rpc_async("worker1", note, args=(0.5,))
    rpc.api._get_current_rpc_agent().join()
    found = list(answered)
    return found, rpc.rpc_sync(f"worker{1 - rank}", identity, args=(rank,))


def fails(value):
    raise ValueError(f"{value} is wrong")


def exceptions(rank, size):
    return raised_by(lambda: rpc.rpc_sync(f"worker{1 - rank}", fails, args=(3,)))


def gradients(rank, size):
    """Of a product whose factors are on two workers, against one process."""
    if rank == 1:
        return 0
    x = torch.arange(4.0, requires_grad=True)
    y = torch.full((4,), 3.0, requires_grad=True)
    with dist_autograd.context() as context:
        z = rpc.rpc_sync("worker1", torch.mul, args=(x, y))
        dist_autograd.backward(context, [rpc.rpc_sync("worker1", torch.sum, args=(z * z,))])
        found = dist_autograd.get_gradients(context)
    here = torch.autograd.grad((x * y).square().sum(), [x, y])
    return [torch.equal(found[x], here[0]), torch.equal(found[y], here[1])]


def early_release(rank, size):
    """Worker 1 releases references whose creation has timed out, while the functions that create them still run."""
    rpc.api._ignore_rref_leak = False  # rpc.shutdown() then raises for a reference that is left
    if rank == 0:
        return ""
    text = raised_by(rpc.remote("worker0", sleep, args=(2.0,), timeout=0.1)._get_future().wait)
    with dist_autograd.context():
        factor = torch.ones(1, requires_grad=True)
        raised_by(rpc.remote("worker0", sleep_and_return, args=(2.0, factor), timeout=0.1)._get_future().wait)
    gc.collect()  # the references end here
    return text


def with_group(rank, size, store):
    """A process group of ours beside the calls."""
    dist.init_process_group("torchspan", init_method="file://" + store, rank=rank, world_size=size)
    value = torch.ones(1)
    dist.all_reduce(value)
    answer = rpc.rpc_sync(f"worker{1 - rank}", identity, args=(rank,))
    dist.destroy_process_group()
    return value.item(), answer


class Calling(unittest.TestCase):
    def test_tensors_of_all_kinds_arrive_as_they_were_and_are_copies(self):
        self.assertEqual(processes.run(2, tensors_of_all_kinds, world=Calls()), [276.0, 276.0])

    def test_join_waits_for_calls_and_leaves_the_world_as_it_is(self):
        self.assertEqual(processes.run(2, joined, world=Calls()), [([], 0), (["worker1"], 1)])

    def test_exceptions_keep_their_type_and_name_the_worker(self):
        for rank, text in enumerate(processes.run(2, exceptions, world=Calls())):
            self.assertRegex(text, rf"ValueError: On WorkerInfo\(id={1 - rank}, name=worker{1 - rank}\)[\s\S]*3 is wrong")

    def test_gradients_across_workers_equal_those_of_one_process(self):
        self.assertEqual(processes.run(2, gradients, world=Calls())[0], [True, True])

    def test_wrong_workers_and_tensors_without_a_place_are_refused_and_break_nothing(self):
        for unknown, unplaced, good in processes.run(2, refused, world=Calls()):
            self.assertRegex(unknown, "could not find destination worker 'nobody'; there are worker0, worker1")
            self.assertRegex(unplaced, "a tensor on meta.*device map|tensor.cpu")
            self.assertEqual(good, 1)

    def test_a_handler_that_waits_leaves_a_thread_for_replies(self):
        self.assertEqual(processes.run(2, nested_once, world=Calls(threads=1)), [1, 1])

    def test_a_group_and_calls_live_in_one_process(self):
        path = tempfile.mkdtemp() + "/store"
        self.assertEqual(processes.run(2, with_group, path, world=Calls()), [(2.0, 0), (2.0, 1)])


class Failures(unittest.TestCase):
    def test_pending_calls_to_a_killed_worker_fail_at_once_and_others_go_on(self):
        for rank, result in enumerate(processes.run(3, killed, "", world=Calls(destroy=False))[:2]):
            pending, later, others, (end, seconds) = result
            for text, waited in pending:
                self.assertRegex(text, r"RuntimeError: torchspan: disconnected.*worker2 \(rank 2, pid \d+")
                self.assertLess(waited, 3)
            self.assertRegex(later, "worker2")
            self.assertEqual(others, rank)
            self.assertRegex(end, "worker2")
            self.assertLess(seconds, 5)

    def test_a_worker_that_dies_before_the_shutdown_ends_those_that_wait_for_it(self):
        for victim in (0, 1):
            with self.subTest(victim=victim):
                results = processes.run(3, killed_before_shutdown, victim, world=Calls(destroy=False))
                for rank in {0, 1, 2} - {victim}:
                    text, seconds = results[rank]
                    self.assertRegex(text, f"RuntimeError: .*worker{victim}")
                    self.assertLess(seconds, 6)

    def test_a_stopped_worker_times_out_and_goes_on_later(self):
        text, seconds, later = processes.run(2, stopped, world=Calls())[0]
        self.assertRegex(text, r"RPC ran for more than set timeout \(1000 ms\).*worker1")
        self.assertLess(seconds, 4)
        self.assertEqual(later, 5)

    def test_a_slow_function_times_out_with_the_name_of_its_worker(self):
        for rank, (text, seconds) in enumerate(processes.run(2, short_timeout, world=Calls())):
            self.assertRegex(text, rf"RPC ran for more than set timeout \(200 ms\).*worker{1 - rank}")
            self.assertLess(seconds, 1)

    def test_a_reference_that_is_released_before_its_creation_ends_is_not_left_behind(self):
        owner, creator = processes.run(2, early_release, world=Calls())
        self.assertEqual(owner, "")
        self.assertRegex(creator, r"RPC ran for more than set timeout \(100 ms\)")

    def test_workers_with_one_name_are_refused_everywhere(self):
        for result in processes.run(3, identity_of_rank, world=Calls(names=["a", "b", "a"])):
            self.assertRegex(result.text, "RPC worker name a is not unique: ")  # in the order of their arrival
            self.assertRegex(result.text, "rank 0.*rank 2|rank 2.*rank 0")

    def test_another_secret_is_denied_before_anything_is_read(self):
        folder = tempfile.mkdtemp()
        for rank in range(2):
            path = f"{folder}/{rank}"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(bytes([rank + 1]) * 32)
        results = processes.run(
            2, identity_of_rank, world=Calls(timeout=5),
            environment=lambda rank: {"TORCHSPAN_SECRET_FILE": f"{folder}/{rank}", "TORCHSPAN_JOIN_TIMEOUT": "5"},
        )
        self.assertRegex(results[1].text, "denied|secret")
        self.assertIsInstance(results[0], processes.Failed)

    def test_bytes_of_a_stranger_reach_no_unpickler(self):
        folder = tempfile.mkdtemp()
        os.chmod(folder, 0o700)
        marker = folder + "/marker"
        results = processes.run(
            2, bombed, marker, world=Calls(), environment=lambda rank: {"TORCHSPAN_RUNTIME_DIR": folder}
        )
        self.assertNotIsInstance(results[1], processes.Failed, results)
        self.assertGreaterEqual(results[1][0], 2)
        self.assertEqual([result[1] for result in results], [0, 1])
        self.assertFalse(os.path.exists(marker))

    def test_a_forked_child_leaves_its_parent_alone(self):
        for way in ("drop", "shutdown", "end"):
            with self.subTest(way=way):
                self.assertEqual(processes.run(2, forked, way, world=Calls()), [(0, 2.0)] * 2)

    def test_a_process_may_fork_while_its_threads_call(self):
        self.assertEqual(processes.run(2, forked_meanwhile, 30, world=Calls()), [[0] * 30] * 2)

    def test_tensors_without_a_device_map_are_refused_and_break_nothing(self):
        for rank, (texts, later) in enumerate(processes.run(2, on_other_devices, world=Calls())):
            self.assertRegex(texts[0], r"a tensor on meta.*device map.*set_device_map\(\) of the options")
            self.assertRegex(texts[1], f"a meta tensor has no data to send.*worker{1 - rank}")
            self.assertEqual(later, rank)

    def test_calls_after_the_shutdown_are_refused(self):
        for texts in processes.run(2, after_shutdown, world=Calls(destroy=False)):
            for text in texts:
                self.assertRegex(text, "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.|has been deleted")

    def test_workers_with_different_world_sizes_are_named_at_once(self):
        for result in processes.run(2, identity_of_rank, world=Disagreeing()):
            self.assertRegex(result.text, "rank 0 has world_size 3, and rank 1 has 2: give all ranks the same")
            self.assertLess(result.seconds, 10)

    def test_pending_work_does_not_keep_a_process(self):
        started = time.monotonic()
        self.assertEqual(processes.run(2, pending_work, world=Calls(destroy=False)), [True, True])
        self.assertLess(time.monotonic() - started, 15)

    def test_a_process_can_be_part_of_one_world_after_another(self):
        path = tempfile.mkdtemp() + "/store"
        self.assertEqual(
            processes.run(2, two_worlds, world=Calls(), environment=lambda rank: {"SECOND_STORE": path}), [(1, 2)] * 2
        )


def identity_of_rank(rank, size):
    return rank


class Dynamic(unittest.TestCase):
    def test_workers_join_and_leave(self):
        folder = tempfile.mkdtemp()
        results = processes.run(3, dynamic, folder, world=Calls(dynamic=True))
        self.assertEqual(results[2][1], [2.0, 2.0, 2.0])
        self.assertIn("worker2", results[2][0])
        for rank in (0, 1):
            answer, gone, other = results[rank]
            self.assertEqual((answer, other), (rank, rank))
            self.assertRegex(gone, "could not find destination worker 'worker2'")


class Options(unittest.TestCase):
    def test_no_time_out_is_no_limit(self):
        for dynamic in (False, True):
            world = Calls(timeout=0, dynamic=dynamic)
            self.assertEqual(processes.run(2, identity_of_rank, world=world), [0, 1])

    def test_wrong_options_are_refused_where_they_are_given(self):
        make = torchspan.torch_rpc.TorchSpanRpcBackendOptions
        self.assertRegex(raised_by(lambda: make(num_worker_threads=0)), "ValueError: num_worker_threads is 0")
        self.assertRegex(raised_by(lambda: make(num_worker_threads="2")), "TypeError")
        self.assertRegex(raised_by(lambda: make(rpc_timeout=-1)), "non-negative")
        self.assertRegex(raised_by(lambda: make(device_maps={"a": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}})), "1-to-1")
        options = make()
        options.set_device_map("a", {0: 1})
        options.set_device_map("a", {1: 0})
        self.assertEqual(len(options.device_maps["a"]), 2)
        self.assertRegex(raised_by(lambda: options.set_device_map("a", {0: 2})), "1-to-1")

    def test_both_ways_to_name_a_backend_stay_valid(self):
        from torch.distributed.rpc import backend_registry

        self.assertIs(rpc.BackendType.TORCHSPAN, backend_registry.BackendType["TORCHSPAN"])
        self.assertIsInstance(rpc.BackendType.TENSORPIPE, backend_registry.BackendType)
        self.assertEqual(repr(rpc.BackendType.TORCHSPAN), "BackendType.TORCHSPAN")


if __name__ == "__main__":
    unittest.main()
