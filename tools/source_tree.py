"""What the check tools share: the files of the tree, the room table, includes, and code without its comments."""
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CODE_SUFFIXES = (".h", ".cpp")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)")', re.MULTILINE)
TOKEN = re.compile(
    r"//[^\n]*"
    r"|/\*.*?\*/"
    r'|(?:u8|u|U|L)?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)


@dataclass
class Room:
    name: str
    torch: bool
    arrows: list = field(default_factory=list)
    of_tests: list = field(default_factory=list)
    reach: set = field(default_factory=set)
    reach_of_tests: set = field(default_factory=set)


@dataclass(frozen=True)
class Include:
    line: int
    path: str
    quoted: bool


class Findings:
    """Collects `file:line: text`, prints them in order, and becomes the exit code."""

    def __init__(self, tool):
        self.tool = tool
        self.rows = set()

    def add(self, path, line, text):
        self.rows.add((str(path), line, text))

    def finish(self, checked):
        for path, line, text in sorted(self.rows):
            print(f"{path}:{line}: {text}")
        verdict = f"{len(self.rows)} findings" if self.rows else "clean"
        print(f"{self.tool}: {checked}: {verdict}")
        return 1 if self.rows else 0


def fail(tool, text):
    print(f"{tool}: {text}", file=sys.stderr)
    sys.exit(2)


def files_of(root):
    """Paths relative to `root` of every file that git tracks or would add; without git, of every file."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=False
    )
    if listing.returncode == 0 and (Path(root) / ".git").exists():
        names = listing.stdout.splitlines()
    else:
        names = [str(path.relative_to(root)) for path in Path(root).rglob("*")]
    return [Path(name) for name in sorted(set(names)) if (Path(root) / name).is_file()]


def code_files(root, folders):
    return [path for path in files_of(root) if path.suffix in CODE_SUFFIXES and path.parts[0] in folders]


def read(root, path):
    return (Path(root) / path).read_text(encoding="utf-8", errors="replace")


def code_only(text):
    """`text` with comments and the insides of literals blanked; offsets and line numbers stay."""

    def blank(match):
        kept = re.sub(r"[^\n]", " ", match.group(0))
        return kept if match.group(0).startswith("/") else '"' + kept[1:-1] + '"'

    # Digit separators look like character literals.
    return TOKEN.sub(blank, re.sub(r"\b\d[\d'a-fA-FxX]*", lambda m: m.group(0).replace("'", "_"), text))


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def includes_of(text):
    """The #include lines outside comments."""
    without_comments = TOKEN.sub(
        lambda m: re.sub(r"[^\n]", " ", m.group(0)) if m.group(0).startswith("/") else m.group(0), text
    )
    return [
        Include(line_of(text, match.start(match.lastindex)), match.group(1) or match.group(2), match.group(1) is None)
        for match in INCLUDE.finditer(without_comments)
    ]


def room_table(root, tool):
    """Rooms by name, with their arrows closed transitively, from CMakeLists.txt's torchspan_room lines."""
    text = re.sub(r"#[^\n]*", "", read(root, "CMakeLists.txt"))
    rooms = {}
    for match in re.finditer(r"\btorchspan_room\s*\(([^)]*)\)", text):
        words = match.group(1).split()
        room = Room(words[0], torch=False)
        section = None
        for word in words[1:]:
            if word == "TORCH":
                room.torch = True
            elif word in ("ROOMS", "INLINE", "TESTS", "LINK", "PRIVATE"):
                section = word
            elif section in ("ROOMS", "INLINE"):
                room.arrows.append(word)
            elif section == "TESTS":
                room.of_tests.append(word)
        line = line_of(text, match.start())
        for other in room.arrows + room.of_tests:
            if other not in rooms:
                fail(tool, f"CMakeLists.txt:{line}: room '{room.name}' has an arrow to '{other}', which no line above "
                     "declares; rooms are listed bottom up, so an arrow upwards would be a cycle")
            if rooms[other].torch and not room.torch:
                fail(tool, f"CMakeLists.txt:{line}: torch-free room '{room.name}' has an arrow across the torch line "
                     f"to '{other}'; turn the arrow round or move the code")
        room.reach = {"core", room.name}.union(room.arrows, *(rooms[other].reach for other in room.arrows))
        room.reach_of_tests = room.reach.union(*(rooms[other].reach for other in room.of_tests))
        rooms[room.name] = room
    if not rooms:
        fail(tool, "no torchspan_room lines in CMakeLists.txt; run it at the root of the tree, or give --root")
    return rooms


class ContentHash:
    """Hashes a file together with everything of this tree that it includes, directly or not."""

    def __init__(self, root, salt):
        self.root = Path(root)
        self.salt = salt.encode()
        self.links = {}
        self.includes = {}

    def of(self, path):
        digest = hashlib.sha256(self.salt)
        for name in sorted(map(str, self.reached(path))):
            digest.update(name.encode() + b"\0" + (self.root / name).read_bytes() + b"\0")
        return digest.hexdigest()

    def reached(self, path):
        """The file, and everything of this tree that it includes, directly or not."""
        seen, waiting = set(), [Path(path)]
        while waiting:
            current = waiting.pop()
            if current not in seen:
                seen.add(current)
                waiting.extend(self._included(current))
        return seen

    def _included(self, path):
        if path not in self.links:
            found = []
            self.includes[path] = includes_of(read(self.root, path))
            for include in self.includes[path]:
                places = [Path("include"), Path("src"), Path("."), path.parent]
                if path.parts[0] == "examples":
                    places.append(Path("examples"))
                found.extend(
                    Path(os.path.normpath(place / include.path))
                    for place in places
                    if (self.root / place / include.path).is_file() and not Path(include.path).is_absolute()
                )
            self.links[path] = found
        return self.links[path]
