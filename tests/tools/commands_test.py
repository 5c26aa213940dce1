"""Plants wrong commands in the documents of a small tree and sees tools/check-commands report them; runs blocks for real."""
import json
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))
from checks_test import Tree as CheckTree  # noqa: E402
from scratch_run import missing_lines  # noqa: E402
from shell_blocks import simple_commands  # noqa: E402

COMMAND_LINE = """
void describe_run(CommandLine& line) {
  line.run = line.app.add_subcommand("run", "Run N workers");
  run.add_option("-n,--workers", workers, "Workers");
  run.add_option(
      "--max-restarts", restarts, "Restarts");
  run.add_flag("--quiet", quiet, "No progress");
}
void describe_schedule(CommandLine& line) {
  line.schedule = line.app.add_subcommand("schedule", "Draw");
  command.add_option("--stages", stages, "Stages");
}
"""
HELP = """[ "$2" != --help ] || echo "$1: -h,--help -n,--workers --max-restarts --quiet --stages"
"""
PRESETS = {"configurePresets": [{"name": "dev"}, {"name": "release"}], "buildPresets": [{"name": "dev"}],
           "testPresets": [{"name": "dev"}]}


class Tree(CheckTree):
    def setUp(self):
        super().setUp()
        self.write("CMakeLists.txt", (self.root / "CMakeLists.txt").read_text() + "option(TORCHSPAN_UNITY \"\" ON)\n")
        self.write("CMakePresets.json", json.dumps(PRESETS))
        self.write("Makefile", "ARGS ?=\nJOBS ?= 2\ndemo:\n\t@echo $(ARGS)\nbench:\n\t@echo $(SECTION)\n")
        self.write("src/launch/commands/command_line.cpp", COMMAND_LINE)
        self.write("examples/CMakeLists.txt", "add_executable(pole pole.cpp)\n")
        self.write("examples/pole.cpp", 'app.add_option("--rounds", rounds);\n')
        self.write("bench/rpc_bench.cpp", 'if (option == "--delay") {}\n')
        self.write("tools/fetch-data", "# knows letters.txt\ncase $1 in --force) ;; esac\n")

    def guide(self, text):
        self.write("docs/guide.md", text)

    def assert_commands(self, commands, *texts):
        """The texts of the findings for a block with these commands."""
        self.guide(f"# Guide\n\n```sh hosts\n{commands}\n```\n")
        if texts:
            self.assert_reports("check-commands", *(("docs/guide.md:4", text) for text in texts))
        else:
            self.assert_clean("check-commands")


class StaticChecks(Tree):
    def test_right_commands_are_clean(self):
        self.assert_commands("make demo ARGS=\"--data DIR\" JOBS=1   # a comment with 'quotes'\n"
                             "cmake --preset release -DTORCHSPAN_UNITY=OFF && cmake --build --preset dev \\\n"
                             "  && ctest --preset dev -R rpc >log 2>&1\n"
                             "ninja -C build/dev -j 2 rpc_test pole torchspan_core\n"
                             "torchspan run -n 4 --quiet --max-restarts=3 ./train --any thing\n"
                             "RANK=0 build/release/bin/torchspan run -n N build/release/bin/pole --rounds 3 &\n"
                             "torchspan schedule 1f1b --stages 4; torchspan run --help\n"
                             "tools/fetch-data --force letters.txt\n(umask 077; mkdir -p x)")

    def test_wrong_make_targets_and_variables_are_named(self):
        self.assert_commands("make dmeo\nmake bench SECTOIN=rpc\nmake bench SECTION=rcp\nmake bench SECTION=rpc ARGS='--dleay 1'",
                             "no target 'dmeo'", "does not use SECTOIN", "no bench/rcp_bench.cpp",
                             "no benchmark has an option '--dleay'")

    def test_wrong_presets_targets_and_tests_are_named(self):
        self.assert_commands("cmake --preset debug\ncmake --build --preset release\ncmake --preset dev -DTORCHSPAN_UNTIY=OFF\n"
                             "ctest -R reference_test\nninja -C build/debug\nninja -C build/dev rcp_test",
                             "no 'debug' in configurePresets", "no 'release' in buildPresets", "knows TORCHSPAN_UNTIY",
                             "no test matches 'reference_test'", "no preset builds in build/debug", "no target 'rcp_test'")

    def test_wrong_options_of_the_command_are_named(self):
        self.assert_commands("torchspan rnu -n 2 ./train\ntorchspan run --max-restart 3 ./train\ntorchspan schedule x --quiet",
                             "no command 'rnu'", "'torchspan run' has no option '--max-restart'",
                             "'torchspan schedule' has no option '--quiet'")

    def test_the_value_of_an_option_is_not_the_program_and_a_flag_has_none(self):
        self.assert_commands("torchspan run -n pole --quiet poel", "no program 'poel'")

    def test_wrong_programs_and_tools_are_named(self):
        self.assert_commands("torchspan run -n 2 pole --runds 3\nfrobnicate\ntools/fetch-daat\ntools/fetch-data --forec\n"
                             "tools/fetch-data letters",
                             "pole has no option '--runds'", "no program 'frobnicate'", "no tools/fetch-daat",
                             "no option '--forec'", "does not know 'letters'")

    def test_commands_in_running_text_are_checked(self):
        self.guide("# Guide\n\nRun `torchspan\nrun --workres 2 ./train`, then `make demo` and `torchspan …`.\n")
        self.assert_reports("check-commands", ("docs/guide.md:3", "no option '--workres'"))

    def test_a_name_that_sources_spell_out_is_no_command(self):
        self.write("src/rendezvous/client.cpp", 'spawn("torchspan membership");\n')
        self.guide("The thread `torchspan membership`.\n")
        self.assert_clean("check-commands")

    def test_commands_need_a_mark_and_a_known_one(self):
        self.guide("```\ntorchspan run -n 2 ./train\n```\n```sh\nmake demo\n```\n```sh perhaps\nmake demo\n```\n"
                   "```console run any more\n$ make demo\n```\n```sh file\nx\n```\n```\nA=1 ./train\n```\n```\noutput\n```\n")
        self.assert_reports("check-commands", ("docs/guide.md:1", "these are commands"), ("docs/guide.md:4", "needs one mark"),
                            ("docs/guide.md:7", "needs one mark"), ("docs/guide.md:10", "needs one mark"),
                            ("docs/guide.md:13", "names one file"), ("docs/guide.md:16", "these are commands"))

    def test_text_that_no_shell_reads_is_named(self):
        self.assert_commands("echo 'open", "a shell cannot read this")


