"""Plants tags in the tests of a small tree and sees the tables that conformance-table makes of them."""
import unittest

from checks_test import Tree

DOCUMENT = "docs/conformance.md"
HEAD = "| peer | TorchSpan | status |\n|---|---|---|\n"


class ConformanceTable(Tree):
    def setUp(self):
        super().setUp()
        self.document("")

    def document(self, rows):
        self.write(DOCUMENT, f"# Conformance\n\n<!-- peer rpc_test.py in tests/parity as Calls -->\n{HEAD}{rows}<!-- end -->\n")

    def rows(self):
        self.assert_clean("conformance-table", "--write")
        self.assert_clean("conformance-table")
        return (self.root / DOCUMENT).read_text().splitlines()[5:-1]

    def test_a_tag_becomes_a_row(self):
        self.write("tests/parity/calls.cpp", "// Adds.\n// peer: rpc_test.py add, `a` (twice): better: no limit,\n"
                   "//   and `fast`\nTEST(Calls, Add) {\n}\n\n// peer: rpc_test.py nested_rpc: same\nTEST_F(Other, Nested) {\n}\n")
        self.assertEqual(self.rows(), ["| add, `a` (twice) | `calls.cpp` `Add` | better: no limit, and `fast` |",
                                       "| `nested_rpc` | `calls.cpp` `Other.Nested` | same |"])

    def test_a_tag_without_a_status_adds_its_test_to_the_row(self):
        self.write("src/rpc/more_test.cpp", "// peer: rpc_test.py add\nTEST(More, Adds) {\n}\n")
        self.write("tests/parity/calls.cpp", "// peer: rpc_test.py add\nTEST(Other, First) {\n}\n"
                   "// peer: rpc_test.py add, scalar_add: same\nTEST(Calls, Second) {\n}\n"
                   "// peer: rpc_test.py add\nTEST(Other, Third) {\n}\n")
        self.assertEqual(self.rows(), ["| `add`, `scalar_add` | `calls.cpp` `Second`, `Other.First`, `.Third`; "
                                       "`src/rpc/more_test.cpp` `More.Adds` | same |"])

    def test_tags_of_suites_and_files(self):
        self.write("tests/parity/calls.cpp", "// All calls.\n// peer: rpc_test.py all: same\n#include <map>\n"
                   "// peer suite: rpc_test.py some: more\nTEST(Calls, Add) {\n}\n")
        self.assertEqual(self.rows(), ["| `all` | `calls.cpp` | same |", "| `some` | `calls.cpp` `*` | more |"])

    def test_rows_keep_their_order_and_those_without_a_test_their_text(self):
        self.document("| `last` | old | same |\n| (none) | | differs: why |\n| gone | `x` | same |\n| `add` | | open |\n")
        self.write("tests/parity/calls.cpp", "// peer: rpc_test.py new: same\nTEST(Calls, New) {\n}\n"
                   "// peer: rpc_test.py last: same\nTEST(Calls, Last) {\n}\n")
        self.assertEqual(self.rows(), ["| `last` | `calls.cpp` `Last` | same |", "| (none) | | differs: why |",
                                       "| `add` | | open |", "| `new` | `calls.cpp` `New` | same |"])

    def test_a_document_that_differs_is_named(self):
        self.document("| `add` | `calls.cpp` `Plus` | same |\n")
        self.write("tests/parity/calls.cpp", "// peer: rpc_test.py add: same\nTEST(Calls, Add) {\n}\n")
        self.assert_reports("conformance-table", (f"{DOCUMENT}:6", "differs from the tags"),
                            (f"{DOCUMENT}:4", "lacks the row '| `add` | `calls.cpp` `Add` | same |'"))

    def test_tags_that_fit_nothing_are_named_and_nothing_is_written(self):
        self.write("tests/parity/calls.cpp", "// peer: rpc_tests add: same\nTEST(Calls, Add) {\n}\n"
                   "// peer: rpc_test.py nested\nTEST(Calls, Nested) {\n}\n// peer: rpc_test.py one: same\n"
                   "// peer: rpc_test.py one: better\nTEST(Calls, One) {\n}\n")
        before = (self.root / DOCUMENT).read_text()
        code, output = self.run_tool("conformance-table", "--write")
        self.assertEqual(code, 1)
        for text in ("calls.cpp:1: docs/conformance.md has no table 'rpc_tests'", "calls.cpp:4: no tag with a status",
                     "calls.cpp:8: 'one' of rpc_test.py has a second status"):
            self.assertIn(text, output)
        self.assertEqual((self.root / DOCUMENT).read_text(), before)


if __name__ == "__main__":
    unittest.main()
