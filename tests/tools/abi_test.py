"""What tools/compare-abi says of small libraries."""
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = "struct Options { int size; }; int run(const Options& o) { return o.size; } int stop() { return 0; }"


@unittest.skipUnless(shutil.which("abidiff"), "abidiff is not installed (tools/install-deps check)")
class CompareAbi(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.first = self.library(FIRST)

    def library(self, source, soname="libx.so.0.2", debug="-g"):
        path = self.folder / f"{len(list(self.folder.iterdir()))}.so"
        subprocess.run(["c++", debug, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-x", "c++", "-", "-o", path], check=True,
                       input=source, text=True)
        return path

    def compare(self, *others):
        """The exit code, and all that is printed."""
        done = subprocess.run([ROOT / "tools/compare-abi", self.first, *others, self.folder / "out"], capture_output=True,
                              text=True)
        return done.returncode, done.stdout + done.stderr

    def test_additions_are_compatible(self):
        code, output = self.compare(self.library(FIRST + " int more() { return 1; }"))
        self.assertEqual(code, 0, output)
        self.assertRegex(output, "libx.so.0.2: programs linked with '.*' run with")

    def test_a_function_that_is_missing_is_not(self):
        code, output = self.compare(self.library(FIRST.replace("stop", "halt")))
        self.assertEqual(code, 1, output)
        self.assertIn("1 Removed", output)
        self.assertIn("the ABI of libx.so.0.2 has changed", output)
        self.assertIn("stop", (self.folder / "out/report.txt").read_text())

    def test_another_layout_of_a_parameter_is_not(self):
        code, output = self.compare(self.library(FIRST.replace("int size;", "double limit; int size;")))
        self.assertEqual(code, 1, output)
        self.assertIn("1 Changed", output)

    def test_another_soname_permits_any_change(self):
        code, output = self.compare(self.library(FIRST.replace("stop", "halt"), "libx.so.0.3"))
        self.assertEqual(code, 0, output)
        self.assertIn("libx.so.0.2 has changed; programs are linked with libx.so.0.3 again", output)

    def test_without_debug_information_nothing_is_compared(self):
        code, output = self.compare(self.library(FIRST, debug="-g0"))
        self.assertEqual(code, 1, output)
        self.assertIn("has no debug information", output)

    def test_refuses_what_is_neither_a_commit_nor_a_library(self):
        code, output = self.compare("0" * 40)
        self.assertEqual(code, 1, output)
        self.assertIn("is neither a commit nor a library", output)


if __name__ == "__main__":
    unittest.main()
