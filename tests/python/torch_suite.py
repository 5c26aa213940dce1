"""Runs tests of PyTorch's own suites, and reports those that fail without a known reason."""

import argparse
import os
import sys
import unittest


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


def parser(description):
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--log", default=os.devnull, help="a file for what the tests print")
    made.add_argument("--torch", action="store_true", help="torch's own backend in place of TorchSpan, for comparison")
    made.add_argument("--part", default="1/1", help="of the tests: 2/4 is the second quarter")
    made.add_argument("tests", nargs="*", help="default: all")
    return made


def run(title, tests, known, arguments):
    """Ends the process, with exit code 1 if a test fails that is not in `known`, a dictionary of names and reasons."""
    part, parts = map(int, arguments.part.split("/"))
    tests = list(tests)
    tests = tests[len(tests) * (part - 1) // parts : len(tests) * part // parts]
    Report.rows = []
    say = os.fdopen(os.dup(1), "w")
    with open(arguments.log, "w", encoding="utf-8") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        unittest.TextTestRunner(stream=log, resultclass=Report, verbosity=0).run(unittest.TestSuite(tests))
    counts = {"ok": 0, "skipped": 0, "known": 0, "failed": 0}
    for outcome, name, text in Report.rows:
        outcome = "known" if outcome == "failed" and name in known else outcome
        counts[outcome] += 1
        if outcome == "failed":
            say.write(f"{name}: {reason_of(text)}\n{text if arguments.tests else ''}")
    say.write(f"{title}: " + ", ".join(f"{n} {what}" for what, n in counts.items()) + "\n")
    say.flush()
    sys.exit(1 if counts["failed"] else 0)
