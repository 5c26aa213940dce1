"""The commands of a Markdown document: blocks of shell code with their marks, commands in running text, and their words."""
import re
import shlex
from dataclasses import dataclass

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LANGUAGES = ("sh", "console")
# Why a block is not run. 'covered': .ci/run or a test runs the same.
REASONS = ("covered", "hosts", "gpu", "root", "slurm", "network", "program", "interactive")
HEADS = re.compile(r"(?:make|cmake|ctest|ninja|torchspan|pip|docker|apt-get|mpirun|srun) |(?:tools|build)/[\w./-]+ |tools/[\w-]+$")
OPERATORS = set("();<>|&\n")


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of text
    language: str
    marks: tuple
    text: str

    @property
    def is_shell(self):
        return self.language in LANGUAGES

    @property
    def is_run(self):
        return self.is_shell and self.marks[:1] == ("run",)

    @property
    def script(self):
        """What a shell gets: of a console block, the lines after '$ '."""
        if self.language != "console":
            return self.text
        return "".join(line[2:] + "\n" for line in self.text.splitlines() if line.startswith("$ "))

    @property
    def output(self):
        """The lines that must be in the output of this block."""
        if self.language != "console" or self.marks != ("run",):
            return []
        return [line for line in self.text.splitlines() if not line.startswith("$ ")]


def blocks_of(text):
    found = []
    for match in FENCE.finditer(text):
        language, *marks = match.group(1).split() or [""]
        found.append(Block(text.count("\n", 0, match.start(2)) + 1, language, tuple(marks), match.group(2)))
    return found


def inline_commands(text):
    """(line, command) of code in running text that begins like a command."""
    text = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)
    for match in INLINE.finditer(text):
        command = " ".join(match.group(1).split())
        if HEADS.match(command):
            yield text.count("\n", 0, match.start()) + 1, command


def looks_like_commands(text):
    """Whether the first line that is not a comment begins like a command."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("# ")), "")
    return bool(HEADS.match(first) or re.match(r"\$ |#!|\w+=\S* \S|\(umask |(?:torchrun|openssl|export|python3) ", first))


def without_comment(line):
    """The line up to a '#' outside quotes that begins a word."""
    quote = ""
    for index, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (index == 0 or line[index - 1] in " \t"):
            return line[:index]
    return line


def simple_commands(script):
    """Lists of words; redirections and the operators between commands are left out. Throws ValueError."""
    script = re.sub(r"<(\w+)>", r"\1", script.replace("\\\n", " "))  # <section> stands for a name
    text = "\n".join(without_comment(line) for line in script.splitlines()) + "\n"
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words, skip = [], False
    for token in lexer:
        if set(token) <= OPERATORS and token:
            if set(token) <= set("<>&") and token not in ("&", "&&"):
                skip = True  # the next word is a file
            elif words:
                yield words
                words = []
        elif skip:
            skip = False
        else:
            words.append(token)
    if words:
        yield words
