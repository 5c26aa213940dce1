#!/usr/bin/env python3
"""Writes a data frame of an R package's data folder as CSV, without R.

usage: tools/rdata_csv.py FOLDER NAME >OUT.csv

FOLDER holds Rdata.rdx, the index, and Rdata.rdb, the objects; each is compressed R serialization in XDR form
(R Internals, section 1.8). Integers, reals, strings and factors are read; factors come out as their labels.
"""
import csv
import gzip
import struct
import sys
import zlib

NIL, GLOBAL_ENV, REFERENCE, PERSISTENT = 254, 253, 255, 247
SYMBOL, PAIRS, STRING_ITEM, LOGICALS, INTEGERS, REALS, STRINGS, LIST = 1, 2, 9, 10, 13, 14, 16, 19
MISSING_INTEGER = -(2**31)


class Frame:
    """A value with its attributes."""

    def __init__(self, value, attributes):
        self.value = value
        self.attributes = attributes


class Reader:
    def __init__(self, data):
        if data[:2] != b"X\n":
            raise ValueError("this is not R serialization in XDR form")
        self.data, self.at, self.references = data, 2, []
        version = self.ints(3)[0]
        if version == 3:
            self.take(self.ints(1)[0])  # the name of the encoding
        elif version != 2:
            raise ValueError(f"R serialization has version {version}; 2 and 3 are known")

    def take(self, size):
        self.at += size
        return self.data[self.at - size : self.at]

    def ints(self, count):
        return list(struct.unpack(f">{count}i", self.take(4 * count)))

    def length(self):
        return self.ints(1)[0]

    def remember(self, value):
        self.references.append(value)
        return value

    def pairs(self, has_attributes, has_tag):
        """A linked list of tagged values, as a dictionary."""
        result = {}
        while True:
            if has_attributes:
                self.item()
            tag = self.item() if has_tag else len(result)
            result[tag] = self.item()
            flags = self.ints(1)[0]
            if flags & 0xFF == NIL:
                return result
            has_attributes, has_tag = bool(flags & 0x200), bool(flags & 0x400)

    def item(self):
        flags = self.ints(1)[0]
        kind, has_attributes, has_tag = flags & 0xFF, bool(flags & 0x200), bool(flags & 0x400)
        if kind in (NIL, GLOBAL_ENV):
            return None
        if kind == REFERENCE:
            return self.references[(flags >> 8 or self.ints(1)[0]) - 1]
        if kind == PERSISTENT:
            self.ints(1)
            return self.remember([self.item() for _ in range(self.length())])
        if kind == SYMBOL:
            return self.remember(self.item())
        if kind == STRING_ITEM:
            size = self.length()
            return None if size == -1 else self.take(size).decode("latin-1")
        if kind == PAIRS:
            return self.pairs(has_attributes, has_tag)
        readers = {
            LOGICALS: self.ints,
            INTEGERS: self.ints,
            REALS: lambda count: list(struct.unpack(f">{count}d", self.take(8 * count))),
            STRINGS: lambda count: [self.item() for _ in range(count)],
            LIST: lambda count: [self.item() for _ in range(count)],
        }
        if kind not in readers:
            raise ValueError(f"R values of kind {kind} are not read here (at byte {self.at})")
        value = readers[kind](self.length())
        return Frame(value, self.item() if has_attributes else {})


def labelled(column):
    """A factor's labels; other columns as they are. Missing values become empty."""
    levels = column.attributes.get("levels") if column.attributes else None
    if levels is not None:
        return ["" if code == MISSING_INTEGER else levels.value[code - 1] for code in column.value]
    return ["" if value is None or value == MISSING_INTEGER else value for value in column.value]


def load(folder, name):
    with open(f"{folder}/Rdata.rdx", "rb") as file:
        index = Reader(gzip.decompress(file.read())).item()
    entries = dict(zip(index.attributes["names"].value, index.value))
    variables = entries["variables"]
    places = dict(zip(variables.attributes["names"].value, variables.value))
    if name not in places:
        raise ValueError(f"there is no '{name}' in {folder}; there are: {', '.join(sorted(places))}")
    offset, size = places[name].value
    with open(f"{folder}/Rdata.rdb", "rb") as file:
        file.seek(offset)
        chunk = file.read(size)
    data = zlib.decompress(chunk[4:])
    if len(data) != struct.unpack(">I", chunk[:4])[0]:
        raise ValueError(f"'{name}' is damaged: its length is not what its index says")
    return Reader(data).item()


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    frame = load(sys.argv[1], sys.argv[2])
    names = frame.attributes["names"].value
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*(labelled(column) for column in frame.value)))


if __name__ == "__main__":
    main()
