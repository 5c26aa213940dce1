"""Writes small R data folders by the format's description and sees what tools/rdata_csv.py makes of them."""
import gzip
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "rdata_csv.py"
MISSING = -(2**31)


def ints(*values):
    return struct.pack(f">{len(values)}i", *values)


def text(value):
    return ints(9, len(value)) + value.encode()


def symbol(name):
    return ints(1) + text(name)


def attributes(pairs):
    """A linked list of tagged values."""
    return b"".join(ints(2 | 0x400) + symbol(name) + value for name, value in pairs) + ints(254)


def vector(kind, values, encode, *pairs):
    head = ints(kind | (0x200 if pairs else 0), len(values))
    return head + b"".join(encode(value) for value in values) + (attributes(pairs) if pairs else b"")


def strings(*values):
    return vector(16, values, text)


def frame(**columns):
    return vector(19, columns.values(), bytes, ("names", strings(*columns)))


def document(body):
    return b"X\n" + ints(2, 0x40203, 0x20300) + body


class RData(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, **tables):
        places, data = [], b""
        for body in tables.values():
            plain = document(body)
            chunk = struct.pack(">I", len(plain)) + zlib.compress(plain)
            places.append(vector(13, (len(data), len(chunk)), ints))
            data += chunk
        variables = vector(19, places, bytes, ("names", strings(*tables)))
        index = vector(19, (variables, vector(19, (), bytes)), bytes, ("names", strings("variables", "references")))
        (self.folder / "Rdata.rdx").write_bytes(gzip.compress(document(index)))
        (self.folder / "Rdata.rdb").write_bytes(data)

    def run_tool(self, name):
        done = subprocess.run([sys.executable, TOOL, self.folder, name], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_writes_numbers_and_the_labels_of_factors(self):
        factor = vector(13, (2, 1, MISSING), ints, ("levels", strings("low", "high, odd")), ("class", strings("factor")))
        table = frame(kind=factor, count=vector(13, (7, MISSING, 9), ints),
                      size=vector(14, (0.5, 2.0, -1.25), lambda x: struct.pack(">d", x)))
        self.write(other=strings("not this one"), table=table)
        code, output, _ = self.run_tool("table")
        self.assertEqual(code, 0)
        self.assertEqual(output, 'kind,count,size\n"high, odd",7,0.5\nlow,,2.0\n,9,-1.25\n')

    def test_names_the_tables_there_are(self):
        self.write(table=frame(a=vector(13, (1,), ints)))
        code, _, errors = self.run_tool("tables")
        self.assertNotEqual(code, 0)
        self.assertIn("there is no 'tables'", errors)
        self.assertIn("there are: table", errors)

    def test_reports_what_it_cannot_read(self):
        self.write(table=frame(a=ints(3) + ints(0)))  # a function
        code, _, errors = self.run_tool("table")
        self.assertNotEqual(code, 0)
        self.assertIn("R values of kind 3", errors)


if __name__ == "__main__":
    unittest.main()
