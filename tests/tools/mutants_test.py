"""tools/mutants: what it changes, and that it restores what it changed."""
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """#include <a > b>
// a < b
bool less(int a, int b) {
  log("a < b");
  return a < b;
}
"""


class Mutants(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.source = self.root / "src/room/less.cpp"
        self.source.parent.mkdir(parents=True)
        self.source.write_text(SOURCE)
        (self.root / "src/room/less_test.cpp").write_text(SOURCE)
        (self.root / "build/bin").mkdir(parents=True)

    def program(self, script):
        path = self.root / "build/bin/room_test"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        # The program stands for what ninja would build.
        (self.root / "build/build.ninja").write_text("build room_test: phony\n")

    def run_tool(self, *arguments):
        command = [ROOT / "tools/mutants", "--root", self.root, "--build", self.root / "build", "--seed", "1", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_comparisons_and_calls_of_code_are_changed(self):
        lines = self.run_tool("--list", "--count", "9", "room").stdout.splitlines()
        self.assertEqual(lines[0], "seed 1")
        self.assertEqual(sorted(lines[1:3]), ['listed: src/room/less.cpp:4: log("a < b");  ->  nothing',
                                              "listed: src/room/less.cpp:5: return a < b;  ->  return a <= b;"])
        self.assertEqual(lines[3:], ["2 mutants"])

    def test_killed_and_surviving_mutants_are_told_apart_and_sources_restored(self):
        self.program(f"grep -q 'log(' {self.source}\n")  # notices the missing call only
        lines = self.run_tool("--count", "9", "room").stdout.splitlines()
        self.assertIn('killed by room_test: src/room/less.cpp:4: log("a < b");  ->  nothing', lines)
        self.assertIn("SURVIVED: src/room/less.cpp:5: return a < b;  ->  return a <= b;", lines)
        self.assertEqual(lines[-1], "1 of 2 mutants survived")
        self.assertEqual(self.source.read_text(), SOURCE)

    def test_a_program_that_never_ends_is_killed(self):
        self.program("sleep 60\n")
        lines = self.run_tool("--count", "1", "--limit", "1", "room").stdout.splitlines()
        self.assertEqual(lines[-1], "0 of 1 mutants survived")

    def test_a_room_without_sources_is_refused(self):
        done = self.run_tool("attic")
        self.assertEqual(done.returncode, 1)
        self.assertIn("src/attic has no source to change", done.stderr)


if __name__ == "__main__":
    unittest.main()
