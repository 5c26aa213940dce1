"""How the check tools call compilers: flags from the build's compile_commands.json, two jobs at a time, and a
cache of what was found clean, keyed by content."""
import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

from source_tree import ContentHash, includes_of, read

JOBS = 2
LAST_COMMITS = 20
TORCH_PREFIXES = ("ATen/", "c10/", "caffe2/", "torch/")
LIBTORCH_FRONT_END = Path("/usr/include/torch/csrc/api/include")


class Flags:
    """The preprocessor flags of a file, without what belongs to one compiler, one machine or the build itself."""

    def __init__(self, root):
        self.root = root
        self.known = {}
        self.unit = {}  # the unity source that a source is compiled in
        self.torch = [f"-isystem{LIBTORCH_FRONT_END}"] if LIBTORCH_FRONT_END.is_dir() else []
        database = root / "build" / "dev" / "compile_commands.json"
        for entry in json.loads(database.read_text()) if database.is_file() else []:
            flags = self._portable(shlex.split(entry["command"]))
            for path in self._sources_of(Path(entry["file"])):
                self.known[path] = flags
                self.unit[path] = entry["file"]
                if path == "cmake/torch_pch.cpp":
                    self.torch = flags

    def _sources_of(self, path):
        """The source itself, or those that a unity source includes."""
        if path.parent.name != "Unity" or not path.is_file():
            return [os.path.relpath(path, self.root)]
        return [os.path.relpath(name, self.root)
                for name in re.findall(r'^#include "(.*)"$', path.read_text(), re.MULTILINE)]

    def _portable(self, words):
        kept = []
        for flag, value in zip(words, words[1:] + [""]):
            if flag in ("-isystem", "-I", "-D"):
                kept.append(flag + self._relative(value))
            elif flag.startswith(("-D", "-isystem/", "-I")):
                kept.append(self._relative(flag))
        return kept

    def _relative(self, text):
        return text.replace(f"{self.root}/", "").replace(str(self.root), ".")

    def _of_neighbour(self, path):
        """For a header of the examples, which have their own include folder: a source in the same folder."""
        folder = str(Path(path).parent) + "/"
        if not folder.startswith("examples/"):
            return None
        return next((flags for known, flags in self.known.items() if known.startswith(folder)), None)

    def of(self, path, torch):
        extra = self.known.get(str(path)) or self._of_neighbour(path) or (self.torch if torch else [])
        ours = ["-std=c++20", "-Iinclude", "-Isrc", "-I."]
        return ours + [flag for flag in dict.fromkeys(extra) if flag not in ours]


def uses_torch(root, hashes, path):
    """Whether a file sees a LibTorch header, itself or through what it includes."""
    hashes.of(path)
    seen, waiting = set(), [Path(path)]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if any(include.path.startswith(TORCH_PREFIXES) for include in includes_of(read(root, current))):
            return True
        waiting.extend(hashes.links.get(current, []))
    return False


class CleanCache:
    """Remembers, across clones and builds, which content was found clean under which tool and flags."""

    def __init__(self, tool):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = Path(os.environ.get("TORCHSPAN_CHECK_CACHE") or Path(home) / "torchspan-check") / tool

    def knows(self, key):
        return (self.folder / key).is_file()

    def add(self, key):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / key).touch()


def _git(root, *words):
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def changed_files(root):
    """Names of files that changed since the merge base with origin/main or, if that is HEAD itself, in the last commits;
    uncommitted changes count too. None without a git history."""
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    base = _git(root, "merge-base", "HEAD", "origin/main")
    last = _git(root, "rev-list", f"--max-count={LAST_COMMITS + 1}", "HEAD")
    if not base or base == head:
        base = last[-1:]
    at_root = len(last) <= LAST_COMMITS
    names = set(_git(root, "ls-files")) if at_root and base == _git(root, "rev-list", "--max-parents=0", "HEAD")[-1:] \
        else set(_git(root, "diff", "--name-only", base[0]))
    return names | set(_git(root, "ls-files", "--others", "--exclude-standard"))


def changed_first(root, paths):
    changed = changed_files(root) or set()
    return sorted(paths, key=lambda path: (str(path) not in changed, path))


def tell_skipped(tool, skipped, of, seconds):
    if skipped:
        print(f"{tool}: note: {len(skipped)} of {of} files were not reached within {seconds:.0f} s; run it again to "
              f"continue, or without a limit (0): {' '.join(sorted(map(str, skipped)))}")


def version_of(*command):
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout


def libtorch_version():
    header = LIBTORCH_FRONT_END / "torch" / "version.h"
    return hashlib.sha256(header.read_bytes()).hexdigest() if header.is_file() else "none"


def make_hashes(root, *salt):
    return ContentHash(root, "\n".join([*salt, libtorch_version()]))


def run_all(tasks, work, seconds=None):
    """Yields (task, result of work(task)) as they end, JOBS at a time; (task, None) for tasks that were not
    started when `seconds` were over."""
    start = time.monotonic()

    def bounded(task):
        return None if seconds and time.monotonic() - start > seconds else work(task)

    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        running = {pool.submit(bounded, task): task for task in tasks}
        for ended in concurrent.futures.as_completed(running):
            yield running[ended], ended.result()
