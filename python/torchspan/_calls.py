"""What the compiled module asks of Python: names of functions, exceptions, and results that come later; and the current worker."""

import atexit
import builtins
import collections
import contextlib
import copyreg
import functools
import importlib
import inspect
import pickle
import sys
import threading
import traceback
import types
import typing

import torch
from torch.jit._builtins import _find_builtin

from . import _C, errors

# The compiled module sets persistent_id and persistent_load of instances. Python 3.13.0 refuses that for pickle's own classes.
Pickler, Unpickler = pickle.Pickler, pickle.Unpickler
if sys.version_info[:3] == (3, 13, 0):

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return vars(self)["persistent_id"](value)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place):
            return vars(self)["persistent_load"](place)


# Functions of this package that other workers call, by name.
_OWN = {}
_current = []
_device_maps = {}
_joining = []
_callable = [None]  # functions=[…] of init_rpc()
# Whether this worker prints what its functions raise, as torch.distributed.rpc does.
_printing = []


def current_worker(otherwise="RPC has not been initialized. Call torchspan.rpc.init_rpc() first."):
    """The worker of this process; raises RuntimeError with the text `otherwise` if there is none."""
    if not _current:
        for joined in list(_joining):
            joined.wait()  # another worker's call has come before init_rpc() returned
    if not _current:
        raise RuntimeError(otherwise)
    return _current[0]


@contextlib.contextmanager
def joining(functions):
    """While a worker joins: others may call its functions before set_current_worker() is called, in the block."""
    joined = threading.Event()
    _callable[:], _joining[:] = [functions], [joined]
    try:
        yield
    finally:
        _joining.clear()
        joined.set()


def worker_of_reference():
    """The worker that owns a new reference."""
    return current_worker(
        "Current RPC agent is not set! Did you initialize the RPC framework (by calling torchspan.rpc.init_rpc())?"
    )


def has_worker() -> bool:
    return bool(_current)


def set_current_worker(worker, device_maps=None) -> None:
    """`device_maps`: pairs of devices, by the names of other workers."""
    _current[:] = [] if worker is None else [worker]
    _device_maps.clear()
    _device_maps.update(device_maps or {})


def device_map_of(name) -> dict:
    """The devices here and there in calls to that worker."""
    return dict(_device_maps.get(name, ()))


def at_exit(function) -> None:
    """Calls the function when this process ends. To be asked for when a process joins: since Python 3.13, multiprocessing makes
    a forked child forget what its parent asked for."""
    atexit.unregister(function)
    atexit.register(function)


def print_failures() -> None:
    """Prints what functions that others call raise, where they run."""
    _printing[:] = [True]


def pickles() -> bool:
    """Whether any function may be called, and values may be pickled."""
    return _callable[0] is None


def may_call_method(value, name) -> bool:
    """Whether others may call that method of a value behind a reference: its class or the method must be registered."""
    if pickles():
        return True
    method = getattr(type(value), name, None)
    return callable(method) and any(one is type(value) or one == method for one in _callable[0])


class RemoteError(RuntimeError):
    """An exception of a function on another worker whose type this process cannot make: its type's name and text."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from another worker: the traceback there."""

    def __init__(self, worker: str, text: str):
        super().__init__(worker, text)
        self._shown = f"on {worker}:\n{text}" if worker else text

    def __str__(self):
        return self._shown


class Later:
    """A result that is there when `future` completes."""

    def __init__(self, future):
        self.future = future


class Typed:
    """A function of rpc.typed(): what is called here, and its name and types for workers of C++."""

    def __init__(self, function, name, signature):
        functools.update_wrapper(self, function)
        self.function = function
        self.type = _C.TypedFunction(name or function.__name__, signature or _signature_of(function))
        self._parameters = inspect.signature(function)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def bound(self, args, kwargs):
        """The arguments in their order, with defaults."""
        bound = self._parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args


_WIRE_TYPES = {
    bool: "bool",
    int: "int64",
    float: "float64",
    str: "string",
    bytes: "bytes",  # a string in C++, as str is, whose values need not be UTF-8
    torch.Tensor: "Tensor",
    None: "void",
    type(None): "void",
}
_WIRE_TEMPLATES = {list: "vector", tuple: "tuple", dict: "map"}


def _signature_of(function) -> str:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    missing = [name for name in [*parameters, "return"] if name not in hints]
    if missing:
        raise TypeError(
            f"torchspan.rpc: {function.__qualname__} has no type for {', '.join(missing)}: annotate it, or give typed() the "
            "signature of the C++ function"
        )
    arguments = ", ".join(_wire_type(hints[name], function) for name in parameters)
    return f"({arguments}) -> {_wire_type(hints['return'], function)}"


def _wire_type(hint, function) -> str:
    try:
        known = _WIRE_TYPES.get(hint)
    except TypeError:  # not hashable
        known = None
    if known is not None:
        return known
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and len(parts) == 2 and type(None) in parts:
        return f"optional<{_wire_type(parts[0] if parts[1] is type(None) else parts[1], function)}>"
    if origin in _WIRE_TEMPLATES and parts and ... not in parts:
        return f"{_WIRE_TEMPLATES[origin]}<{', '.join(_wire_type(part, function) for part in parts)}>"
    raise TypeError(
        f"torchspan.rpc: {function.__qualname__} has a type {hint!r} that has no counterpart in C++: give typed() the signature"
    )


