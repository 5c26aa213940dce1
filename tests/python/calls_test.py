"""torchspan.rpc, torchspan.autograd and torchspan.optim: values, references, exceptions, deaths, coroutines, gradients."""

import gc
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

import torch

import torchspan
from processes import Failed, Native, run
from torchspan import autograd, errors, optim, pipeline, rpc


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    return None


# ---- functions of the other worker


def identity(value):
    return value


def add(a, b=0):
    return a + b


def fail(text):
    raise ValueError(text)


class TwoPart(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second

    def __reduce__(self):
        return TwoPart, (self.first, self.second)


class CannotBePickled(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = __import__("threading").Lock()


def fail_with(kind, *args):
    raise kind(*args)


def fail_at(worker, text):
    rpc.rpc_sync(worker, fail, args=(text,))


def replaced():
    return "first"


def replace():
    def second():
        return "second"

    globals()["replaced"] = second
    second.__qualname__ = "replaced"


def leave():
    sys.exit(3)


def scaled(weight, x, *rest):
    return type(weight).__name__, (weight * x).sum()


def interrupt():
    raise KeyboardInterrupt("of a function")


def wait_a_little(seconds, value=None):
    time.sleep(seconds)
    return value


def ask_back(name):
    """A function that blocks, so that its worker takes more threads."""
    return rpc.rpc_sync(name, wait_a_little, args=(0.5,))


def thread_states():
    return len(sys._current_frames())


def me():
    return rpc.get_worker_info().name


def nested(other, depth):
    return 0 if depth == 0 else 1 + rpc.rpc_sync(other, nested, args=(me(), depth - 1))


async def awaited(other, depth):
    return 0 if depth == 0 else 1 + await rpc.rpc_async(other, awaited, args=(me(), depth - 1))


async def awaits_something_else():
    class Other:
        def __await__(self):
            yield 7

    await Other()


async def slept(seconds):
    await rpc.delay(seconds)
    return seconds


@rpc.functions.async_execution
def doubled(other, value):
    return rpc.rpc_async(other, add, args=(value, value)).then(lambda done: done.wait())


def sleep(seconds):
    time.sleep(seconds)


class Counter:
    def __init__(self, start):
        if start < 0:
            raise ValueError(f"start is {start}")
        self.value = start

    def increase(self, by=1):
        self.value += by
        return self.value

    async def later(self):
        await rpc.delay(0.01)
        return self.value

    @rpc.functions.async_execution
    def doubled(self):
        return rpc.rpc_async(me(), add, args=(self.value, self.value))

    def itself(self):
        return self


def numbers_in_a_list():
    return [1, 2, 2]


class WithCallable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.call_me = identity
        self.also = torch.nn.Identity()

    def allowed(self):
        return "allowed"


class SlowCounter(Counter):
    def __init__(self, start):
        time.sleep(0.2)
        super().__init__(start)


def increase(rref, by):
    return rref.rpc_sync().increase(by)


def give_back(rref):
    return rref


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.double)
        values = torch.Generator().manual_seed(seed)  # others may be constructed at the same time
        for parameter in self.parameters():
            parameter.data.uniform_(-0.5, 0.5, generator=values)

    def forward(self, x):
        return Square.apply(torch.tanh(self.linear(x)))

    def references(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def gradients(self, context):
        gradients = autograd.get_gradients(context)
        return [gradients.get(parameter) for parameter in self.parameters()]

    def values(self):
        return [parameter.detach().clone() for parameter in self.parameters()]


class Branches(torch.nn.Module):
    """Of which a forward uses one branch or two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.always, self.sometimes, self.never = (torch.nn.Linear(3, 3, dtype=torch.double) for _ in range(3))

    def forward(self, x, both):
        y = torch.tanh(self.always(x))
        return self.sometimes(y) if both else y


def branch_input(step, rank):
    return torch.full((2, 3), step + 0.5 * rank, dtype=torch.double)


def at_rank_0(body):
    """Runs `body` on rank 0; the others serve."""

    def everywhere(rank, size):
        return body(size) if rank == 0 else None

    return everywhere


class Calls(unittest.TestCase):
    def check(self, body, size=2, **options):
        result = run(size, at_rank_0(body), world=Native(**options))[0]
        self.assertNotIsInstance(result, Failed, result)
        return result

    def test_values_arrive_as_they_were(self):
        shared = [1]
        loop = []
        loop.append(loop)
        deep = []
        for _ in range(100):
            deep = [deep]
        values = [
            None, True, False, 0, -1, 2**63 - 1, -(2**63), 10**40, -(10**1000), 1.5, float("inf"), "", "ä€😀", "\ud800", b"", b"\0x",
            [], (), {}, [1, [2, (3, {"a": None})]], {1: "x", (2, 3): [4]}, {1, 2}, 2 + 1j, slice(1, 2), torch.float64,
            torch.Size([2, 3]), range(3), deep, [shared, shared], Counter, add, TwoPart(1, 2),
        ]  # fmt: skip

        def body(size):
            got = rpc.rpc_sync("worker1", identity, args=(values,))
            one_by_one = [rpc.rpc_sync("worker1", identity, args=(value,)) for value in values]
            twin = one_by_one[values.index([shared, shared])]
            round = rpc.rpc_sync("worker1", identity, args=(loop,))
            self.assertEqual(rpc.rpc_sync("worker1", identity, args=(10**5000,)), 10**5000)
            return repr(got) == repr(values), repr(one_by_one) == repr(values), twin[0] is twin[1], round[0] is round

        self.assertEqual(self.check(body), (True, True, True, True))

    def test_tensors_arrive_with_their_values_wherever_they_are(self):
        def body(size):
            tensors = [
                torch.randn(3, 4), torch.arange(6).reshape(2, 3).t(), torch.zeros(0, 2), torch.tensor(3.5), torch.ones(2).bool(),
                torch.ones(2, dtype=torch.complex64), torch.ones(3, dtype=torch.bfloat16), torch.eye(3).to_sparse(),
                torch.nn.Parameter(torch.ones(2)),
            ]  # fmt: skip
            forms = [tensors, {"a": tensors}, (tensors, {1, 2}), slice(tensors, None)]
            same = []
            for form in forms:
                got = rpc.rpc_sync("worker1", identity, args=(form,))
                got = got["a"] if isinstance(got, dict) else got.start if isinstance(got, slice) else got
                got = got[0] if isinstance(got, tuple) else got
                same += [torch.equal(a.to_dense().detach(), b.to_dense().detach()) and a.dtype == b.dtype for a, b in zip(got, tensors)]
            large = torch.randn(1 << 20)
            same.append(torch.equal(rpc.rpc_sync("worker1", add, args=(large,), kwargs={"b": 1.0}), large + 1))
            same.append(torch.equal(rpc.rpc_sync("worker1", torch.add, args=(large, large), kwargs={"alpha": 2}), 3 * large))
            return same

        self.assertEqual(set(self.check(body)), {True})

    def test_modules_are_pickled_with_their_parameters(self):
        def body(size):
            sent = Layer(3)
            got = rpc.rpc_sync("worker1", identity, args=(sent,))
            return type(got.linear.weight) is torch.nn.Parameter and torch.equal(got.linear.weight, sent.linear.weight)

        self.assertTrue(self.check(body))

    def test_exceptions_arrive_as_their_own_types_with_both_tracebacks(self):
        def body(size):
            plain = raised_by(lambda: rpc.rpc_sync("worker1", fail, args=("negative",)))
            own = raised_by(lambda: rpc.rpc_async("worker1", fail_with, args=(TwoPart, 1, 2)).wait())
            foreign = raised_by(lambda: rpc.rpc_sync("worker1", fail_with, args=(CannotBePickled, "has a lock")))
            far = raised_by(lambda: rpc.rpc_sync("worker1", fail_at, args=("worker2", "far")))
            surrogate = raised_by(lambda: rpc.rpc_sync("worker1", fail_with, args=(ValueError, "\ud800")))
            return [
                type(plain) is ValueError and str(plain) == "negative" and "in fail" in str(plain.__cause__),
                "on worker1" in str(plain.__cause__),
                type(own) is TwoPart and (own.first, own.second) == (1, 2),
                type(foreign) is rpc.RemoteError and "CannotBePickled: has a lock" in str(foreign),
                "Original exception on remote side was" in str(foreign),
                type(far) is ValueError and "on worker1" in str(far.__cause__) and "on worker2" in str(far.__cause__),
                type(surrogate) is ValueError,
            ]

        self.assertEqual(self.check(body, size=3), [True] * 7)

    def test_a_function_that_was_replaced_is_not_called_any_more(self):
        def body(size):
            before = rpc.rpc_sync("worker1", replaced)
            rpc.rpc_sync("worker1", replace)
            return before, rpc.rpc_sync("worker1", replaced)

        self.assertEqual(self.check(body), ("first", "second"))

    def test_what_a_signal_raises_in_a_wait_is_not_the_result(self):
        class Alarm(Exception):
            pass

        def raise_alarm(*_):
            raise Alarm

        def body(size):
            remote = rpc.rpc_async("worker1", interrupt)
            called = []
            remote.then(lambda _: called.append(1))
            try:
                remote.wait()
            except BaseException as error:  # noqa: B902  a KeyboardInterrupt there is none here
                kind = type(error).__name__
            future = rpc.rpc_async("worker1", wait_a_little, args=(1.0, 42))
            signal.signal(signal.SIGALRM, raise_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            raised = raised_by(future.wait)
            signal.setitimer(signal.ITIMER_REAL, 0)
            return type(raised).__name__, future.wait(), kind, remote.done(), called

        self.assertEqual(self.check(body), ("Alarm", 42, "RemoteError", True, [1]))

    def test_what_ends_a_process_ends_no_caller_and_times_have_no_end(self):
        def body(size):
            error = raised_by(lambda: rpc.rpc_sync("worker1", leave, timeout=float("inf")))
            return type(error).__name__, str(error), rpc.rpc_sync("worker1", identity, args=(1,), timeout=1e12)

        kind, text, answer = self.check(body)
        self.assertEqual((kind, answer), ("RemoteError", 1))
        self.assertRegex(text, "SystemExit")

    def test_threads_that_end_leave_no_state_of_python(self):
        def body(size):
            before = rpc.rpc_sync("worker1", thread_states)
            for future in [rpc.rpc_async("worker1", ask_back, args=("worker0",)) for _ in range(40)]:
                future.wait()
            end = time.monotonic() + 30
            while (now := rpc.rpc_sync("worker1", thread_states)) > before + 20 and time.monotonic() < end:
                time.sleep(0.5)
            return now - before <= 20, now

        self.assertTrue(self.check(body)[0])

    def test_workers_are_named_by_name_rank_and_info_and_may_be_this_one(self):
        def body(rank, size):
            others = [("worker1", 1, rpc.get_worker_info("worker1")), (me(), rank, rpc.get_worker_info())]
            found = []
            for to in [one for names in others for one in names]:
                found.append(rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1)).sum().item())
                found.append(rpc.rpc_async(to, add, args=(torch.ones(2), 1)).wait().sum().item())
                found.append(rpc.remote(to, add, args=(torch.ones(2), 1)).to_here().sum().item())
            return set(found)

        self.assertEqual(run(2, body, world=Native()), [{4.0}, {4.0}])

    def test_failures_of_the_library_name_worker_and_function(self):
        def body(size):
            late = raised_by(lambda: rpc.rpc_sync("worker1", sleep, args=(3,), timeout=0.1))
            later = raised_by(lambda: rpc.rpc_async("worker1", sleep, args=(3,), timeout=0.1).wait())
            nobody = raised_by(lambda: rpc.rpc_sync("nobody", add, args=(1, 2)))
            local = raised_by(lambda: rpc.rpc_sync("worker1", lambda: 1))
            shapes = raised_by(lambda: rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), torch.ones(3))))
            return [
                late.kind == "timed out" and "'sleep'" in str(late) and "worker1" in str(late),
                later.kind == "timed out",
                nobody.kind == "invalid" and "worker0" in str(nobody),
                isinstance(local, (AttributeError, pickle.PicklingError)),
                isinstance(shapes, RuntimeError) and "size of tensor" in str(shapes),
                type(pickle.loads(pickle.dumps(late))) is errors.TimedOutError,
            ]

        self.assertEqual(self.check(body), [True] * 6)

    def test_a_death_fails_the_calls_that_wait_for_it(self):
        def body(size):
            pid = rpc.rpc_sync("worker1", os.getpid)
            waiting = rpc.rpc_async("worker1", sleep, args=(30,))
            reference = rpc.remote("worker1", Counter, args=(1,))
            reference.rpc_sync().increase()
            started = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            died = raised_by(waiting.wait)
            fetched = raised_by(reference.to_here)
            left = raised_by(rpc.shutdown)
            return died.kind, "worker1" in str(died), fetched.kind, "worker1" in str(left), time.monotonic() - started < 10

        result = run(2, at_rank_0(body), world=Native())[0]
        self.assertEqual(result, ("disconnected", True, "disconnected", True, True))

    def test_handlers_that_wait_leave_their_threads_to_others(self):
        def body(size):
            return (
                rpc.rpc_sync("worker1", nested, args=("worker0", 64)),
                rpc.rpc_sync("worker1", awaited, args=("worker0", 64)),
                sum(future.wait() for future in [rpc.rpc_async("worker1", slept, args=(0.2,)) for _ in range(200)]),
            )

        deep, flat, slept_for = self.check(body, threads=1)
        self.assertEqual((deep, flat), (64, 64))
        self.assertAlmostEqual(slept_for, 40)

    def test_coroutines_and_futures_of_functions_are_answered(self):
        def body(size):
            wrong = raised_by(lambda: rpc.rpc_sync("worker1", awaits_something_else))
            not_a_future = raised_by(lambda: rpc.rpc_sync("worker1", wrongly_decorated))
            with rpc.wait_all():
                futures = [rpc.rpc_async("worker1", add, args=(i, 1)) for i in range(10)]
            done = [future.done() for future in futures]
            chained = rpc.rpc_async("worker1", add, args=(1, 2)).then(lambda future: future.wait() * 10)
            return (
                rpc.rpc_sync("worker1", doubled, args=("worker0", 21)),
                type(wrong) is TypeError and "it can await calls" in str(wrong),
                "must return a torch.futures.Future" in str(not_a_future),
                all(done),
                chained.wait(),
                torch.futures.wait_all(futures),
            )

        self.assertEqual(self.check(body), (42, True, True, True, 30, list(range(1, 11))))

    def test_the_first_failure_ends_wait_all_of_torch_at_once_and_can_be_raised_again(self):
        def body(size):
            futures = [rpc.rpc_async("worker1", sleep, args=(8,)), rpc.rpc_async("worker1", fail, args=("negative",))]
            started = time.monotonic()
            found = [raised_by(lambda: torch.futures.wait_all(futures)), raised_by(futures[1].wait), raised_by(futures[1].wait)]
            seconds = time.monotonic() - started
            then = raised_by(futures[1].then(lambda done: done.wait()).wait)
            with_cause = all(type(one) is ValueError and "in fail" in str(one.__cause__) for one in found)
            return with_cause, seconds < 7, "ValueError: negative" in str(then)

        self.assertEqual(self.check(body), (True, True, True))

    def test_references_call_their_values_and_are_counted(self):
        def body(size):
            counter = rpc.remote("worker1", Counter, args=(10,))
            slow = rpc.remote("worker1", SlowCounter, args=(1,))
            bad = rpc.remote("worker1", Counter, args=(-1,))
            mine = rpc.RRef([1, 2])
            results = [
                counter.rpc_sync().increase(),
                counter.rpc_async().increase(by=4).wait(),
                counter.rpc_sync().later(),
                counter.rpc_sync().doubled(),
                slow.rpc_sync().increase(),
                counter.remote().increase().to_here(),
                rpc.rpc_sync("worker2", increase, args=(counter, 100)),
                rpc.rpc_sync("worker2", give_back, args=({"a": (counter,)},))["a"][0].rpc_sync().increase(),
                counter.to_here().value,
                counter.owner_name(),
                counter.is_owner(),
                (mine.is_owner(), mine.local_value(), mine.to_here() is mine.local_value()),
                rpc.rpc_sync("worker1", identity, args=(mine,)).local_value() is mine.local_value(),
            ]
            errors = [
                type(raised_by(bad.to_here)).__name__,
                type(raised_by(lambda: bad.rpc_sync().increase())).__name__,
                raised_by(counter.local_value).kind,
                type(raised_by(lambda: pickle.dumps(counter))).__name__,
            ]
            return results, errors

        results, errors = self.check(body, size=3)
        self.assertEqual(
            results, [11, 15, 15, 30, 2, 16, 116, 117, 117, "worker1", False, (True, [1, 2], True), True]
        )
        self.assertEqual(errors, ["ValueError", "ValueError", "invalid", "RuntimeError"])

    def test_released_references_free_their_values(self):
        def body(size):
            for _ in range(200):
                rpc.remote("worker1", Counter, args=(1,)).rpc_sync().increase()
            gc.collect()
            end = time.monotonic() + 20
            while time.monotonic() < end:
                if rpc.rpc_sync("worker1", living_counters) == 0:
                    return True
                time.sleep(0.05)
            return False

        self.assertTrue(self.check(body))

    def test_with_registered_functions_nothing_else_is_called_and_nothing_is_unpickled(self):
        def body(size):
            counter = rpc.remote("worker1", Counter, args=(1,))
            private = raised_by(lambda: counter.rpc_sync()._secret())
            unknown = raised_by(lambda: rpc.rpc_sync("worker1", identity, args=(1,)))
            pickled = raised_by(lambda: rpc.rpc_sync("worker1", add, args=(1, 2j)))
            result = raised_by(lambda: rpc.rpc_sync("worker1", complex_number))
            failed = raised_by(lambda: rpc.rpc_sync("worker1", fail, args=("negative",)))
            return [
                rpc.rpc_sync("worker1", add, args=(1, 2)) == 3,
                counter.rpc_sync().increase() == 2,
                torch.equal(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)), torch.full((2,), 2.0)),
                type(private) is ValueError and "private" in str(private),
                type(unknown) is ValueError and "functions=" in str(unknown),
                type(pickled) is TypeError and "complex" in str(pickled),
                type(result) is TypeError and "complex" in str(result),
                type(failed) is ValueError and str(failed) == "negative",
            ]

        functions = [add, Counter, fail, complex_number, torch.add]
        self.assertEqual(self.check(body, functions=functions), [True] * 8)

    def test_with_registered_functions_neither_other_operators_nor_other_methods_are_called(self):
        def body(rank, size):
            if rank == 1:
                return None
            numbers = rpc.remote("worker1", numbers_in_a_list)
            module = rpc.remote("worker1", WithCallable)
            refused = [
                lambda: rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)),
                lambda: numbers.rpc_sync().append(4),
                lambda: module.rpc_sync().call_me("x"),
                lambda: module.rpc_sync().also("x"),
            ]
            texts = [f"{type(error).__name__}: {error}" for error in map(raised_by, refused)]
            return texts, numbers.rpc_sync().count(2), module.rpc_sync().allowed()

        class Mixed(Native):
            """A caller that may call anything, and a worker that lets it call some functions."""

            def begin(self):
                self.functions = [numbers_in_a_list, list.count, WithCallable] if self.rank == 1 else None
                super().begin()

        result = run(2, body, world=Mixed())[0]
        self.assertNotIsInstance(result, Failed, result)
        texts, count, allowed = result
        self.assertEqual((count, allowed), (2, "allowed"))
        self.assertRegex(texts[0], "DeniedError: .*functions=.*torch.add")
        self.assertRegex(texts[1], "ValueError: .*list.append is not among the functions=")
        self.assertRegex(texts[2], "ValueError: .*WithCallable.call_me is not among the functions=")
        self.assertRegex(texts[3], "ValueError: .*WithCallable.also is not among the functions=")

    def test_a_peer_that_pickles_is_refused_where_functions_are_registered(self):
        def body(rank, size):
            if rank == 0:
                found = raised_by(lambda: rpc.rpc_sync("worker1", add, args=(1, 2j)))
                return found.kind, "unpickles nothing" in str(found), rpc.rpc_sync("worker1", add, args=(1, 2))
            return None

        class Mixed(Native):
            def begin(self):
                self.functions = [add] if self.rank == 1 else None
                super().begin()

        self.assertEqual(run(2, body, world=Mixed())[0], ("denied", True, 3))

    def test_forked_children_say_so_and_leave_their_parent_alone(self):
        def body(size):
            child = os.fork()
            if child == 0:
                found = raised_by(lambda: rpc.rpc_sync("worker1", add, args=(1, 2)))
                os._exit(0 if found is not None and "fork" in str(found) else 1)
            status = os.waitpid(child, 0)[1]
            return status, rpc.rpc_sync("worker1", add, args=(1, 2))

        self.assertEqual(self.check(body), (0, 3))

    def test_worlds_may_follow_each_other(self):
        def body(rank, size):
            sums = []
            for _ in range(3):
                sums.append(rpc.rpc_sync(f"worker{1 - rank}", add, args=(rank, 1)))
                rpc.shutdown()
                store = f"{os.environ['TORCHSPAN_TEST_STORE']}{len(sums)}"
                rpc.init_rpc(
                    f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.Options(init_method="file://" + store)
                )
            return sums, raised_by(lambda: rpc.init_rpc("again")) is not None

        os.environ["TORCHSPAN_TEST_STORE"] = tempfile.mkdtemp() + "/next"
        self.assertEqual(run(2, body, world=Native()), [([1] * 3, True), ([2] * 3, True)])


@rpc.functions.async_execution
def wrongly_decorated():
    return 7


def complex_number():
    return 2j


def living_counters():
    gc.collect()
    return sum(isinstance(one, Counter) for one in gc.get_objects())


class Gradients(unittest.TestCase):
    def test_parameters_get_their_gradients_whatever_the_other_arguments_are(self):
        def body(size):
            found = []
            for rest in ((), (torch.float32,), ({1, 2},)):
                weight = torch.nn.Parameter(torch.ones(2))
                with autograd.context() as context:
                    kind, loss = rpc.rpc_sync("worker1", scaled, args=(weight, 3, *rest))
                    autograd.backward(context, [loss])
                    found.append((kind, autograd.get_gradients(context)[weight].tolist()))
            return found

        result = run(2, at_rank_0(body), world=Native())[0]
        self.assertEqual(result, [("Tensor", [3.0, 3.0])] * 3)

    def test_rates_that_are_tensors_follow_their_schedule(self):
        def body(size):
            layer = rpc.remote("worker1", Layer, args=(1,))
            parameters = layer.rpc_sync().references()
            optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=torch.tensor(0.5))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)
            values = []
            for _ in range(3):
                with autograd.context() as context:
                    autograd.backward(context, [layer.rpc_sync().forward(torch.ones(2, 3, dtype=torch.double)).sum()])
                    optimizer.step(context)
                schedule.step()
                values.append(layer.rpc_sync().values())
            return [torch.equal(a, b) for a, b in zip(values[0], values[1])], [torch.equal(a, b) for a, b in zip(values[1], values[2])]

        result = run(2, at_rank_0(body), world=Native())[0]
        self.assertNotIsInstance(result, Failed, result)
        self.assertEqual({one for part in result for one in part}, {True})

    def test_optimizers_step_as_in_one_process(self):
        def body(size):
            layers = [rpc.remote(f"worker{owner}", Layer, args=(owner,)) for owner in (1, 2)]
            parameters = [one for layer in layers for one in layer.rpc_sync().references()]
            optimizer = optim.DistributedOptimizer(torch.optim.AdamW, parameters, lr=0.05)
            x = torch.ones(2, 3, dtype=torch.double)
            for _ in range(5):
                with autograd.context() as context:
                    loss = layers[1].rpc_sync().forward(layers[0].rpc_sync().forward(x)).sum()
                    autograd.backward(context, [loss])
                    optimizer.step(context)
            found = [value for layer in layers for value in layer.rpc_sync().values()]

            local = [Layer(1), Layer(2)]
            oracle = torch.optim.AdamW([p for layer in local for p in layer.parameters()], lr=0.05)
            for _ in range(5):
                oracle.zero_grad()
                local[1](local[0](x)).sum().backward()
                oracle.step()
            wanted = [value for layer in local for value in layer.values()]
            return [torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(found, wanted)]

        result = run(3, at_rank_0(body), world=Native())[0]
        self.assertNotIsInstance(result, Failed, result)
        self.assertEqual(set(result), {True})

    def test_data_parallel_modules_average_their_gradients_in_a_context(self):
        folder = tempfile.mkdtemp()

        def body(rank, size):
            wrong = []
            for backend in ("gloo", "torchspan"):
                torch.distributed.init_process_group(backend, f"file://{folder}/{backend}", rank=rank, world_size=size)
                for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
                    wrong += [(backend, options, text) for text in differences(rank, size, options)]
                torch.distributed.destroy_process_group()
            return wrong

        def differences(rank, size, options):
            model = torch.nn.parallel.DistributedDataParallel(Layer(3), **options)
            remote = rpc.remote(f"worker{1 - rank}", Layer, args=(7,))
            parameters = list(model.module.parameters())
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            local, other = Layer(3), Layer(7)
            for step in range(1, 4):
                with autograd.context() as context:
                    loss = remote.rpc_sync().forward(model(torch.full((2, 3), step + 0.5 * rank, dtype=torch.double))).sum()
                    autograd.backward(context, [loss])
                    gradients = autograd.get_gradients(context)
                    found = [gradients[parameter] for parameter in parameters]
                    there = remote.rpc_sync().gradients(context)
                passes = []
                for one in range(size):
                    local.zero_grad()
                    other.zero_grad()
                    other(local(torch.full((2, 3), step + 0.5 * one, dtype=torch.double))).sum().backward()
                    passes.append([parameter.grad.clone() for layer in (local, other) for parameter in layer.parameters()])
                wanted = [sum(both) / size for both in zip(*passes)][:2] + passes[rank][2:]
                for i, (a, b) in enumerate(zip(found + there, wanted, strict=True)):
                    if not torch.allclose(a, b, atol=1e-12, rtol=0):
                        yield f"step {step}, gradient {i}"
                if not all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in parameters):
                    yield f"step {step}: .grad changed"

        for result in run(2, body, world=Native()):
            self.assertEqual(result, [], str(result))

    def test_a_pass_averages_the_modules_that_took_part_in_it_alone(self):
        folder = tempfile.mkdtemp()

        def body(rank, size):
            torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
            first, second = (torch.nn.parallel.DistributedDataParallel(Layer(seed)) for seed in (3, 7))
            x = [torch.full((2, 3), step + 0.5 * rank, dtype=torch.double) for step in (1, 2)]
            with autograd.context() as context:
                autograd.backward(context, [first(x[0]).sum()])
                again, other = first(x[1]).sum(), second(x[0]).sum()
                autograd.backward(context, [other])
                autograd.backward(context, [again])
                gradients = autograd.get_gradients(context)
                found = [gradients[parameter] for model in (first, second) for parameter in model.parameters()]
            torch.distributed.destroy_process_group()
            wanted = []
            for model, steps in ((Layer(3), (1, 2)), (Layer(7), (1,))):
                for step in steps:
                    for one in range(size):
                        (model(torch.full((2, 3), step + 0.5 * one, dtype=torch.double)).sum() / size).backward()
                wanted += [parameter.grad for parameter in model.parameters()]
            return [torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(found, wanted, strict=True)]

        for result in run(2, body, world=Native()):
            self.assertEqual(result, [True] * 4, str(result))

    def test_parameters_that_only_other_workers_used_get_their_averages_in_the_context(self):
        folder = tempfile.mkdtemp()

        def body(rank, size):
            found = []
            for backend in ("gloo", "torchspan"):
                torch.distributed.init_process_group(backend, f"file://{folder}/{backend}", rank=rank, world_size=size)
                model = torch.nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
                never = model.module.never.weight.grad = torch.ones(3, 3, dtype=torch.double)
                for step in range(1, 4):
                    with autograd.context() as context:
                        loss = rpc.rpc_sync(f"worker{1 - rank}", add, args=(model(branch_input(step, rank), rank == 0), 1.0)).sum()
                        autograd.backward(context, [loss])
                        gradients = autograd.get_gradients(context)
                        found.append([gradients.get(parameter) for parameter in model.parameters()])
                        found[-1].append([parameter.grad is None for parameter in model.parameters()])
                found.append(torch.equal(model.module.never.weight.grad, never))
                torch.distributed.destroy_process_group()
            return found

        wanted = []
        for step in range(1, 4):
            local = Branches()
            for one in range(2):
                (local(branch_input(step, one), one == 0).sum() / 2).backward()
            wanted.append([parameter.grad for parameter in local.parameters()])
        for result in run(2, body, world=Native()):
            self.assertNotIsInstance(result, Failed, result)
            for *steps, kept in (result[:4], result[4:]):
                self.assertTrue(kept)
                for (*gradients, untouched), expected in zip(steps, wanted, strict=True):
                    self.assertEqual(untouched, [True] * (len(expected) - 2) + [False, True])
                    for gradient, one in zip(gradients, expected, strict=True):
                        self.assertEqual(gradient is None, one is None)
                        self.assertTrue(one is None or torch.allclose(gradient, one, atol=1e-12, rtol=0))

    def test_a_second_pass_adds_to_averages_of_parameters_that_one_worker_uses_no_more(self):
        folder = tempfile.mkdtemp()

        def body(rank, size):
            found = []
            torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
            module = Branches()
            for _ in range(2):  # a module may be wrapped again
                model = torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
                with autograd.context() as context:
                    autograd.backward(context, [model(branch_input(1, rank), True).sum()])
                    autograd.backward(context, [model(branch_input(2, rank), rank == 0).sum()])
                    gradients = autograd.get_gradients(context)
                    found.append([gradients.get(parameter) for parameter in module.parameters()])
                del model
            torch.distributed.destroy_process_group()
            return found

        local = Branches()
        for one in range(2):
            (local(branch_input(1, one), True).sum() / 2).backward()
            (local(branch_input(2, one), one == 0).sum() / 2).backward()
        for result in run(2, body, world=Native()):
            self.assertNotIsInstance(result, Failed, result)
            for gradients in result:
                for gradient, parameter in zip(gradients, local.parameters(), strict=True):
                    self.assertEqual(gradient is None, parameter.grad is None)
                    self.assertTrue(gradient is None or torch.allclose(gradient, parameter.grad, atol=1e-12, rtol=0))

    def test_a_static_graph_is_refused_with_what_to_do(self):
        folder = tempfile.mkdtemp()

        def body(rank, size):
            torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
            model = torch.nn.parallel.DistributedDataParallel(Layer(3), static_graph=True)
            errors = []
            for _ in range(2):
                with autograd.context() as context:
                    loss = model(torch.ones(2, 3, dtype=torch.double)).sum()
                    errors.append(str(raised_by(lambda context=context, loss=loss: autograd.backward(context, [loss]))))
            torch.distributed.destroy_process_group()
            return errors

        for result in run(2, body, world=Native()):
            for text in result:
                self.assertRegex(text, "construct DistributedDataParallel of torch without static_graph")

    def test_a_fast_pass_that_stalls_names_the_tensors_that_were_sent(self):
        def body(size):
            with autograd.context() as context:
                x = torch.ones(2, dtype=torch.double, requires_grad=True)
                used = rpc.rpc_sync("worker1", add, args=(x, 1))
                rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
                stalled = raised_by(lambda: autograd.backward(context, [used.sum()], mode="fast", stall=0.2))
            with autograd.context() as context:
                used = rpc.rpc_sync("worker1", add, args=(x, 1))
                rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
                autograd.backward(context, [used.sum()])
                gradient = autograd.get_gradients(context)[x]
            return isinstance(stalled, errors.Error) and "worker1" in str(stalled), gradient.tolist(), x.grad is None

        self.assertEqual(run(2, at_rank_0(body), world=Native())[0], (True, [1.0, 1.0], True))

    def test_exceptions_in_backward_and_wrong_contexts_are_named(self):
        def body(size):
            unknown = raised_by(lambda: autograd.backward(100, [torch.ones(1, requires_grad=True).sum()]))
            mode = raised_by(lambda: autograd.backward(100, [], mode="slow"))
            with autograd.context():
                nested = raised_by(lambda: autograd.context().__enter__())
            return unknown.kind, isinstance(mode, ValueError), nested.kind

        self.assertEqual(run(2, at_rank_0(body), world=Native())[0], ("invalid", True, "invalid"))


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(6)
        return gradient * 2


def slowly_doubled(x):
    return SlowBackward.apply(x)


def interrupted(call):
    """What `call` raised when SIGINT came after half a second, and how long it took."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: B902  a KeyboardInterrupt is expected
        return type(error).__name__, time.monotonic() - started
    return "nothing", time.monotonic() - started


class WrongTimes(unittest.TestCase):
    def test_negative_times_are_refused_by_the_name_of_their_parameter(self):
        def body(size):
            counter = rpc.remote("worker1", Counter, args=(1,))
            x = torch.ones(1, requires_grad=True)
            layers = pipeline.Layers()
            layers.add(torch.nn.Linear, 2, 2)
            found = []
            with autograd.context() as context:
                for call in [
                    lambda: rpc.rpc_sync("worker1", add, args=(1, 2), timeout=-2),
                    lambda: rpc.rpc_async("worker1", torch.add, args=(x, x), timeout=-0.5),
                    lambda: rpc.remote("worker1", Counter, args=(1,), timeout=float("nan")),
                    lambda: counter.rpc_sync(timeout=-3).increase(),
                    lambda: counter.to_here(timeout=-4),
                    lambda: autograd.backward(context, [x.sum()], timeout=-5),
                    lambda: autograd.backward(context, [x.sum()], stall=-6),
                    lambda: rpc._set_rpc_timeout(-7),
                    lambda: rpc._all_gather(1, timeout=-8),
                    lambda: rpc.delay(-9),
                    lambda: rpc.shutdown(timeout=-10),
                    lambda: pipeline.Pipeline(layers, timeout=-11),
                    lambda: torchspan.CheckpointManager(tempfile.mkdtemp(), timeout=-12),
                ]:
                    error = raised_by(call)
                    found.append((type(error).__name__, str(error)))
            return found, rpc.rpc_sync("worker1", add, args=(1, 2), timeout=rpc.UNSET_TIMEOUT)

        found, answer = run(2, at_rank_0(body), world=Native())[0]
        self.assertEqual(answer, 3)
        names = ["timeout"] * 6 + ["stall", "rpc_timeout", "timeout", "seconds"] + ["timeout"] * 3
        values = ["-2", "-0.5", "nan", "-3", "-4", "-5", "-6", "-7", "-8", "-9", "-10", "-11", "-12"]
        for (kind, text), name, value in zip(found, names, values, strict=True):
            self.assertEqual((kind, text), ("ValueError", f"torchspan: {name} is {value}; expected a number of seconds, 0 or more"))

    def test_negative_times_of_a_worker_are_refused_before_it_joins(self):
        wrong = raised_by(lambda: rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=rpc.Options(rpc_timeout=-1)))
        self.assertRegex(str(wrong), "torchspan: rpc_timeout is -1; expected a number of seconds, 0 or more")

    def test_a_pickle_that_is_too_large_is_refused(self):
        class Large(io.BytesIO):
            def getvalue(self):
                return bytes(2**32)  # takes no memory until it is read

        class LargePickles(Native):
            def begin(self):
                with unittest.mock.patch("io.BytesIO", Large):
                    super().begin()

        def body(rank, size):
            error = raised_by(lambda: rpc.rpc_sync("worker0", identity, args=({1, 2},)))
            return type(error).__name__, str(error)

        kind, text = run(1, body, world=LargePickles())[0]
        self.assertEqual(kind, "ValueError")
        self.assertRegex(text, "a value with 4294967296 pickled bytes cannot be sent: send fewer than 2\\^32")


class Interrupts(unittest.TestCase):
    def check_interrupt(self, found):
        kind, seconds = found
        self.assertEqual(kind, "KeyboardInterrupt")
        self.assertLess(seconds, 3)

    def test_a_backward_ends_and_the_worker_goes_on(self):
        def body(rank, size):
            if rank == 1:
                return None
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context:
                loss = rpc.rpc_sync("worker1", slowly_doubled, args=(x,)).sum()
                found = interrupted(lambda: autograd.backward(context, [loss]))
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("worker1", add, args=(x, x)).sum()])
                return found, autograd.get_gradients(context)[x].tolist()

        found, gradients = run(2, body, world=Native())[0]
        self.check_interrupt(found)
        self.assertEqual(gradients, [2.0, 2.0])

    def test_a_shutdown_ends_and_the_process_can_join_again(self):
        def body(rank, size):
            if rank == 1:
                time.sleep(6)
                error = raised_by(rpc.shutdown)
                return type(error).__name__, str(error)
            found = interrupted(rpc.shutdown)
            without = raised_by(rpc.get_worker_info)
            store = "file://" + tempfile.mkdtemp() + "/store"
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.Options(init_method=store))
            answer = rpc.rpc_sync("alone", add, args=(1, 2))
            rpc.shutdown()
            return found, type(without).__name__, answer

        (found, without, answer), (kind, text) = run(2, body, world=Native())
        self.check_interrupt(found)
        self.assertEqual((without, answer, kind), ("RuntimeError", 3, "DisconnectedError"))
        self.assertRegex(text, "worker0.*was interrupted in torchspan.rpc.shutdown")

    def test_a_shutdown_ends_while_a_function_runs(self):
        def body(rank, size):
            if rank == 0:
                error = raised_by(rpc.rpc_async("worker1", wait_a_little, args=(20,)).wait)
                return type(error).__name__, str(error)
            time.sleep(0.5)
            return interrupted(rpc.shutdown)

        (kind, text), (raised, seconds) = run(2, body, world=Native(destroy=False))
        self.assertEqual((kind, raised), ("DisconnectedError", "KeyboardInterrupt"))
        self.assertRegex(text, "worker1.*was interrupted")
        self.assertLess(seconds, 9)


if __name__ == "__main__":
    unittest.main()
