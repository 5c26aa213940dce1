"""Plants small pieces in a tree and sees which of them check-fragments names, and what its allow file permits."""
import unittest

from checks_test import Tree

ALLOW = "tools/check-fragments.allow"
HELPER = "#pragma once\nnamespace torchspan::net {\nint helper();\n}\n"
INTERFACE = "#pragma once\nclass Sink {\n public:\n  virtual ~Sink() = default;\n  virtual void take(int value) = 0;\n};\n"
BAG = "#pragma once\nclass Halves {\n public:\n  void begin();\n  void end();\n private:\n  State& state_;\n"


class OneUser(Tree):
    def setUp(self):
        super().setUp()
        self.write("src/net/helper.h", HELPER)
        self.write("src/net/helper.cpp", '#include "net/helper.h"\n')
        self.write("src/net/user.cpp", '#include "net/helper.h"\n')

    def test_a_header_with_one_user_besides_its_source_is_named(self):
        self.assert_reports("check-fragments", ("src/net/helper.h:1", "[one-user] 5 lines with its source, included by "
                                                "src/net/user.cpp only: move it into that file"))

    def test_a_header_with_two_users_is_clean(self):
        self.write("src/net/other.cpp", '#include "net/helper.h"\n')
        self.assert_clean("check-fragments")

    def test_a_header_that_a_test_includes_is_clean(self):
        self.write("src/net/helper_test.cpp", '#include "net/helper.h"\n')
        self.assert_clean("check-fragments")

    def test_a_header_with_150_lines_together_with_its_source_is_clean(self):
        self.write("src/net/helper.cpp", '#include "net/helper.h"\n' + "\n" * 145)
        self.assert_clean("check-fragments")

    def test_headers_for_other_rooms_and_public_headers_are_clean(self):
        self.write("src/net/helper.h", HELPER)
        self.write("src/net/user.cpp", '#include "net/api/helper.h"\n#include <torchspan/net/helper.h>\n')
        self.write("src/net/api/helper.h", HELPER)
        self.write("include/torchspan/net/helper.h", HELPER)
        self.assert_clean("check-fragments")


class OneImplementer(Tree):
    def setUp(self):
        super().setUp()
        self.write("src/net/api/sink.h", INTERFACE)
        self.write("src/net/file.cpp", "class File final : public Sink {\n};\n")

    def test_an_interface_with_one_implementer_is_named(self):
        self.assert_reports("check-fragments", ("src/net/api/sink.h:2", "[one-implementer] Sink: File implements it alone, "
                                                "and no test double"))

    def test_an_interface_that_no_class_implements_is_named(self):
        self.write("src/net/file.cpp", "")
        self.assert_reports("check-fragments", ("src/net/api/sink.h:2", "no class implements it"))

    def test_a_second_implementer_or_a_double_of_a_test_is_enough(self):
        self.write("tests/support/recorded.h", "struct Recorded : torchspan::net::Sink {\n};\n")
        self.assert_clean("check-fragments")


class ReferencesOnly(Tree):
    def test_a_class_with_methods_and_only_references_is_named(self):
        self.write("src/net/api/halves.h", BAG + "  Clock& clock_;\n};\n")
        self.assert_reports("check-fragments", ("src/net/api/halves.h:2", "[references-only] Halves has only references: "
                                                "state_, clock_"))

    def test_a_class_with_data_is_clean(self):
        self.write("src/net/api/halves.h", BAG + "  int count_ = 0;\n};\n")
        self.assert_clean("check-fragments")


class Exceptions(Tree):
    def setUp(self):
        super().setUp()
        self.write("src/net/api/sink.h", INTERFACE)

    def test_a_listed_finding_is_clean_and_counted_until_it_has_a_reason(self):
        self.write(ALLOW, "one-implementer src/net/api/sink.h Sink\n")
        self.assertIn("still to fold: 0 one-user, 1 one-implementer, 0 references-only",
                      self.assert_clean("check-fragments"))
        self.write(ALLOW, "one-implementer src/net/api/sink.h Sink: users implement it\n")
        self.assertIn("0 one-implementer", self.assert_clean("check-fragments"))

    def test_a_line_that_matches_nothing_is_named_until_write_removes_it(self):
        self.write(ALLOW, "# Kept.\none-implementer src/net/api/sink.h Sink\none-user src/net/gone.h\n")
        self.assert_reports("check-fragments", (f"{ALLOW}:3", "matches no finding any more"))
        self.assert_clean("check-fragments", "--write")
        self.assertEqual((self.root / ALLOW).read_text(), "# Kept.\none-implementer src/net/api/sink.h Sink\n")
        self.assert_clean("check-fragments")

    def test_a_line_that_is_no_exception_is_named(self):
        self.write(ALLOW, "one-user src/net/api/sink.h Sink\n")
        code, output = self.run_tool("check-fragments")
        self.assertEqual(code, 2)
        self.assertIn(f"{ALLOW}:1", output)


if __name__ == "__main__":
    unittest.main()