def own(function):
    """Makes a function of this package callable by other workers, whatever functions they registered."""
    _OWN[function] = f"torchspan:{function.__name__}"
    return function


class Hooks:
    """The hooks of a worker. `functions`: those that others may call; None: any that can be imported or pickled."""

    Error = staticmethod(errors.of_kind)
    Later = Later
    Typed = Typed

    def __init__(self, functions):
        self._pickles = functions is None
        self._names = dict(_OWN)
        for function in functions or ():
            name = f"{getattr(function, '__module__', None)}:{function.__qualname__}"
            if name in self._names.values():
                raise ValueError(f"torchspan.rpc: functions has two entries of the name {name}")
            self._names[function] = name
        self._functions = {name: function for function, name in self._names.items()}

    def name_of(self, function):
        try:
            name = self._names.get(function)
        except TypeError:  # cannot be hashed
            name = None
        if name is not None or not self._pickles:
            return name
        if isinstance(function, torch.jit.ScriptFunction):
            named = getattr(function, "_torchdynamo_inline", None)  # what was compiled
        elif isinstance(function, (types.FunctionType, types.BuiltinFunctionType, type)):
            named = function
        else:
            return None
        name = f"{getattr(named, '__module__', None)}:{getattr(named, '__qualname__', None)}"
        return name if _imported(name) is function else None

    def function_of(self, name):
        known = self._functions.get(name)
        if known is not None:
            return known
        if not self._pickles:
            raise ValueError(
                f"torchspan: {name} is not among the functions=[…] with which this worker was started: add it there, on all workers"
            )
        module, _, path = name.partition(":")
        if module not in sys.modules:
            importlib.import_module(module)
        function = _imported(name)
        if function is None:
            raise AttributeError(
                f"module '{module}' has no attribute '{path}' on this worker: run the same program on all workers, and "
                "define the function at the top level of a module"
            )
        return function

    @staticmethod
    def operator_of(function):
        name = _find_builtin(function)
        return name if name is not None and name.startswith("aten::") else None

    @staticmethod
    def later(result, reply):
        if inspect.iscoroutine(result):
            return _run(result, reply)
        future = result.future if isinstance(result, Later) else result
        if not isinstance(future, torch._C.Future):
            return reply.fail(
                RuntimeError(
                    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                    f"but got {future} of type {type(future)}"
                )
            )
        return future.add_done_callback(lambda done: _answer(done, reply))

    @staticmethod
    def reducers():
        """Of types that torch pickles in calls only, such as RemoteModule."""
        internal = sys.modules.get("torch.distributed.rpc.internal")
        own = internal._internal_rpc_pickler._class_reducer_dict if internal is not None else None
        return collections.ChainMap(own, copyreg.dispatch_table) if own else None

    def describe(self, error):
        pickled = None
        # What ends a process, such as SystemExit, must not end the caller's.
        if self._pickles and isinstance(error, Exception):
            try:
                pickled = pickle.dumps(error)
                pickle.loads(pickled)
            except Exception:  # the text is all that can be sent
                pickled = None
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        trace = "".join(traceback.format_exception(kind, error, error.__traceback__))
        if _printing:
            print(f"On {_current[0].name if _current else 'this worker'}:\n{trace}", file=sys.stderr)
        return name, _text(error), trace.encode(errors="backslashreplace"), pickled

    def rebuild(self, description, worker):
        name, text, trace, pickled = description
        error = None
        if pickled is not None and self._pickles:
            try:
                error = pickle.loads(pickled)
            except Exception:  # a type that only the other worker has
                error = None
        if not isinstance(error, Exception):
            kind = getattr(builtins, name, None)
            try:
                error = kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else None
            except TypeError:  # such as UnicodeError, which takes more than a text
                error = None
        if error is None:
            error = RemoteError(f"{name} cannot be made here. Original exception on remote side was {name}: {text}")
        error.__cause__ = RemoteTraceback(worker, trace.decode())
        return error


def all_of(futures) -> list:
    """The results once all are there; raises the first failure then."""
    results, failure = [], None
    for future in futures:
        try:
            results.append(future.wait())
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def _text(error) -> str:
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:  # of the exception's own __str__
        return "(its text cannot be made)"


def _imported(name):
    """The object of that name in a module that is loaded, or None."""
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _answer(done, reply) -> None:
    try:
        value = done.value()
    except BaseException as error:
        reply.fail(error)
    else:
        reply.succeed(value)


def _run(coroutine, reply) -> None:
    """Runs the coroutine of a function until it awaits a call; it continues on a thread of the pool, in its own environment."""

    def step(_=None):
        try:
            awaited = coroutine.send(None)
            while not isinstance(awaited, torch._C.Future):
                awaited = coroutine.throw(
                    TypeError(
                        f"torchspan: a function that other workers call awaits {awaited!r}: it can await calls, and delay() of "
                        "torchspan.rpc"
                    )
                )
        except StopIteration as end:
            reply.succeed(end.value)
        except BaseException as error:
            reply.fail(error)
        else:
            awaited.add_done_callback(_C.bound(step))

    step()
