"""Runs a compiler; after it made a precompiled header, writes a file beside it, named '….sum', with a hash of all that went
in: the compiler, its options, every header, and the hash of the precompiled header below it.

ccache takes this file for the header itself. Precompiled headers have hundreds of megabytes and contain the paths of the
build, so without it ccache would read all of them for each source, and sources behind two of them would have nothing in
common. Usage: precompile.py SOURCE_FOLDER COMPILER ARGUMENT...
"""
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

PRECOMPILED = (".pch", ".gch")


def without_header(command):
    """The command for the empty source that CMake compiles beside a header: without the header, which takes seconds to
    read."""
    text = "\0".join(command)
    return re.sub("\0-Xclang\0-include-pch\0-Xclang\0[^\0]*", "", text).split("\0")


def headers_of(dependencies):
    """The files of a makefile's rule, without its target."""
    words = re.split(r"(?<!\\)\s+", Path(dependencies).read_text().replace("\\\n", " ").partition(": ")[2])
    return {os.path.abspath(word) for word in words if word}


def checksum(source_folder, command, dependencies):
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(version.encode())
    build_folder = os.getcwd()

    def in_every_clone(text):
        return text.replace(build_folder, "BUILD").replace(source_folder, "SOURCE")

    for word in command[1:]:
        digest.update(in_every_clone(word).encode() + b"\0")
    for path in sorted(headers_of(dependencies), key=in_every_clone):
        path += ".sum" if path.endswith(PRECOMPILED) else ""
        # CMake's own header contains the path of ours.
        digest.update(Path(path).read_bytes().replace(source_folder.encode(), b"SOURCE"))
    return digest.hexdigest()


def main():
    source_folder, *command = sys.argv[1:]
    output = command[command.index("-o") + 1] if "-o" in command else ""
    if not output.endswith(PRECOMPILED):
        command = without_header(command)
    code = subprocess.run(command, check=False).returncode
    if code == 0 and output.endswith(PRECOMPILED):
        Path(output + ".sum").write_text(checksum(source_folder, command, command[command.index("-MF") + 1]))
    return code


if __name__ == "__main__":
    sys.exit(main())
