"""Runs PyTorch's own suite of torch.distributed, from its wheel, over TorchSpan.

    python tests/python/torch_c10d_suite.py [--as gloo] [--world-size 3] [--log FILE] [test...]

Prints a line for each test that fails, with the failure of a named one, and the counts. Exit code 1 if a test fails that
is not in KNOWN.
"""

import argparse
import os
import sys
import tempfile
import unittest

# Tests that cannot pass, with the reason.
KNOWN = {
    "torchspan": {"test_ddp_logging_data_cpu": "compares the backend's name with torch's name for the kind"},
    "gloo": {
        "test_barrier_timeout_full_group": "asserts a text of Gloo's",
        "test_monitored_barrier_gloo": "asserts a text of Gloo's on ranks other than 0; ours names the late rank there, too",
        "test_monitored_barrier_gloo_rank_0_timeout": "asserts a time-out of ranks that have ended, which ours names",
    },
}


class Report(unittest.TextTestResult):
    """Collects (outcome, test, text of the failure)."""

    rows = None

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note("ok", test)

    def addError(self, test, error):
        super().addError(test, error)
        self.note("failed", test, self._exc_info_to_string(error, test))

    addFailure = addError

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note("skipped", test)

    def note(self, outcome, test, text=""):
        self.rows.append((outcome, test.id().rsplit(".", 1)[-1], text))


def reason_of(text):
    """The line of a failure that says most."""
    lines = [line for line in text.splitlines() if "Error" in line and "PYTORCH_PRINT" not in line]
    return lines[-1].strip() if lines else text.strip().splitlines()[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as", dest="name", choices=("torchspan", "gloo"), default="torchspan")
    parser.add_argument("--world-size", default="3")
    parser.add_argument("--log", default=os.devnull, help="a file for what the tests print")
    parser.add_argument("--torch", action="store_true", help="torch's own Gloo in place of TorchSpan, for comparison")
    parser.add_argument("tests", nargs="*", help="default: all")
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
    Report.rows = []
    say = os.fdopen(os.dup(1), "w")
    with open(arguments.log, "w", encoding="utf-8") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        unittest.TextTestRunner(stream=log, resultclass=Report, verbosity=0).run(
            unittest.TestSuite(TorchSuite(name) for name in names)
        )

    known = {} if arguments.torch else KNOWN[arguments.name]
    counts = {"ok": 0, "skipped": 0, "known": 0, "failed": 0}
    for outcome, name, text in Report.rows:
        outcome = "known" if outcome == "failed" and name in known else outcome
        counts[outcome] += 1
        if outcome == "failed":
            say.write(f"{name}: {reason_of(text)}\n{text if arguments.tests else ''}")
    say.write(f"torch's suite as {arguments.name}: " + ", ".join(f"{n} {what}" for what, n in counts.items()) + "\n")
    say.flush()
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
