"""cmake/precompile.py: checksums of precompiled headers are the same in every clone, and change with what went in."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { cat "$(dirname "$0")/version"; exit; }
while [ $# -gt 0 ]; do
  case $1 in -o) output=$2 ;; -MF) rule=$2 ;; fail) exit 3 ;; esac
  shift
done
echo "compiled in $PWD" >"$output"
printf '%s: \\\\\\n ../ours.h \\\\\\n %s\\n' "$output" "$(dirname "$0")/theirs.h" >"$rule"
"""


class Precompile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        self.write("tools/compiler", COMPILER).chmod(0o755)
        self.write("tools/version", "compiler 1")
        self.write("tools/theirs.h", "int theirs;")
        # Before and behind the folder of the other headers, if they are sorted.
        self.clones = [self.root / "a", self.root / "z"]
        for clone in self.clones:
            self.write(clone / "ours.h", f'#include "{clone}/x.h"')
            (clone / "build").mkdir()

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def compile(self, clone, *options, output="x.pch"):
        command = [sys.executable, "-B", ROOT / "cmake" / "precompile.py", clone, self.root / "tools" / "compiler",
                   f"-I{clone}/include", *options, "-MF", f"{output}.d", "-o", output]
        return subprocess.run(command, cwd=clone / "build", check=False).returncode

    def checksum(self, clone, *options):
        self.assertEqual(self.compile(clone, *options), 0)
        return (clone / "build" / "x.pch.sum").read_text()

    def test_clones_have_the_same(self):
        self.assertEqual(*map(self.checksum, self.clones))

    def test_it_changes_with_options_headers_and_the_compiler(self):
        clone = self.clones[0]
        seen = {self.checksum(clone), self.checksum(clone, "-O3")}
        self.write(clone / "ours.h", "int ours;")
        seen.add(self.checksum(clone))
        self.write("tools/theirs.h", "long theirs;")
        seen.add(self.checksum(clone))
        self.write("tools/version", "compiler 2")
        seen.add(self.checksum(clone))
        self.assertEqual(len(seen), 5)

    def test_that_of_the_header_below_takes_its_place(self):
        clone = self.clones[0]
        self.write("tools/below.pch", "compiled somewhere")
        self.write("tools/below.pch.sum", "1")
        self.write("tools/compiler", COMPILER.replace("theirs.h", "below.pch"))
        seen = {self.checksum(clone)}
        self.write("tools/below.pch", "compiled elsewhere")
        seen.add(self.checksum(clone))
        self.assertEqual(len(seen), 1)
        self.write("tools/below.pch.sum", "2")
        seen.add(self.checksum(clone))
        self.assertEqual(len(seen), 2)

    def test_the_empty_source_is_compiled_without_the_header(self):
        self.write("tools/compiler", COMPILER.replace("while", 'echo "$*" >arguments\nwhile', 1))
        clone = self.clones[0]
        header = ("-Xclang", "-include-pch", "-Xclang", "x.pch")
        for output, kept in (("x.pch", True), ("x.o", False)):
            self.assertEqual(self.compile(clone, "-O1", *header, "-g", output=output), 0)
            arguments = (clone / "build/arguments").read_text()
            self.assertEqual(" ".join(("-O1", *header, "-g")) in arguments, kept)
            self.assertEqual("-O1 -g" in arguments, not kept)

    def test_objects_and_failures_have_none(self):
        self.assertEqual(self.compile(self.clones[0], output="x.o"), 0)
        self.assertEqual(self.compile(self.clones[0], "fail"), 3)
        self.assertEqual(list((self.clones[0] / "build").glob("*.sum")), [])


if __name__ == "__main__":
    unittest.main()
