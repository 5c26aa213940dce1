"""Plants messages in a small tree and sees tools/check-messages report those that no source has."""
import unittest

from checks_test import Tree as CheckTree


class Messages(CheckTree):
    def setUp(self):
        super().setUp()
        self.write("src/net/dial.cpp", 'fail(fmt::format("there is no route from \'{}\' to "\n     "\'{:g}\' in \\"{}\\"", a, b, c));\n'
                   '// "a comment is no message of a program"\n')
        self.write("src/net/dial_test.cpp", 'expect("only a test has this text");\n')
        self.write("cmake/find.cmake", 'message(FATAL_ERROR "LibTorch ${VERSION} is older than "\n  "${LEAST}, which is needed")\n')

    def rows(self, *messages):
        self.write("docs/troubleshooting.md", "# Errors\n\n| message | cause |\n|---|---|\n" +
                   "".join(f"| `{message}` | `not this` |\n" for message in messages))

    def test_messages_of_sources_are_clean(self):
        self.rows("there is no route from '…' to '…' in \"", "there is no route from", "LibTorch … is older than …, which is needed")
        self.assert_clean("check-messages")

    def test_a_changed_message_is_named(self):
        self.rows("there is no route from '…' to '…' in", "there is no way from '…' to")
        self.assert_reports("check-messages", ("docs/troubleshooting.md:6", "no source has the text 'there is no way from"))

    def test_a_part_does_not_reach_over_what_varies(self):
        self.rows("there is no route from 'worker1' to 'worker2'", "is older than , which is needed")
        self.assert_reports("check-messages", ("docs/troubleshooting.md:5", "no source has the text"),
                            ("docs/troubleshooting.md:6", "no source has the text"))

    def test_tests_and_comments_are_no_sources_of_messages(self):
        self.rows("only a test has this text", "a comment is no message of a program")
        self.assert_reports("check-messages", ("docs/troubleshooting.md:5", "no source has"), ("docs/troubleshooting.md:6", "no source has"))

    def test_short_and_repeated_messages_and_an_empty_page_are_named(self):
        self.rows("no route", "there is no route from", "there is no route from")
        self.assert_reports("check-messages", ("docs/troubleshooting.md:5", "too short"), ("docs/troubleshooting.md:7", "also in line 6"))
        self.rows()
        self.assert_reports("check-messages", ("docs/troubleshooting.md:1", "no table of messages"))


if __name__ == "__main__":
    unittest.main()
