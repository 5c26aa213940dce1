"""`make tarball`: two checkouts of one commit give the same bytes, and the tarball has all files of the commit."""
import os
import shutil
import subprocess
import tarfile
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **more):
    return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout


@unittest.skipUnless((ROOT / ".git").exists() and shutil.which("git"), "the sources are not a checkout")
class Tarball(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.first_checkout = cls.checkout("first")
        cls.first = cls.tarball_of(cls.first_checkout)

    @classmethod
    def checkout(cls, name):
        """A clone of the committed state, without sharing its times with the others."""
        path = cls.folder / name
        run("git", "clone", "--quiet", "--shared", str(ROOT), str(path))
        return path

    @staticmethod
    def tarball_of(checkout, **more):
        printed = run("make", "tarball", cwd=checkout, **more).split()[-1]
        return checkout / printed

    def test_two_checkouts_give_the_same_bytes(self):
        second_checkout = self.checkout("a/second")
        for path in second_checkout.rglob("*"):
            if path.is_file() and ".git" not in path.parts:
                os.utime(path, (1, 1))
        os.chmod(second_checkout / "CMakeLists.txt", 0o600)
        (second_checkout / "not_committed.txt").write_text("left out")
        second = self.tarball_of(second_checkout, preexec_fn=lambda: os.umask(0o077),
                                 env={**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C"})
        self.assertEqual(self.first.name, second.name)
        self.assertEqual(self.first.read_bytes(), second.read_bytes())

    def test_it_contains_the_commit_and_nothing_else(self):
        with tarfile.open(self.first) as archive:
            members = archive.getmembers()
        top = members[0].name.split("/")[0]
        self.assertRegex(top, r"^torchspan-\d+\.\d+\.\d+$")
        files = {member.name.removeprefix(top + "/") for member in members if not member.isdir()}
        self.assertEqual(files, set(run("git", "-C", str(self.first_checkout), "ls-files").splitlines()))
        self.assertEqual({(member.uid, member.uname) for member in members}, {(0, "root")})
        self.assertEqual(len({member.mtime for member in members}), 1)


if __name__ == "__main__":
    unittest.main()