class Words(unittest.TestCase):
    def test_redirections_and_operators_are_no_words(self):
        self.assertEqual(list(simple_commands("a 'b c' >out 2>&1 && (d; e) | f # g\nh \\\n i")),
                         [["a", "b c", "2"], ["d"], ["e"], ["f"], ["h", "i"]])

    def test_numbers_of_an_expected_line_may_differ_and_its_words_may_not(self):
        output = "[worker0] 2 ranks: 98.7 % right\nstep  3\n"
        self.assertEqual(missing_lines(["[worker0] 2 ranks: 99.8 % right", "step 12", "…"], output), [])
        self.assertEqual(missing_lines(["3 ranks: 99 % wrong"], output), ["3 ranks: 99 % wrong"])


class Running(Tree):
    def setUp(self):
        super().setUp()
        self.write("build/dev/bin/torchspan", "#!/bin/sh\necho torchspan \"$@\"\n" + HELP)
        (self.root / "build/dev/bin/torchspan").chmod(0o755)

    def run_guide(self, text, *arguments):
        self.guide(text)
        return self.run_tool("check-commands", "--run", *arguments)

    def test_blocks_run_in_order_in_one_scratch_copy_with_one_environment(self):
        code, output = self.run_guide(
            "```json file plan.json\n{\"a\": 1}\n```\n```sh run\nexport WORD=right\ncp plan.json copy.json\n```\n"
            "```sh run\ntest $WORD = right\ngrep -q '\"a\": 1' copy.json\ntest -f docs/guide.md\n```\n")
        # 'test' and 'grep' are no commands that documents use, so the static part names them; both ran.
        self.assertEqual(output.count("exit code"), 0, output)
        self.assertFalse((self.root / "copy.json").exists())

    def test_failing_commands_are_named_with_their_output(self):
        code, output = self.run_guide("```sh run\necho before\nexit 7\n```\n```sh run\nsort --nonsense\n```\n")
        self.assertIn("docs/guide.md:2: exit code 7: before", output)
        self.assertIn("nonsense", output)
        self.assertEqual(code, 1)

    def test_a_block_that_goes_on_is_ended(self):
        code, output = self.run_guide("```sh run\nexec tail -f /dev/null\n```\n", "--limit", "1")
        self.assertIn("docs/guide.md:2: still running after 1 s", output)
        self.assertEqual(code, 1)

    def test_output_is_compared_unless_any_is_marked(self):
        text = "```console run\n$ torchspan run -n 2 ./train\ntorchspan run -n 3 ./train\n{}\n```\n"
        code, output = self.run_guide(text.format("…"))
        self.assertEqual(code, 0, output)
        code, output = self.run_guide(text.format("all done"))
        self.assertIn("no line like 'all done'", output)
        code, output = self.run_guide(text.format("all done").replace("console run", "console run any"))
        self.assertEqual(code, 0, output)
        code, output = self.run_guide("```sh run\ntorchspan run ./train\n```\n\n```text output\nworld\n```\n")
        self.assertIn("docs/guide.md:6: the output of the commands above has no line like 'world'", output)

    def test_a_build_without_programs_is_named(self):
        (self.root / "build/dev/bin/torchspan").unlink()
        code, output = self.run_guide("```sh run\necho hello\n```\n")
        self.assertIn("has no torchspan", output)

    def test_options_that_the_help_does_not_show_are_named(self):
        self.write("src/launch/commands/command_line.cpp", COMMAND_LINE.replace("--quiet", "--quieter"))
        code, output = self.run_guide("```sh run\necho hello\n```\n")
        self.assertIn("'torchspan run --help' does not show '--quieter'", output)
        self.assertEqual(code, 1)

    def test_the_programs_that_blocks_run_are_listed(self):
        self.guide("```sh run\ntorchspan run -n 2 ./pole\n```\n")
        self.assertEqual(self.run_tool("check-commands", "--programs"), (0, "torchspan_cli pole tutorial\n"))


if __name__ == "__main__":
    unittest.main()
