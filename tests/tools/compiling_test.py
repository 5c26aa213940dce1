"""tools/compiling.py: the cache, and the order of files."""
import os
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))
import compiling  # noqa: E402  (from the folder of the tools)


class Cache(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def touch(self, name, days):
        (self.folder / name).touch()
        os.utime(self.folder / name, (time.time() - days * 24 * 3600,) * 2)

    def remaining(self):
        return sorted(path.name for path in self.folder.iterdir())

    def test_files_that_no_run_has_used_for_long_are_removed(self):
        for name, days in (("old", 31), ("new", 29), ("a.h", 31), ("a.pch", 1), ("b.h", 31), ("b.pch", 31)):
            self.touch(name, days)
        compiling.remove_unused(self.folder, compiling.UNUSED_DAYS)
        self.assertEqual(self.remaining(), ["a.h", "a.pch", "new"])

    def test_a_key_that_is_asked_for_is_used(self):
        with unittest.mock.patch.dict(os.environ, {"TORCHSPAN_CHECK_CACHE": str(self.folder.parent)}):
            cache = compiling.CleanCache(self.folder.name)
            self.touch("key", 29)
            self.assertEqual((cache.knows("key"), cache.knows("other")), (True, False))
        compiling.remove_unused(self.folder, 1)
        self.assertEqual(self.remaining(), ["key"])


class ChangedFirst(unittest.TestCase):
    def test_files_of_the_last_commits_come_before_older_ones(self):
        with tempfile.TemporaryDirectory() as folder:
            def git(*words):
                subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True,
                               capture_output=True)
            git("init", "-q")
            for name in ["a", *map(str, range(compiling.LAST_COMMITS + 1)), "z"]:
                (Path(folder) / name).write_text(name)
                git("add", name)
                git("commit", "-q", "-m", name)
            ordered = compiling.changed_first(Path(folder), [Path("a"), Path("z"), Path("new")])
            self.assertEqual(ordered, [Path("z"), Path("a"), Path("new")])
            (Path(folder) / "new").touch()
            ordered = compiling.changed_first(Path(folder), [Path("a"), Path("z"), Path("new")])
            self.assertEqual(ordered, [Path("new"), Path("z"), Path("a")])


if __name__ == "__main__":
    unittest.main()
