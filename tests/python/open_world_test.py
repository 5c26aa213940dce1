"""torchspan.rpc without a world size: workers join and leave at any time."""

import contextlib
import os
import pathlib
import signal
import tempfile
import time
import unittest

import torch

from torchspan import autograd, rpc

from processes import Failed, Native, free_port, run


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def add(a, b=0):
    return a + b


def sleep(seconds):
    time.sleep(seconds)


def names():
    return sorted(worker.name for worker in rpc.get_worker_infos())


def call_back(name):
    return rpc.rpc_sync(name, names)


def end_by_signal(number):
    os.kill(os.getpid(), number)


class Box:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.005)


class Folder:
    """Marks that processes wait for."""

    def __init__(self):
        self.path = pathlib.Path(tempfile.mkdtemp())

    def mark(self, name):
        (self.path / name).touch()

    def wait_for(self, *names):
        for name in names:
            wait_until((self.path / name).exists)


class Unstarted(Native):
    """An open world whose bodies join and leave themselves, by self.join() of at_store()."""

    def __init__(self):
        super().__init__(destroy=False)

    def begin(self):
        os.environ["TORCHSPAN_TEST_STORE"] = self.store


def join(name, rank=-1, timeout=30, init_method=None, **options):
    rpc.init_rpc(
        name,
        rank=rank,
        rpc_backend_options=rpc.Options(
            init_method=init_method or "file://" + os.environ["TORCHSPAN_TEST_STORE"], rpc_timeout=timeout
        ),
        **options,
    )


@contextlib.contextmanager
def joined(name, rank=-1, **options):
    join(name, rank, **options)
    yield
    rpc.shutdown()


