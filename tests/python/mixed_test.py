"""Workers of C++ and of Python in one world: functions by name and types, in both directions.

The worker of C++ is tests/python/cpp_worker.cpp, built against Debian's LibTorch.
"""

import os
import pathlib
import signal
import subprocess
import unittest

import torch

from torchspan import autograd, errors, rpc

from processes import LIMIT, Failed, Native, free_port, run

CPP_WORKER = pathlib.Path(
    os.environ.get("TORCHSPAN_CPP_WORKER", pathlib.Path(__file__).parents[2] / "build" / "dev" / "bin" / "cpp_worker")
)


@rpc.typed
def mean_of(tensor: torch.Tensor, dim: "int | None" = None) -> float:
    """Served by the worker of C++, as are the next ones."""


@rpc.typed
def sorted_words(words: "list[str]") -> "list[str]": ...


@rpc.typed
def totals(tensors: "dict[str, torch.Tensor]") -> "dict[str, float]": ...


@rpc.typed(signature="(pair<int32, string>, bool, float32, uint8) -> tuple<string, int32, bool>")
def swapped(pair, flag, third, small): ...


@rpc.typed
def overloaded(text: str) -> None: ...


@rpc.typed
def process_of_cpp() -> int: ...


@rpc.typed
def cubed(tensor: torch.Tensor) -> torch.Tensor: ...


@rpc.typed
def ask(worker: str) -> "list[str]": ...


@rpc.typed
def gradient_through(worker: str, x: torch.Tensor) -> torch.Tensor: ...


@rpc.typed
def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor


@rpc.typed
def joined(words: "list[str]", between: "str | None") -> str:
    return ("" if between is None else between).join(words)


@rpc.typed
def failing(text: str) -> None:
    raise ValueError(text)


@rpc.typed
async def late(tensor: torch.Tensor) -> torch.Tensor:
    await rpc.delay(0.01)
    return tensor + 1


new_counter = rpc.typed(lambda start: None, name="Counter", signature="new (int64) -> Counter")
add = rpc.typed(lambda counter, number: None, name="Counter.add", signature="Counter::(int64) -> int64")
sum_of = rpc.typed(lambda one, other: None, name="sum_of", signature="(RRef<Counter>, RRef<Counter>) -> int64")
another = rpc.typed(lambda: None, name="another", signature="() -> RRef<Counter>")


@rpc.typed
def of_another_type(tensor: torch.Tensor) -> str:
    return tensor


@rpc.typed
def types_of(data: bytes, text: str) -> "list[str]":
    return [type(data).__name__, type(text).__name__]


@rpc.typed(name="sorted")
def sorted_bytes(words: "list[bytes]") -> "list[bytes]": ...


@rpc.typed(name="sorted", signature="(vector<bytes>) -> vector<string>")
def sorted_to_text(words): ...


sorted_of_cpp = rpc.typed(sorted_words.function, name="sorted")
SERVED = [scaled, joined, failing, late, of_another_type, types_of]


class Mixed(Native):
    """Rank 1 of a world whose rank 0 is the worker of C++."""

    rank_of_python = 1

    def begin(self):
        rpc.init_rpc(
            f"python{self.rank_of_python}",
            rpc_backend_options=rpc.Options(init_method="torchspan://", rpc_timeout=self.timeout),
            functions=self.functions,
            typed=SERVED,
        )


class First(Mixed):
    """Rank 0 of such a world, which serves its store."""

    rank_of_python = 0


