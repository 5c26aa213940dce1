"""Runs PyTorch's own suites of torch.distributed.rpc, from its wheel, over TorchSpan.

    python tests/python/torch_rpc_suite.py [--tensorpipe | --installed] [--part 1/4] [--log FILE] [suite.test or test...]

Without --tensorpipe, those that torch runs with every agent; with it, those that torch runs with its own alone. With
--installed, the first ones over torchspan.rpc.install(): TorchSpan's engine in place of torch's. Prints a
line for each test that fails, with the failure of a named one, and the counts. Exit code 1 if a test fails that is not in
KNOWN.
"""

import os
import pathlib
import unittest

import torch_suite

HERE = pathlib.Path(__file__).parent

# Tests that do not pass, with the reason.
KNOWN = {
    "test_set_and_get_num_worker_threads": "makes options of torch's own agent",
    "test_tensorpipe_set_default_timeout": "makes options of torch's own agent",
}


def main():
    parser = torch_suite.parser(__doc__)
    parser.add_argument("--tensorpipe", action="store_true")
    parser.add_argument("--installed", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch.multiprocessing
    from torch.distributed import rpc

    import torchspan

    if arguments.installed:
        torchspan.rpc.install()
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    class Fixture(RpcAgentTestFixture):
        @property
        def rpc_backend(self):
            return rpc.backend_registry.BackendType["TORCHSPAN"]

        @property
        def rpc_backend_options(self):
            return rpc.backend_registry.construct_rpc_backend_options(self.rpc_backend, init_method=self.init_method)

        def get_shutdown_error_regex(self):
            return "torchspan: "

        def get_timeout_error_regex(self):
            return "RPC ran for more than"

    class Installed(Fixture):
        @property
        def rpc_backend_options(self):
            return torchspan.rpc.Options(init_method=self.init_method)

        def get_timeout_error_regex(self):
            return "timed out"

    class Forked(MultiProcessTestCase):
        """In place of spawned processes, so that a test does not take the seconds that `import torch` takes."""

        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    rpc_utils.SpawnHelper = Forked
    suites = rpc_utils.TENSORPIPE_TESTS if arguments.tensorpipe else rpc_utils.GENERIC_TESTS
    fixture = TensorPipeRpcAgentTestFixture if arguments.torch else Installed if arguments.installed else Fixture
    classes = rpc_utils.generate_tests("", fixture, suites, __name__)
    globals().update(classes)

    def chosen(suite, name):
        return not arguments.tests or any(test in (suite, name, f"{suite}.{name}") for test in arguments.tests)

    known = {} if arguments.torch else KNOWN
    if arguments.installed:
        known = dict(line.split(": ", 1) for line in (HERE / "installed_known.txt").read_text().splitlines() if ": " in line)
    tests = [
        made(name)
        for suite, made in classes.items()
        for name in unittest.defaultTestLoader.getTestCaseNames(made)
        if chosen(suite, name)
    ]
    if arguments.installed and not arguments.tests:  # some of these wait for minutes
        print(f"not run, for the reasons in installed_known.txt: {sum(test.id().split('.', 1)[1] in known for test in tests)}")
        tests = [test for test in tests if test.id().split(".", 1)[1] not in known]
    title = "torch's suites of its own agent" if arguments.tensorpipe else "torch's suites of every agent"
    torch_suite.run(title, tests, known, arguments)


if __name__ == "__main__":
    main()
