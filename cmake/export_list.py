#!/usr/bin/env python3
"""Writes the linker's version script of libtorchspan.so: it exports what the public headers declare, and nothing else.

usage: cmake/export_list.py INCLUDE_FOLDER NM OUTPUT LIBRARY...

The compiled names in the static libraries decide: a name is exported if a public header declares the class, function or
variable that it belongs to. A class that a public header only announces inside another class (`struct Impl;`) is private.
Statics of inline functions of other libraries are exported, too, because a process must have one of each.
"""
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"
    r'|R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>\[\[|\]\]|::|->|\S)",
    re.DOTALL | re.MULTILINE)
OPENING, CLOSING = {"(": ")", "{": "}", "[": "]", "[[": "]]"}, {")", "}", "]", "]]"}


@dataclass
class Declared:
    """Qualified names as tuples: ("torchspan", "Worker")."""

    classes: set = field(default_factory=set)
    announced: set = field(default_factory=set)
    functions: set = field(default_factory=set)


def tokens_of(text):
    return [match.group() for match in TOKEN.finditer(text) if match.group("name") or match.group("sign")]


def end_of_group(tokens, start):
    """The index after the group that starts with the parenthesis, bracket or brace at `start`."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at] in OPENING) - (tokens[at] in CLOSING)
        if depth == 0:
            return at + 1
    raise ValueError(f"'{tokens[start]}' is not closed")


def end_of_angles(tokens, start):
    depth, at = 0, start
    while at < len(tokens):
        if tokens[at] in OPENING:
            at = end_of_group(tokens, at)
            continue
        depth += (tokens[at] == "<") - (tokens[at] == ">")
        at += 1
        if depth == 0:
            return at
    raise ValueError("'<' is not closed")


def without_template_head(head):
    """A declaration without `template <...>`, `requires (...)` and attributes."""
    rest, at = [], 0
    while at < len(head):
        if head[at] == "template" and head[at + 1:at + 2] == ["<"]:
            at = end_of_angles(head, at + 1)
        elif head[at] == "requires" and head[at + 1:at + 2] == ["("]:
            at = end_of_group(head, at + 1)
        elif head[at] == "[[":
            at = end_of_group(head, at)
        else:
            rest.append(head[at])
            at += 1
    return rest


def class_name(head):
    """The name of the class that a head declares (`class Worker final : public Base`), as a tuple, or None."""
    keys = [at for at, token in enumerate(head) if token in ("class", "struct", "union")]
    if not keys or "(" in head[:keys[0]] or "enum" in head or head[0] in ("using", "typedef"):
        return None
    at = keys[0] + 1
    while at + 1 < len(head) and head[at].isupper() and head[at + 1] == "(":  # a macro: CAPABILITY("mutex")
        at = end_of_group(head, at + 1)
    while at + 1 < len(head) and head[at].isupper() and re.match(r"\w", head[at + 1]) and head[at + 1] != "final":
        at += 1
    if at == len(head) or not re.match(r"\w", head[at]):
        return None
    name = head[at:at + 1]
    while head[at + 1:at + 2] == ["::"] and at + 2 < len(head):
        at += 2
        name.append(head[at])
    return tuple(name)


def function_name(head):
    """The name before the parameters, or the name of a variable; None if the head declares neither."""
    if not head or head[0] in ("using", "typedef", "static_assert", "enum", "concept"):
        return None
    if "operator" in head:
        return "operator"
    at, last = 0, None
    while at < len(head):
        if head[at] == "<":
            at = end_of_angles(head, at)
        elif head[at] == "decltype" and head[at + 1:at + 2] == ["("]:
            at = end_of_group(head, at + 1)
        elif head[at] in ("(", "=", "["):
            return last
        else:
            last = head[at] if re.match(r"\w", head[at]) else last
            at += 1
    return last


class Headers:
    def __init__(self):
        self.declared = Declared()

    def read(self, text):
        self.scope(tokens_of(text), (), in_class=False)

    def scope(self, tokens, path, in_class):
        at, head = 0, []
        while at < len(tokens):
            token = tokens[at]
            if token == ";":
                self.declaration(without_template_head(head), path, in_class)
                head = []
                at += 1
            elif token == "{":
                end = end_of_group(tokens, at)
                if self.block(head, tokens[at + 1:end - 1], path, in_class):
                    head = []
                at = end
            elif token in OPENING:
                end = end_of_group(tokens, at)
                head += tokens[at:end]
                at = end
            elif token == ":" and in_class and head and head[-1] in ("public", "protected", "private"):
                head = []
                at += 1
            else:
                head.append(token)
                at += 1

    def block(self, head, body, path, in_class):
        """Enters `head { body }`. Returns whether the declaration ends with it."""
        head = without_template_head(head)
        if "namespace" in head:
            names = [token for token in head[head.index("namespace") + 1:] if re.match(r"\w", token)]
            self.scope(body, path + tuple(names), in_class=False)
            return True
        name = class_name(head)
        if name:
            self.declared.classes.add(path + name)
            self.scope(body, path + name, in_class=True)
            return False
        if "enum" in head:
            names = [token for token in head if re.match(r"\w", token) and token not in ("enum", "class", "struct")]
            self.declared.classes.update({path + (names[0],)} if names else ())
            return False
        self.declaration(head, path, in_class)
        return "=" not in head and ")" in head  # a function's body; otherwise a variable's value

    def declaration(self, head, path, in_class):
        if not head:
            return
        announced = class_name(head) if head[0] in ("class", "struct", "union") and "(" not in head else None
        if announced and in_class:
            self.declared.announced.add(path + announced)
        elif head[0] == "TORCH_MODULE":
            self.declared.classes.add(path + (head[2],))
        elif not announced and not in_class:  # members are exported with their class
            self.declared.functions.add(path + (function_name(head),))


def path_of(symbol):
    """The names that a compiled name begins with: _ZNK9torchspan6Worker4rankEv is ("torchspan", "Worker", "rank")."""
    match = re.match(r"_Z(?:T[VTIS]|GV|Z|T[hv](?:n?\d+_)+|TC)*N[rVKRO]*", symbol)
    if not match:
        return ()
    at, names = match.end(), []
    while number := re.compile(r"\d+").match(symbol, at):
        end = number.end() + int(number.group())
        names.append(symbol[number.end():end])
        at = end
        while symbol.startswith("B", at) and (tag := re.compile(r"B(\d+)").match(symbol, at)):
            at = tag.end() + int(tag.group(1))
    if re.compile(r"[a-z]{2}").match(symbol, at):
        names.append("operator")
    return tuple(names)


def is_public(path, declared):
    prefixes = [path[:length] for length in range(1, len(path) + 1)]
    if any(prefix in declared.announced and prefix not in declared.classes for prefix in prefixes):
        return False
    return path in declared.functions or any(prefix in declared.classes for prefix in prefixes)


def exported(symbol, kind, text, declared):
    """Decides about a compiled name. `text` is its demangled form."""
    path = path_of(symbol)
    if symbol.startswith("_ZTC"):  # tables for the time of construction: only the class's own code reads them
        return False
    if path[:1] != ("torchspan",):
        return kind in "uV" and not re.match(r"_ZT[VTISC]|DW\.ref\.", symbol) and "9torchspan" not in symbol
    if not is_public(path, declared):
        return False
    # A public template with private arguments is private; no program can instantiate it.
    return kind in "TDRB" or (text != symbol and all(is_public(tuple(name.split("::")), declared)
                                                     for name in re.findall(r"torchspan(?:::[A-Za-z_]\w*)+", text)))


def symbols_of(nm, libraries):
    """(name, kind, demangled name) of everything that the libraries define."""
    command = [nm, "--defined-only", "--extern-only", "--no-sort", "--format=bsd"]
    plain, readable = (subprocess.run([*command, *more, *libraries], capture_output=True, text=True, check=True)
                       .stdout.splitlines() for more in ((), ("--demangle",)))
    symbols = set()
    for line, text in zip(plain, readable, strict=True):
        fields = line.split()
        if len(fields) == 3:
            symbols.add((fields[2], fields[1], text.split(" ", 2)[2]))
    return symbols


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    include, nm, output, *libraries = sys.argv[1:]
    headers = Headers()
    for path in sorted(Path(include).rglob("*.h")):
        try:
            headers.read(path.read_text())
        except ValueError as error:
            sys.exit(f"export_list: {path}: {error}")
    names = sorted({name for name, kind, text in symbols_of(nm, libraries) if exported(name, kind, text, headers.declared)})
    if not names:
        sys.exit(f"export_list: no library defines anything that {include} declares")
    lines = "".join(f"    {name};\n" for name in names)
    Path(output).write_text(f"{{\n  global:\n{lines}  local:\n    *;\n}};\n")


if __name__ == "__main__":
    main()