class MixedTest(unittest.TestCase):
    def in_world(self, body, world=Mixed, ends=0, **options):
        """What `body` returned on the worker of Python. `ends`: how the process of the other one ends."""
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        rank = world.rank_of_python
        cpp = subprocess.Popen(
            [str(CPP_WORKER)],
            env={**os.environ, **variables, "RANK": str(1 - rank), "TORCHSPAN_NAME": "cpp", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            (result,) = run(1, body, world=world(**options), environment=lambda _: {**variables, "RANK": str(rank)})
            _, text = cpp.communicate(timeout=LIMIT)
        finally:
            cpp.kill()
        self.assertNotIsInstance(result, Failed, result)
        self.assertEqual((cpp.returncode, text), (ends, ""))
        return result

    def test_python_calls_functions_of_cpp(self):
        def body(rank, size):
            x = torch.arange(6.0).reshape(2, 3)
            return [
                rpc.rpc_sync("cpp", mean_of, args=(x,)),
                rpc.rpc_sync("cpp", mean_of, args=(x,), kwargs={"dim": 0}),
                rpc.rpc_async("cpp", sorted_of_cpp, args=(["b", "a", "ü"],)).wait(),
                rpc.rpc_sync("cpp", totals, args=({"one": torch.ones(3), "two": torch.full((2,), 2)},)),
                rpc.rpc_sync(0, swapped, args=((7, "x"), True, 1, 255)),
                rpc.rpc_sync("cpp", cubed, args=(torch.tensor([2, 3]),)).tolist(),
            ]

        for functions in (None, []):
            self.assertEqual(
                self.in_world(body, functions=functions),
                [2.5, 7.5, ["a", "b", "ü"], {"one": 3.0, "two": 4.0}, ("x1.000000", 262, False), [8, 27]],
            )

    def test_the_declared_type_decides_between_bytes_and_str(self):
        def body(rank, size):
            def error_of(function, *args):
                try:
                    return rpc.rpc_sync("cpp", function, args=args)
                except errors.InvalidError as error:
                    return str(error)

            me = rpc.get_worker_info()
            return (
                rpc.rpc_sync("cpp", sorted_bytes, args=([b"b", b"a", b"\xff"],)),
                rpc.rpc_sync("cpp", sorted_to_text, args=([b"b", b"a"],)),
                [rpc.rpc_sync(me, types_of, args=(data, "b")) for data in (b"a", b"\xff")],
                error_of(sorted_to_text, [b"\xff"]),
                error_of(sorted_bytes, ["a"]),
                error_of(sorted_of_cpp, [b"a"]),
            )

        from_bytes, to_text, types, not_text, str_as_bytes, bytes_as_str = self.in_world(body)
        self.assertEqual((from_bytes, to_text), ([b"a", b"b", b"\xff"], ["a", "b"]))
        self.assertEqual(types, [["bytes", "str"]] * 2)
        self.assertRegex(not_text, "the result of sorted: a string is not UTF-8: declare it as bytes")
        self.assertRegex(str_as_bytes, "argument 1 of sorted .*vector<bytes>")
        self.assertRegex(bytes_as_str, "argument 1 of sorted .*vector<string>")

    def test_cpp_calls_functions_of_python(self):
        def body(rank, size):
            return rpc.rpc_sync("cpp", ask, args=(rpc.get_worker_info().name,))

        for world in (Mixed, First):
            answers = self.in_world(body, world)
            self.assertEqual(answers[:5], ["7.500000", "a+b", "ab", "4.000000", "6.000000"])
            self.assertIn("ValueError: refused here", answers[5])

    def test_gradients_go_through_both(self):
        def body(rank, size):
            x = torch.tensor([1.0, -2.0], requires_grad=True)
            with autograd.context() as context:
                loss = (rpc.rpc_sync("cpp", cubed, args=(x,)) * 2).sum()
                autograd.backward(context, [loss])
                mine = autograd.get_gradients(context)[x]
            return mine.tolist(), rpc.rpc_sync("cpp", gradient_through, args=("python1", x.detach())).tolist()

        self.assertEqual(self.in_world(body), ([6.0, 24.0], [6.0, -12.0]))

    def test_errors_name_the_argument_the_function_and_the_kind(self):
        def body(rank, size):
            def fails(function, *args):
                try:
                    rpc.rpc_sync("cpp", function, args=args)
                except Exception as error:
                    return type(error).__name__, str(error)
                return "nothing", "was raised"

            @rpc.typed(name="mean_of")
            def other_types(tensor: torch.Tensor) -> float: ...

            failures = [
                fails(mean_of, [1.0]),
                fails(mean_of, torch.ones(1), 1.5),
                fails(sorted_of_cpp, ["a", 1]),
                fails(swapped, (2**31, "x"), True, 1.0, 0),
                fails(swapped, (1, "x"), 1, 1.0, 0),
                fails(swapped, (1, "x"), True, 1.0, 256),
                fails(totals, {1: torch.ones(1)}),
                fails(overloaded, "later"),
                fails(other_types, torch.ones(1)),
                fails(scaled, torch.ones(1), 2.0),
            ]
            try:
                rpc.rpc_sync(rpc.get_worker_info(), of_another_type, args=(torch.ones(1),))
            except errors.Error as error:
                failures.append((type(error).__name__, str(error)))
            failures.append(("works", str(rpc.rpc_sync("cpp", mean_of, args=(torch.ones(1),)))))
            return failures

        failures = self.in_world(body)
        for found, (kind, *words) in zip(
            failures,
            [
                ("InvalidError", "argument 1 of mean_of is a list", "Tensor"),
                ("InvalidError", "argument 2 of mean_of is a float", "optional<int64>"),
                ("InvalidError", "argument 1 of sorted is a list, or has parts", "vector<string>"),
                ("InvalidError", "argument 1 of swapped is a tuple", "pair<int32, string>"),
                ("InvalidError", "argument 2 of swapped is a int", "bool"),
                ("InvalidError", "argument 4 of swapped is a int", "uint8"),
                ("InvalidError", "argument 1 of totals is a dict", "map<string, Tensor>"),
                ("OverloadedError", "later"),
                ("InvalidError", "mean_of"),
                ("UnsupportedError", "cpp", "declares"),
                ("InvalidError", "the result of of_another_type is a Tensor", "string"),
                ("works", "1.0"),
            ],
            strict=True,
        ):
            self.assertEqual(found[0], kind, found)
            for word in words:
                self.assertIn(word, found[1])

    def test_objects_of_cpp_are_used_through_references(self):
        def body(rank, size):
            one = rpc.remote("cpp", new_counter, args=(1,))
            results = [rpc.rpc_sync(one.owner(), add, args=(one, 4)), rpc.rpc_async("cpp", add, args=(one, 2)).wait()]
            given = rpc.rpc_sync("cpp", another)
            results += [rpc.rpc_sync("cpp", add, args=(given, 1)), rpc.rpc_sync("cpp", sum_of, args=(one, given))]
            for call in (
                lambda: rpc.rpc_sync("cpp", new_counter, args=(1,)),
                lambda: one.to_here(),
                lambda: rpc.rpc_sync("cpp", add, args=(rpc.RRef(1), 2)),
                lambda: rpc.remote(rpc.get_worker_info(), new_counter, args=(1,))._get_future().wait(),
            ):
                try:
                    call()
                except errors.Error as error:
                    results.append(str(error))
            return results

        results = self.in_world(body)
        self.assertEqual(results[:4], [5, 7, 101, 108])
        for text, words in zip(
            results[4:],
            [
                "a Counter, the result of Counter, stays on its worker",
                "to_here() of a reference to an object of C++",
                "argument 1 of Counter.add is a RRef",
                "worker 'python1' does not have this function",
            ],
            strict=True,
        ):
            self.assertIn(words, text)

    def test_a_death_names_the_worker_of_cpp(self):
        def body(rank, size):
            os.kill(rpc.rpc_sync("cpp", process_of_cpp), signal.SIGKILL)
            try:
                rpc.rpc_sync("cpp", cubed, args=(torch.ones(1),))
            except errors.DisconnectedError as error:
                return str(error)

        self.assertIn("cpp (rank 0, pid", self.in_world(body, ends=-signal.SIGKILL, destroy=False))

    def test_signatures_that_python_cannot_have_are_refused(self):
        for signature, words in (
            ("(Tensor", "at ''"),
            ("(Carts) -> void", "the type 'Carts' in"),
            ("() -> ", "at ''"),
            ("(RRef<Carts) -> void", "at ' void'"),
            ("(void) -> void", "the type 'void' in"),
            ("(vector<int64, int64>) -> void", "the type 'vector' in"),
            ("(int64)->void", "at '->void'"),
            ("(map<vector<int64>, int64>) -> void", "the type 'map' in"),
            ("(map<Tensor, int64>) -> void", "the type 'map' in"),
            ("(" + "vector<" * 40 + "int64" + ">" * 40 + ") -> void", "is not a signature"),
        ):
            with self.assertRaisesRegex(ValueError, words.replace("(", "\\(")):
                rpc.typed(lambda: None, name="f", signature=signature)

        def without_types(x): ...

        with self.assertRaisesRegex(TypeError, "without_types has no type for x, return"):
            rpc.typed(without_types)

        def with_a_set(x: "set[int]") -> None: ...

        with self.assertRaisesRegex(TypeError, "has no counterpart in C"):
            rpc.typed(with_a_set)
        self.assertEqual(scaled(torch.ones(1), 2.0).item(), 2.0)
        self.assertEqual(late.type.signature, "(Tensor) -> Tensor")


if __name__ == "__main__":
    unittest.main()
