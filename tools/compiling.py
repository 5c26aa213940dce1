"""How the check tools call compilers: flags and precompiled headers from the build's compile_commands.json, two jobs at a
time, and a cache, keyed by content, of what was found clean and of the tools' own precompiled headers."""
import concurrent.futures
import contextlib
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
UNUSED_DAYS = 30  # entries of the cache that no run has used for this long are removed
TORCH_PREFIXES = ("ATen/", "c10/", "caffe2/", "torch/")
FRONT_END = re.compile(r"torch/(torch|nn|optim)")  # as in cmake/TorchspanTorch.cmake
LIBTORCH_FRONT_END = Path("/usr/include/torch/csrc/api/include")


class Flags:
    """The preprocessor flags of a file, without what belongs to one compiler, one machine or the build itself; and the
    build's precompiled headers."""

    def __init__(self, root):
        self.root = root
        self.known = {}
        self.unit = {}  # the unity source that a source is compiled in
        self.torch = [f"-isystem{LIBTORCH_FRONT_END}"] if LIBTORCH_FRONT_END.is_dir() else []
        self.precompiled = {}  # by target
        database = root / "build" / "dev" / "compile_commands.json"
        for entry in json.loads(database.read_text()) if database.is_file() else []:
            words, source = shlex.split(entry["command"]), Path(entry["file"])
            flags = self._portable(words)
            if source.name == "cmake_pch.hxx.cxx":
                target = source.parent.name.removesuffix(".dir")
                self.precompiled[target] = BuildHeader(root, Path(entry["directory"]), words)
                if target == "torchspan_torch_whole_room":
                    self.torch = flags
                continue
            for path in self._sources_of(source):
                self.known[path] = flags
                self.unit[path] = entry["file"]

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
        return self._with_ours(self.known.get(str(path)) or self._of_neighbour(path) or (self.torch if torch else []))

    def torch_only(self):
        """Those of a file that uses nothing but LibTorch."""
        return self._with_ours(self.torch)

    def _with_ours(self, extra):
        ours = ["-std=c++20", "-Iinclude", "-Isrc", "-I."]
        return ours + [flag for flag in dict.fromkeys(extra) if flag not in ours]


class BuildHeader:
    """A precompiled header of the build: its compiler, the options of a source that uses it, and what determines it."""

    def __init__(self, root, folder, words):
        self.root, self.folder = root, folder
        self.compiler, *words = words
        self.output = words[words.index("-o") + 1]
        self.flags = []
        self.below = None  # the header that this one builds upon
        if "-include-pch" in words:
            at = words.index("-include-pch") - 1
            self.below = words[at + 3]
            del words[at:at + 4]
        skip = 0
        for first, second in zip(words, words[1:] + [""]):
            if skip:
                skip -= 1
            elif first in ("-o", "-c", "-x") or (first, second) == ("-Xclang", "-emit-pch"):
                skip = 1
            elif first != "-fpch-instantiate-templates":
                self.flags.append(first)
        if self.output.endswith(".pch"):
            self.flags += ["-Xclang", "-include-pch", "-Xclang", str(folder / self.output)]

    def salt(self):
        """The same in all clones: the options, and the headers that it and the one below include."""
        texts = [(self.folder / output).with_suffix("") for output in (self.output, self.below) if output]
        named = "".join(text.read_text() for text in texts if text.is_file())
        ours = [Path(path) for path in re.findall(r'#include "(.*)"', named) if Path(path).is_file()]
        return "\n".join([*self.flags, named]).replace(str(self.root), "") + "".join(path.read_text() for path in ours)

    def build(self):
        """Builds it if it is missing or stale. Returns what ninja says if that fails."""
        done = subprocess.run(["ninja", "-C", str(self.folder), self.output], capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).strip() if done.returncode else ""


def _sees(root, hashes, path, matches):
    hashes.of(path)
    seen, waiting = set(), [Path(path)]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if any(matches(include.path) for include in hashes.includes[current]):
            return True
        waiting.extend(hashes.links[current])
    return False


def uses_torch(root, hashes, path):
    """Whether a file sees a LibTorch header, itself or through what it includes."""
    return _sees(root, hashes, path, lambda name: name.startswith(TORCH_PREFIXES))


def uses_front_end(root, hashes, path):
    """Whether a file sees LibTorch's modules or optimizers, itself or through what it includes."""
    return _sees(root, hashes, path, FRONT_END.match)


def cache_folder(name):
    """The folder `name` of the cache, without the entries that no run has used for UNUSED_DAYS."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TORCHSPAN_CHECK_CACHE") or Path(home) / "torchspan-check") / name
    folder.mkdir(parents=True, exist_ok=True)
    remove_unused(folder, UNUSED_DAYS)
    return folder


def remove_unused(folder, days, prefix=""):
    """Removes the files that were last touched before; those with the same stem belong together."""
    used = {}
    for path in Path(folder).glob(prefix + "*"):
        with contextlib.suppress(FileNotFoundError):  # another run removes files too
            used[path] = path.stat().st_mtime
    oldest = time.time() - days * 24 * 3600
    kept = {path.stem for path, last in used.items() if last >= oldest}
    for path in used:
        if path.stem not in kept:
            path.unlink(missing_ok=True)


class CleanCache:
    """Remembers, across clones and builds, which content was found clean under which tool and flags."""

    def __init__(self, tool):
        self.folder = cache_folder(tool)

    def knows(self, key):
        known = (self.folder / key).is_file()
        if known:
            self.add(key)  # it was used
        return known

    def add(self, key):
        (self.folder / key).touch()


class Precompiler:
    """Makes precompiled headers for clang and keeps them in the cache."""

    def __init__(self, compiler, root):
        self.compiler, self.root = compiler, root
        self.version = version_of(compiler)
        self.folder = cache_folder("precompiled")

    def make(self, name, text, flags):
        """A precompiled header of `text`; None (and a slower run) if it cannot be made. Removes those of the same name that
        no run has used for a day."""
        if "clang" not in self.version:
            return None
        key = hashlib.sha256("\n".join([self.version, libtorch_version(), *flags, text]).encode()).hexdigest()
        output = self.folder / f"{name}-{key}.pch"
        if output.is_file() and self._loads(output, flags):
            output.touch()
        elif not self._compile(output, text, flags):
            return None
        remove_unused(self.folder, 1, f"{name}-")
        return output

    def _compile(self, output, text, flags):
        header, fresh = output.with_suffix(".h"), output.with_suffix(f".{os.getpid()}")
        if not header.is_file():
            header.write_text(text)
        command = [self.compiler, *flags, "-fpch-instantiate-templates", "-x", "c++-header", str(header), "-o", str(fresh)]
        done = subprocess.run(command, cwd=self.root, capture_output=True, check=False)
        if done.returncode == 0:
            fresh.replace(output)
        fresh.unlink(missing_ok=True)
        return done.returncode == 0

    def _loads(self, output, flags):
        """False if the compiler rejects it, for example because a system header changed."""
        command = [self.compiler, *flags, "-include-pch", str(output), "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, cwd=self.root, capture_output=True, check=False).returncode == 0


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
