"""Plants classes in a small tree and sees what check-classes counts, and what its allow file permits."""
import shutil
import unittest

from checks_test import Tree

ALLOW = "tools/check-classes.allow"


def methods(count, first=0):
    return "".join(f"  void work_{number}(int times);\n" for number in range(first, first + count))


def members(count):
    return "".join(f"  int part_{number}_ = 0;\n" for number in range(count))


@unittest.skipUnless(shutil.which("ctags"), "universal-ctags is not installed: tools/install-deps check")
class Classes(Tree):
    def setUp(self):
        super().setUp()
        self.write(ALLOW, "")

    def header(self, body, path="src/net/wide.h", name="class Wide"):
        self.write(path, f"#pragma once\nnamespace torchspan::net {{\n{name} {{\n{body}}};\n}}\n")

    def test_a_class_within_the_limits_is_clean(self):
        self.header(" public:\n" + methods(15) + " private:\n" + methods(15, 15) + members(25))
        self.write("src/net/wide.cpp", '#include "net/wide.h"\nnamespace torchspan::net {\nvoid Wide::work_0(int) {}\n'
                   "void Wide::work_11(int) {}\n}\n")
        self.assertIn("clean", self.assert_clean("check-classes"))

    def test_public_and_private_methods_count_overloads_too(self):
        self.header(" public:\n" + methods(15) + "  void work_0(bool yes);\n private:\n" + methods(15, 15))
        self.assert_reports("check-classes", ("src/net/wide.h:3", "[class-methods] Wide has 31 methods, at most 30"))

    def test_constructors_destructors_operators_friends_and_accessors_do_not_count(self):
        self.header(" public:\n  Wide();\n  explicit Wide(int first) : first_(first) {}\n  ~Wide();\n"
                    "  Wide& operator=(const Wide&) = delete;\n  bool operator()(int) const;\n"
                    "  friend void swap(Wide& one, Wide& other);\n"
                    "  int first() const { return first_; }\n  void set_first(int first) { first_ = first; }\n"
                    + methods(30) + " private:\n  int first_ = 0;\n")
        self.assert_clean("check-classes")

    def test_a_short_method_that_does_more_than_return_a_member_counts(self):
        self.header(" public:\n  int twice() const { return first_ + first_; }\n" + methods(30)
                    + " private:\n  int first_ = 0;\n")
        self.assert_reports("check-classes", ("src/net/wide.h:3", "31 methods"))

    def test_members_count_without_static_ones_and_those_of_nested_types(self):
        self.header(" public:\n  static constexpr int kMost = 3;\n  struct Part {\n    int first, second;\n  };\n private:\n"
                    + members(14) + "  std::vector<Part> parts_ TORCHSPAN_GUARDED_BY(mutex_);\n")
        self.assert_clean("check-classes")
        self.header(" private:\n" + members(25) + "  std::vector<int> parts_ TORCHSPAN_GUARDED_BY(mutex_);\n")
        self.assert_reports("check-classes", ("src/net/wide.h:3", "[class-members] Wide has 26 data members, at most 25"))

    def test_a_plain_struct_may_have_many_members(self):
        self.header(members(30) + "  void validate() const;\n", name="struct Options")
        self.assert_clean("check-classes")

    def test_a_nested_class_is_named_with_its_outer_class_and_may_stand_in_a_source(self):
        self.write("src/net/wide.cpp", "namespace torchspan::net {\nnamespace {\nclass Local {\n" + members(26)
                   + "};\n}\nstruct Wide::Impl {\n" + methods(31) + "};\n}\n")
        self.assert_reports("check-classes", ("src/net/wide.cpp:3", "Local has 26 data members"),
                            ("src/net/wide.cpp:32", "Wide::Impl has 31 methods"))

    def test_a_class_whose_methods_stand_in_two_sources_is_named_with_them(self):
        self.header(methods(3) + "  struct Impl {\n" + methods(2) + "  };\n")
        self.write("src/net/wide.cpp", "namespace torchspan::net {\nvoid Wide::work_0(int) {}\n"
                   "void Wide::Impl::work_0(int) {}\n}\n")
        self.write("src/net/more.cpp", "namespace torchspan {\nvoid net::Wide::work_1(int) {}\n}\n")
        self.write("src/net/more_test.cpp", "namespace torchspan::net {\nvoid Wide::work_2(int) {}\n"
                   "void Wide::Impl::work_1(int) {}\n}\n")
        self.assert_reports("check-classes", ("src/net/wide.h:3", "[class-sources] Wide has 2 sources "
                                              "(src/net/more.cpp, src/net/wide.cpp), at most 1"))

    def test_classes_of_one_name_in_two_programs_are_two_classes(self):
        for section in ("rpc", "net"):
            self.header(methods(1), path=f"bench/{section}/wide.h")
            self.write(f"bench/{section}/wide.cpp", "namespace torchspan::net {\nvoid Wide::work_0(int) {}\n}\n")
        self.assert_clean("check-classes")

    def test_classes_of_tests_may_be_wide(self):
        self.header(methods(31), path="src/net/wide_test.cpp")
        self.header(methods(31), path="tests/support/wide.h")
        self.assert_clean("check-classes")

    def test_the_allow_file_permits_what_write_counted_and_no_more(self):
        self.header(methods(32))
        self.assert_clean("check-classes", "--write")
        self.assertEqual((self.root / ALLOW).read_text().splitlines()[1:], ["class-methods src/net/wide.h Wide 32"])
        self.assert_clean("check-classes")
        self.header(methods(33))
        self.assert_reports("check-classes", ("src/net/wide.h:3", "Wide has 33 methods, at most 32"))

    def test_a_class_that_shrank_lowers_its_exception_and_then_loses_it(self):
        self.header(methods(33))
        self.assert_clean("check-classes", "--write")
        self.header(methods(32))
        self.assert_reports("check-classes", (f"{ALLOW}:2", "Wide has 32 methods, not 33 any more"))
        self.header(methods(30))
        self.assert_reports("check-classes", (f"{ALLOW}:2", "matches no finding any more"))
        self.assert_clean("check-classes", "--write")
        self.assert_clean("check-classes")

    def test_a_line_that_is_no_exception_is_named(self):
        self.write(ALLOW, "class-methods src/net/wide.h many\n")
        code, output = self.run_tool("check-classes")
        self.assertEqual(code, 2)
        self.assertIn(f"{ALLOW}:1", output)


if __name__ == "__main__":
    unittest.main()
