"""Runs the blocks of a document in a copy of the tree, each with a time limit."""
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from source_tree import files_of

# Stands for the reader's program: a job of a few seconds that reads checkpoints, whatever its arguments are.
program_stand_in = '#!/bin/sh\nexec tutorial "${TMPDIR:-/tmp}/checkpoints" 300\n'
# The environment of a block is that of the block before it.
PREFIX = 'set -euo pipefail\n[ ! -f "$SCRATCH/environment" ] || . "$SCRATCH/environment"\n'
SUFFIX = '\nexport -p >"$SCRATCH/environment"\n'


class Scratch:
    """A copy of the tree with the built programs in PATH; removed at the end."""

    def __init__(self, root, build):
        self.folder = Path(tempfile.mkdtemp(prefix="ts-docs-"))  # short: Unix sockets have short names
        self.work = self.folder / "work"
        for path in (path for path in files_of(root) if path.parts[0] != "build"):
            (self.work / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, self.work / path)
        for name in ("dev", "release"):
            (self.work / "build").mkdir(exist_ok=True)
            (self.work / "build" / name).symlink_to(build)
        for name in ("train", "build/train", "program"):
            (self.work / name).write_text(program_stand_in)
            (self.work / name).chmod(0o755)
        for program in (build / "bin").iterdir():
            if not (self.work / program.name).exists():
                (self.work / program.name).symlink_to(program)
        for name in ("home", "tmp"):
            (self.folder / name).mkdir()
        self.environment = {**os.environ, "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"),
                            "SCRATCH": str(self.folder), "PATH": f"{build / 'bin'}:{os.environ['PATH']}",
                            "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name, text):
        path = self.work / name
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)

    def run(self, script, limit):
        """The exit code, or None after the time limit, and the output."""
        log = self.folder / "output"
        with open(log, "wb") as sink:
            process = subprocess.Popen(["bash", "-c", PREFIX + script + SUFFIX], cwd=self.work, env=self.environment,
                                       stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Also what the block left in the background.
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        return code, log.read_text(errors="replace")


def missing_lines(expected, output):
    """Lines of a document that the output does not have. Numbers may differ, and '…' stands for any text."""
    def pattern(line):
        parts = re.split(r"(\d[\d.,]*|…|\.\.\.|\s+)", line.strip())
        return "".join(r"\d[\d.,]*" if part[:1].isdigit() else r".*" if part in ("…", "...") else
                       r"\s+" if part.isspace() else re.escape(part) for part in parts)
    return [line for line in expected if line.strip() and not re.search(pattern(line), output)]


def complaints_about(block, code, output, limit):
    ending = " / ".join(output.strip().splitlines()[-3:])
    if code is None:
        return [f"still running after {limit:g} s: {ending}"]
    if code != 0:
        return [f"exit code {code}: {ending}"]
    return [f"the output has no line like '{line.strip()}'" for line in missing_lines(block.output, output)]


def compare_help(build, subcommands, findings):
    """Each option that the static part knows must be in the command's help, so that the static part tells the truth."""
    program = build / "bin" / "torchspan"
    for name, options in subcommands.items() if program.is_file() else ():
        shown = subprocess.run([program, name, "--help"], capture_output=True, text=True, timeout=60, check=False).stdout
        for option in options:
            if option.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", shown):
                findings.add("tools/command_words.py", 1, f"'torchspan {name} --help' does not show '{option}'")


def run_document(root, build, limit, document, blocks, findings):
    if not (build / "bin" / "torchspan").is_file():
        findings.add(document, 1, f"{build}/bin has no torchspan: build the targets of 'tools/check-commands --programs'")
        return
    output = ""
    with Scratch(root, build) as scratch:
        for block in blocks:
            complaints = []
            if block.marks[:1] == ("file",):
                scratch.write(block.marks[1], block.text)
            elif block.is_run:
                code, output = scratch.run(block.script, limit)
                complaints = complaints_about(block, code, output, limit)
            elif (block.language, block.marks) == ("text", ("output",)):
                complaints = [f"the output of the commands above has no line like '{line.strip()}'"
                              for line in missing_lines(block.text.splitlines(), output)]
            for complaint in complaints:
                findings.add(document, block.line, complaint)
