"""Runs PyTorch's own suite of torch.distributed, from its wheel, over TorchSpan.

    python tests/python/torch_c10d_suite.py [--as gloo] [--world-size 3] [--log FILE] [test...]

Prints a line for each test that fails, with the failure of a named one, and the counts. Exit code 1 if a test fails that
is not in KNOWN.
"""

import os
import tempfile
import unittest

import torch_suite

# Tests that cannot pass, with the reason.
KNOWN = {
    "torchspan": {"test_ddp_logging_data_cpu": "compares the backend's name with torch's name for the kind"},
    "gloo": {
        "test_barrier_timeout_full_group": "asserts a text of Gloo's",
        "test_monitored_barrier_gloo": "asserts a text of Gloo's on ranks other than 0; ours names the late rank there, too",
        "test_monitored_barrier_gloo_rank_0_timeout": "asserts a time-out of ranks that have ended, which ours names",
    },
}


def main():
    parser = torch_suite.parser(__doc__)
    parser.add_argument("--as", dest="name", choices=("torchspan", "gloo"), default="torchspan")
    parser.add_argument("--world-size", default="3")
    arguments = parser.parse_args()

    os.environ["BACKEND"] = arguments.name
    os.environ["WORLD_SIZE"] = arguments.world_size
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not arguments.torch:
        import torchspan

        if arguments.name == "gloo":
            torchspan.use_for_gloo()

    import torch.multiprocessing
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # Forked, so that a test does not take the seconds that `import torch` takes.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    names = arguments.tests or unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    known = {} if arguments.torch else KNOWN[arguments.name]
    torch_suite.run(f"torch's suite as {arguments.name}", map(TorchSuite, names), known, arguments)


if __name__ == "__main__":
    main()