class OpenWorldTest(unittest.TestCase):
    def results(self, size, body, *arguments):
        results = run(size, body, *arguments, world=Unstarted())
        for result in results:
            self.assertNotIsInstance(result, Failed, results)
        return results

    def test_workers_come_late_leave_and_come_again(self):
        def body(rank, size, folder):
            if rank < 2:
                with joined(f"worker{rank}", rank):
                    wait_until(lambda: len(names()) == 2)
                    first = rpc.rpc_sync(f"worker{1 - rank}", add, args=(torch.ones(2), rank)).tolist()
                    folder.mark(f"alone{rank}")
                    folder.wait_for("left")
                    wait_until(lambda: len(names()) == 2)
                    gone = raised_by(lambda: rpc.rpc_sync("late", add, args=(1,)))
                    folder.mark(f"without{rank}")
                    folder.wait_for("again")
                    again = rpc.rpc_sync("late", add, args=(1, rank))
                    folder.mark(f"done{rank}")
                    folder.wait_for("done0", "done1")
                    return first, type(gone).__name__, str(gone), again
            folder.wait_for("alone0", "alone1")
            with joined("late", 2):
                known = names()
                # Each of them knows this worker by its name when init_rpc() has returned.
                answers = [rpc.rpc_sync(f"worker{to}", call_back, args=("late",)) for to in range(2)]
                box = rpc.remote("worker1", Box, args=(5,))
                kept = box.rpc_sync().get()
            folder.mark("left")
            folder.wait_for("without0", "without1")
            with joined("late", 2):
                folder.mark("again")
                folder.wait_for("done0", "done1")
            return known, answers, kept

        results = self.results(3, body, Folder())
        everyone = ["late", "worker0", "worker1"]
        self.assertEqual(results[2], (everyone, [everyone, everyone], 5))
        for rank in (0, 1):
            first, kind, text, again = results[rank]
            self.assertEqual((first, kind, again), ([1.0 + rank] * 2, "InvalidError", 1 + rank))
            self.assertRegex(text, "late.*'worker0'.*'worker1'")

    def test_a_name_and_a_rank_of_a_member_are_refused_and_the_others_go_on(self):
        def body(rank, size, folder):
            if rank < 2:
                with joined(f"worker{rank}", rank):
                    folder.mark(f"came{rank}")
                    folder.wait_for("refused")
                    answer = rpc.rpc_sync(f"worker{1 - rank}", add, args=(rank, 1))
                    folder.mark(f"done{rank}")
                    folder.wait_for("done0", "done1")
                    return answer
            folder.wait_for("came0", "came1")
            refusals = [raised_by(lambda: join("worker1", 2)), raised_by(lambda: join("other", 1))]
            with joined("other", 2):
                sum = rpc.rpc_sync("worker1", add, args=(2, 3))
                folder.mark("refused")
            return [(type(one).__name__, str(one)) for one in refusals], sum

        first, second, (refusals, sum) = self.results(3, body, Folder())
        self.assertEqual((first, second, sum), (1, 2, 5))
        self.assertEqual([kind for kind, _ in refusals], ["InvalidError"] * 2)
        self.assertRegex(refusals[0][1], r"RPC worker name worker1 is not unique: .*taken by worker1 \(rank 1, pid .*choose another")
        self.assertRegex(refusals[1][1], r"rank 1 is taken by worker1 \(rank 1, pid .*choose another")

    def test_a_death_is_named_and_its_name_and_rank_may_come_again(self):
        def body(rank, size, folder):
            if rank == 1:
                join("worker1", 1)
                folder.mark("came")
                time.sleep(60)
            if rank == 2:
                folder.wait_for("dead")
                with joined("worker1", 1):
                    folder.mark("back")
                    folder.wait_for("answered")
                return names_before
            with joined("worker0", 0):
                folder.wait_for("came")
                box = rpc.remote("worker1", Box, args=(5,))
                box.rpc_sync().get()
                pending = rpc.rpc_async("worker1", sleep, args=(30,))
                rpc.rpc_async("worker1", end_by_signal, args=(signal.SIGKILL,))
                started = time.monotonic()
                error = raised_by(pending.wait)
                seconds = time.monotonic() - started
                wait_until(lambda: names() == ["worker0"])
                lost = [str(raised_by(call)) for call in (lambda: box.rpc_sync().get(), box.to_here)]
                folder.mark("dead")
                folder.wait_for("back")
                wait_until(lambda: len(names()) == 2)
                answer = rpc.rpc_sync("worker1", add, args=(1, 2))
                folder.mark("answered")
            return type(error).__name__, str(error), seconds, lost, answer

        names_before = ["worker0"]
        survivor, dead, again = run(3, body, Folder(), world=Unstarted())
        self.assertNotIsInstance(survivor, Failed, survivor)
        self.assertIsInstance(dead, Failed)
        self.assertEqual(again, names_before)
        kind, text, seconds, lost, answer = survivor
        self.assertEqual((kind, answer), ("DisconnectedError", 3))
        self.assertRegex(lost[0], "there is no rank 1 in this world; there are 'worker0'")
        self.assertRegex(lost[1], "worker1 .rank 1, pid .* died")
        self.assertRegex(text, "worker1 .rank 1, pid .* died")
        self.assertLess(seconds, 5)

    def test_rank_0_waits_for_the_others_and_ends_the_world(self):
        def body(rank, size, folder):
            if rank == 0:
                join("worker0", 0)
                folder.wait_for("came")
                folder.mark("leaving")
                started = time.monotonic()
                rpc.shutdown()
                return time.monotonic() - started
            if rank == 1:
                join("worker1", 1)
                folder.mark("came")
                folder.wait_for("leaving")
                time.sleep(0.7)
                answer = rpc.rpc_sync("worker1", add, args=(1, 1))
                rpc.shutdown()
                folder.mark("over")
                return answer
            folder.wait_for("over")
            started = time.monotonic()
            late = raised_by(lambda: join("late", 2))
            return type(late).__name__, str(late), time.monotonic() - started

        waited, answer, (kind, text, seconds) = self.results(3, body, Folder())
        self.assertEqual((answer, kind), (2, "DisconnectedError"))
        self.assertGreater(waited, 0.5)
        self.assertRegex(text, "rank 0 has left this open world.*start rank 0 again")
        self.assertLess(seconds, 15)

    def test_a_shutdown_without_grace_is_a_death_for_the_others(self):
        def body(rank, size, folder):
            if rank == 1:
                join("worker1", 1)
                folder.mark("came")
                folder.wait_for("calls")
                rpc.shutdown(graceful=False)
                return None
            with joined("worker0", 0):
                folder.wait_for("came")
                pending = rpc.rpc_async("worker1", sleep, args=(3,))
                folder.mark("calls")
                return str(raised_by(pending.wait))

        self.assertRegex(self.results(2, body, Folder())[0], "worker1.*left without a graceful")

    def test_a_worker_without_a_rank_gets_the_next_one_and_gradients_flow(self):
        def body(rank, size, folder):
            with joined(f"worker{rank}", 0 if rank == 0 else -1):
                wait_until(lambda: len(names()) == 3)
                folder.mark(f"came{rank}")
                folder.wait_for("came0", "came1", "came2")
                leaf = torch.full((2,), 3.0, requires_grad=True)
                with autograd.context() as context:
                    loss = (rpc.rpc_sync(f"worker{(rank + 1) % 3}", add, args=(leaf, leaf)) * leaf).sum()
                    autograd.backward(context, [loss])
                    gradient = autograd.get_gradients(context)[leaf].tolist()
                folder.mark(f"done{rank}")
                folder.wait_for("done0", "done1", "done2")
                return rpc.get_worker_info().id, gradient

        results = self.results(3, body, Folder())
        self.assertEqual(sorted(id for id, _ in results), [0, 1, 2])
        self.assertEqual(results[0], (0, [12.0, 12.0]))
        self.assertEqual({tuple(gradient) for _, gradient in results}, {(12.0, 12.0)})

    def test_the_environment_and_an_address_name_the_place(self):
        def body(rank, size, folder, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
            os.environ.pop("WORLD_SIZE", None)
            found = []
            for number, method in enumerate(("env://", f"tcp://127.0.0.1:{port}")):
                with joined(f"worker{rank}", -1 if method == "env://" else rank, init_method=method, world_size=(None, 0)[number]):
                    wait_until(lambda: len(names()) == 2)
                    found.append(rpc.get_worker_info().id)
                    folder.mark(f"{number}{rank}")
                    folder.wait_for(f"{number}0", f"{number}1")
                # The next world has the same address: rank 0 must have left this one, and its store.
                folder.mark(f"{number}{rank} left")
                folder.wait_for(f"{number}0 left", f"{number}1 left")
            return found

        self.assertEqual(self.results(2, body, Folder(), free_port()), [[0, 0], [1, 1]])

    def test_wrong_numbers_and_a_world_of_another_kind_are_named(self):
        def body(rank, size, folder):
            wrong = str(raised_by(lambda: join("worker0", rank, world_size=-2)))
            if rank == 0:
                with joined("worker0", 0):
                    folder.mark("came")
                    folder.wait_for("refused")
                return wrong, None
            folder.wait_for("came")
            other = str(raised_by(lambda: join("worker1", 1, world_size=2, timeout=1)))
            folder.mark("refused")
            return wrong, other

        (first, _), (second, other) = self.results(2, body, Folder())
        for wrong in (first, second):
            self.assertRegex(wrong, "world_size is -2; expected 1 or more, or None")
        self.assertRegex(other, "has a world_size of 2, and the others at this store have none: give all workers the same")


if __name__ == "__main__":
    unittest.main()
