"""Plants tags in the tests of a small tree and sees the page that conformance-table makes of them."""
import unittest

from checks_test import Tree

DATA = "tests/peers.txt"


class ConformanceTable(Tree):
    def setUp(self):
        super().setUp()
        self.data("")

    def data(self, rows):
        self.write(DATA, f"# Conformance\n\nText.\n\ntable rpc_test.py in tests/parity as Calls\n{rows}\n## More\n\nMore text.\n")

    def rows(self):
        self.assert_clean("conformance-table")
        lines = self.assert_clean("conformance-table", "--page").splitlines()
        self.assertEqual(lines[:6], ["# Conformance", "", "Text.", "", "| peer | TorchSpan | status |", "|---|---|---|"])
        self.assertEqual(lines[-4:], ["", "## More", "", "More text."])
        return lines[6:-4]

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

    def test_rows_are_sorted_by_name_with_those_that_have_no_test(self):
        self.data("`add`, `all`: open: not\n   yet\nno_code: differs: why\n(none): differs\n")
        self.write("tests/parity/calls.cpp", "// peer: rpc_test.py new: same\nTEST(Calls, New) {\n}\n"
                   "// peer: rpc_test.py last: same\nTEST(Calls, Last) {\n}\n")
        self.assertEqual(self.rows(), ["| `add`, `all` |  | open: not yet |", "| `last` | `calls.cpp` `Last` | same |",
                                       "| `new` | `calls.cpp` `New` | same |", "| no_code |  | differs: why |", "| (none) |  | differs |"])

    def test_rows_that_are_not_in_order_or_have_no_status_are_named(self):
        self.data("`b`: open\n`a`: differs: why\nwhat is this\n`c`: same\n")
        self.assert_reports("conformance-table", (f"{DATA}:7", "'a' belongs before 'b'"),
                            (f"{DATA}:8", "is not PEER'S TESTS: STATUS"), (f"{DATA}:9", "is not PEER'S TESTS: STATUS"))

    def test_a_row_without_a_test_for_what_has_one_is_named(self):
        self.data("`a`, `add`, `_more`: open\n`new`: differs: why\n")
        self.write("tests/parity/calls.cpp", "// peer: rpc_test.py new, add, _more: same\nTEST(Calls, Add) {\n}\n")
        self.assert_reports("conformance-table", (f"{DATA}:6", "'add' has a TorchSpan test (tests/parity/calls.cpp:1): remove it here"),
                            (f"{DATA}:7", "'new' has a TorchSpan test"))

    def test_tags_that_fit_nothing_are_named_and_no_page_is_printed(self):
        self.write("tests/parity/calls.cpp", "// peer: rpc_tests add: same\nTEST(Calls, Add) {\n}\n"
                   "// peer: rpc_test.py nested\nTEST(Calls, Nested) {\n}\n// peer: rpc_test.py one: same\n"
                   "// peer: rpc_test.py one: better\nTEST(Calls, One) {\n}\n")
        code, output = self.run_tool("conformance-table", "--page")
        self.assertEqual(code, 1)
        for text in ("calls.cpp:1: tests/peers.txt has no table 'rpc_tests'", "calls.cpp:4: no tag with a status",
                     "calls.cpp:8: 'one' of rpc_test.py has a second status"):
            self.assertIn(text, output)
        self.assertNotIn("# Conformance", output)

    def test_data_without_a_table_is_an_error(self):
        self.write(DATA, "# Conformance\n")
        code, output = self.run_tool("conformance-table")
        self.assertEqual(code, 2)
        self.assertIn("has no line 'table TABLE in FOLDER'", output)


if __name__ == "__main__":
    unittest.main()
