"""What exists in this tree for a command to name: targets, presets, options, programs, tests."""
import json
import re
from pathlib import Path

from source_tree import files_of, read

# Programs of other projects and of the shell; their arguments are not checked.
EXTERNAL = set("""[ apt-get cd cp codespell conan cut dpkg-deb echo exec exit export fi git head if kill mkdir mkdocs mpirun nice
    openssl perf pip pip3 pkg-config ps python3 sbatch scontrol scp sed set srun sudo tail tar then torchrun umask cpack
    docker vcpkg""".split())
KEYWORDS = {"if", "then", "else", "elif", "do", "while", "exec", "!", "sudo", "nice"}
# Programs that stand for the reader's; 'program_stand_in' in scratch_run.py runs in their place.
STAND_INS = {"python", "train", "program", "table"}
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_:]*|.*(?:…|\.\.\.).*|x|section")
OPTION = re.compile(r"add_(?:option|flag)\w*(?:<[^()]*>)?\(\s*\"([^\"]+)\"")
FLAG = re.compile(r"add_flag\w*\(\s*\"([^\"]+)\"")
FUNCTION = re.compile(r"^void describe_(\w+)\(.*?^\}", re.MULTILINE | re.DOTALL)


class Vocabulary:
    def __init__(self, root):
        self.root = Path(root)
        self.files = files_of(root)
        self.makefile = self.text("Makefile")
        self.cmake = "\n".join(read(root, path) for path in self.files
                               if path.name == "CMakeLists.txt" or path.suffix == ".cmake")
        self.bench = "\n".join(read(root, path) for path in self.files if path.parts[0] == "bench" and
                               path.suffix in (".h", ".cpp"))
        self.presets = json.loads(self.text("CMakePresets.json") or "{}")
        self.tests = {path.stem for path in self.files if path.name.endswith("_test.cpp")}
        self.targets = self.targets_of_tree()
        self.subcommands = self.options_of_torchspan()

    def text(self, path):
        return read(self.root, path) if (self.root / path).is_file() else ""

    def targets_of_tree(self):
        """Targets that the CMake files name, programs made from one source each, and those of rooms."""
        targets = set(re.findall(r"(?:add_executable|add_library|add_custom_target|torchspan_program|torchspan_test)\(\s*(\w+)",
                                 self.cmake))
        for room in re.findall(r"\btorchspan_room\s*\(\s*(\w+)", self.cmake):
            targets |= {f"torchspan_{room}", f"{room}_test"}
        for path in self.files:
            if path.suffix == ".cpp" and path.parts[0] == "examples" and len(path.parts) == 2:
                targets.add(path.stem)
            if path.suffix == ".cpp" and path.parts[0] == "tests" and path.stem.endswith("_test") and len(path.parts) == 3:
                targets.add(f"{path.parts[1]}_{path.stem}")
            if path.name.endswith(("_bench.cpp", "_fuzz.cpp")):
                targets.add(path.stem)
        return targets | {"all", "clean"}

    def options_of_torchspan(self):
        """Options of each subcommand, and whether a value follows: {'run': {'-n': True}}. Options belong to the
        subcommand whose source describes them; those of files that several share go to 'run'."""
        names = re.findall(r"add_subcommand\(\s*\"(\w+)\"", "\n".join(self.launch_sources().values()))
        found = {name: {"--help": False, "-h": False} for name in names}
        for path, text in self.launch_sources().items():
            for match in re.finditer(r"^(?:void|int) (\w+)\([^;{]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
                owner = next((name for name in names if name in match.group(1)), None)
                if owner is None and path.stem.startswith("watch"):
                    owners = ["stacks", "top"]
                else:
                    owners = [owner or "run"]
                for name in owners:
                    for words in OPTION.findall(match.group(2)):
                        for word in words.split(","):
                            found.get(name, {})[word] = words not in FLAG.findall(match.group(2))
        return found

    def launch_sources(self):
        return {path: read(self.root, path) for path in self.files
                if path.parts[:3] == ("src", "launch", "commands") and path.suffix == ".cpp"
                and not path.name.endswith("_test.cpp")}

    def is_in_sources(self, text):
        """Whether a source has this text as a literal: it is then a name, of a thread for example, and no command."""
        return any(f'"{text}"' in read(self.root, path) for path in self.files
                   if path.parts[0] == "src" and path.suffix == ".cpp")

    def complaints(self, words):
        """What is wrong with a command, as sentences."""
        words = list(words)
        while words and (words[0] in KEYWORDS or re.match(r"\w+=", words[0])):
            words.pop(0)
        if not words:
            return []
        head = words[0]
        name = Path(head).name
        if head.startswith("tools/"):
            return self.tool(head, words[1:])
        if name == "torchspan" and head != "./torchspan":
            return self.torchspan(words[1:])
        checks = {"make": self.make, "cmake": self.cmake_command, "ctest": self.ctest, "ninja": self.ninja}
        if name in checks:
            return checks[name](words[1:])
        if head in EXTERNAL or PLACEHOLDER.fullmatch(head) or head.startswith("$"):
            return []
        return self.program(words)

    def make(self, words):
        found = []
        targets = set(re.findall(r"^([\w-]+):(?!=)", self.makefile, re.MULTILINE))
        for word in words:
            name, assigned, value = word.partition("=")
            if assigned and f"$({name})" not in self.makefile and f"{name} ?=" not in self.makefile:
                found.append(f"the Makefile does not use {name}")
            elif name == "SECTION" and not PLACEHOLDER.fullmatch(value) and \
                    not any((self.root / "bench").glob(f"{value}_bench.*")):
                found.append(f"there is no bench/{value}_bench.cpp")
            elif name == "ARGS" and any(other.startswith("SECTION=") for other in words):
                found += [f"no benchmark has an option '{option}'" for option in re.findall(r"--[\w-]+", value)
                          if f'"{option}"' not in self.bench and option not in self.text("tools/run-bench")]
            elif not assigned and not PLACEHOLDER.fullmatch(word) and word not in targets and not word.startswith("-"):
                found.append(f"the Makefile has no target '{word}'")
        return found

    def cmake_command(self, words):
        kind = "buildPresets" if "--build" in words else "configurePresets"
        found = []
        for word, value in zip(words, words[1:] + [""]):
            if word == "--preset" and value not in self.names_of_presets(kind) and not PLACEHOLDER.fullmatch(value):
                found.append(f"CMakePresets.json has no '{value}' in {kind}")
            option = re.match(r"-D(TORCHSPAN_\w+)", word)
            if option and option.group(1) not in self.cmake:
                found.append(f"no CMake file knows {option.group(1)}")
        return found

    def names_of_presets(self, kind):
        return [preset["name"] for preset in self.presets.get(kind, [])]

    def ctest(self, words):
        found = []
        for word, value in zip(words, words[1:] + [""]):
            if word == "--preset" and value not in self.names_of_presets("testPresets"):
                found.append(f"CMakePresets.json has no '{value}' in testPresets")
            if word == "-R" and not PLACEHOLDER.fullmatch(value):
                named = set(re.findall(r"add_test\(NAME (\w+)", self.cmake)) | self.targets
                if not any(re.search(value, test) for test in named):
                    found.append(f"no test matches '{value}'")
        return found

    def ninja(self, words):
        found, rest = [], list(words)
        while rest:
            word = rest.pop(0)
            if word == "-C" and rest:
                preset = Path(rest.pop(0)).name
                if preset not in self.names_of_presets("configurePresets"):
                    found.append(f"no preset builds in build/{preset}")
            elif word in ("-j", "-k", "-t"):
                rest = rest[1:]
            elif not word.startswith("-") and not PLACEHOLDER.fullmatch(word) and word not in self.targets:
                found.append(f"the build has no target '{word}'")
        return found

    def tool(self, head, words):
        path = self.root / head
        if "*" in head or path.is_dir():
            return []
        if not path.is_file():
            return [f"there is no {head}"]
        text = self.text(head)
        found = [f"{head} has no option '{word.split('=')[0]}'" for word in words
                 if word.startswith("--") and word != "--help" and word.split("=")[0] not in text]
        if Path(head).name in ("install-deps", "fetch-data", "check"):  # their arguments are a fixed set of words
            found += [f"{head} does not know '{word}'" for word in words
                      if not word.startswith("-") and not PLACEHOLDER.fullmatch(word)
                      and not re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", text)]
        return found

    def torchspan(self, words):
        while words and words[0] in ("--help", "-h", "--version"):
            words = words[1:]
        if not words or PLACEHOLDER.fullmatch(words[0]):
            return []
        name, rest = words[0], list(words[1:])
        if name not in self.subcommands:
            return [f"torchspan has no command '{name}'"]
        options, found = self.subcommands[name], []
        while rest:
            word = rest.pop(0)
            option, assigned, _ = word.partition("=")
            if not word.startswith("-"):
                if name == "run" and word == "--":
                    continue
                if name == "run":
                    return found + self.program([word, *rest])
                continue
            if option not in options:
                return found + [f"'torchspan {name}' has no option '{option}'"]
            if options[option] and not assigned and rest:
                rest.pop(0)
        return found

    def program(self, words):
        head, name = words[0], Path(words[0]).name
        if PLACEHOLDER.fullmatch(head) or name in STAND_INS or name.endswith(".sh"):
            return []
        if name not in self.targets:
            return [f"there is no program '{head}'"]
        text = self.sources_of(name)
        return [f"{name} has no option '{word.split('=')[0]}'" for word in words[1:]
                if text and word.startswith("--") and f'"{word.split("=")[0]}"' not in text
                and word.split("=")[0].removeprefix("--") not in text]

    def sources_of(self, name):
        """The source of an example, and those of the folders that it includes."""
        main = self.text(f"examples/{name}.cpp")
        folders = set(re.findall(r'#include "(\w+)/', main))
        return main + "".join(read(self.root, path) for path in self.files
                              if path.parts[0] == "examples" and len(path.parts) == 3 and path.parts[1] in folders)

    def programs_of(self, scripts):
        """The targets of this build that these scripts run; 'tutorial' runs in place of the reader's program."""
        words = {Path(word).name for script in scripts for word in re.findall(r"[\w./-]+", script)}
        examples = {path.stem for path in self.files if path.parts[0] == "examples" and len(path.parts) == 2}
        return ["torchspan_cli", *sorted((words & examples & self.targets) | {"tutorial"})]
