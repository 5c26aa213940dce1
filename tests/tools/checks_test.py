"""Plants violations in a small tree and sees the check tools report them, at the right line and nothing else."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"

ROOMS = """
torchspan_room(core LINK Threads::Threads)
torchspan_room(net ROOMS core PRIVATE fmt::fmt)
torchspan_room(rendezvous ROOMS net)
torchspan_room(wire TORCH ROOMS core)  # a comment (with brackets)
torchspan_room(rpc TORCH ROOMS rendezvous wire)
torchspan_room(session TORCH ROOMS rpc)
"""
NAMES = ("core", "net", "rendezvous", "wire", "rpc", "session")


class Tree(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = Path(self.folder.name)
        self.write("CMakeLists.txt", ROOMS)
        for name in NAMES:
            self.write(f"src/{name}/README.md", f"# {name}\n")
        self.write("include/torchspan/core/error.h", "#pragma once\n// Errors. Includes no LibTorch.\n")
        self.write("include/torchspan/net/transport.h",
                   "#pragma once\n// Transports. Includes no LibTorch.\n#include <torchspan/core/error.h>\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run_tool(self, tool, *arguments):
        environment = {**os.environ, "TORCHSPAN_CHECK_CACHE": str(self.root / "cache")}
        done = subprocess.run([sys.executable, TOOLS / tool, "--root", self.root, *arguments], env=environment,
                              capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def assert_clean(self, tool, *arguments):
        code, output = self.run_tool(tool, *arguments)
        self.assertEqual(code, 0, output)
        return output

    def assert_reports(self, tool, *places, compiler=None):
        """Exactly these (place, text) findings, in any order."""
        code, output = self.run_tool(tool, *(["--compiler", compiler] if compiler else []))
        found = [line for line in output.splitlines()[:-1]]
        self.assertEqual(code, 1, output)
        self.assertEqual(len(found), len(places), output)
        for place, text in places:
            self.assertTrue(any(line.startswith(place + ": ") and text in line for line in found),
                            f"no '{text}' at {place} in:\n{output}")


class Arrows(Tree):
    def test_a_tidy_tree_is_clean(self):
        self.write("src/rpc/worker.cpp", '#include "rpc/worker.h"\n#include <torchspan/net/transport.h>\n'
                   "#include <ATen/core/Tensor.h>\n")
        self.write("src/rpc/worker.h", "#pragma once\n")
        self.assert_clean("check-arrows")

    def test_an_include_against_the_arrows_is_named(self):
        self.write("src/net/dial.cpp", "#include <vector>\n#include <torchspan/rendezvous/world.h>\n")
        self.assert_reports("check-arrows", ("src/net/dial.cpp:2", "room 'net' has no arrow to 'rendezvous'"))

    def test_arrows_are_transitive_but_not_sideways(self):
        self.write("src/rpc/far.cpp", "#include <torchspan/net/transport.h>\n")
        self.write("src/wire/side.cpp", "#include <torchspan/net/transport.h>\n")
        self.assert_reports("check-arrows", ("src/wire/side.cpp:1", "room 'wire' has no arrow to 'net'"))

    def test_libtorch_above_the_torch_line_is_named(self):
        self.write("include/torchspan/net/bad.h", "#pragma once\n#  include <c10/util/Optional.h>\n")
        self.assert_reports("check-arrows", ("include/torchspan/net/bad.h:2", "torch-free room 'net'"))

    def test_private_headers_stay_private(self):
        self.write("src/net/ring.h", "#pragma once\n")
        self.write("src/net/ring.cpp", '#include "net/ring.h"\n#include "ring.h"\n')
        self.write("src/rendezvous/store/store.cpp", '#include "net/ring.h"\n')
        self.write("include/torchspan/net/leak.h", '#pragma once\n#include "net/ring.h"\n')
        self.write("examples/peek.cpp", '#include "net/ring.h"\n')
        self.write("tests/cluster/peek_test.cpp", '#include "net/ring.h"\n')
        self.assert_reports("check-arrows",
                            ("src/rendezvous/store/store.cpp:1", "private to room 'net'"),
                            ("include/torchspan/net/leak.h:2", "public header includes the private header"),
                            ("examples/peek.cpp:1", "private to room 'net'"))

    def test_headers_for_other_rooms_are_in_detail_and_api(self):
        self.write("include/torchspan/detail/net/channel.h", "#pragma once\n")
        self.write("include/torchspan/net.h", "#pragma once\n#include <torchspan/detail/net/channel.h>\n")
        self.write("src/net/api/sim.h", "#pragma once\n")
        self.write("src/rendezvous/store/store.cpp", '#include <torchspan/detail/net/channel.h>\n#include "net/api/sim.h"\n')
        self.assert_clean("check-arrows")
        self.write("src/wire/side.cpp", '#include "net/api/sim.h"\n#include <torchspan/net.h>\n')
        self.write("include/torchspan/net/leak.h", '#pragma once\n#include "net/api/sim.h"\n')
        self.write("examples/peek.cpp", '#include "net/api/sim.h"\n')
        self.assert_reports("check-arrows",
                            ("src/wire/side.cpp:1", "room 'wire' has no arrow to 'net'"),
                            ("src/wire/side.cpp:2", "room 'wire' has no arrow to 'net'"),
                            ("include/torchspan/net/leak.h:2", "public header includes the private header"),
                            ("examples/peek.cpp:1", "private to room 'net'"))

    def test_tests_include_the_rooms_of_their_tests_and_headers_those_of_inline_functions(self):
        self.write("CMakeLists.txt", ROOMS.replace("torchspan_room(wire TORCH ROOMS core)", "torchspan_room(wire TORCH ROOMS core TESTS net)")
                   .replace("session TORCH ROOMS rpc", "session TORCH ROOMS wire INLINE rpc"))
        self.write("src/wire/side_test.cpp", "#include <torchspan/net/transport.h>\n")
        self.write("include/torchspan/rpc/worker.h", "#pragma once\n")
        self.write("src/session/session.cpp", "#include <torchspan/rpc/worker.h>\n")
        self.assert_clean("check-arrows")
        self.write("src/wire/side.cpp", "#include <torchspan/net/transport.h>\n")
        self.assert_reports("check-arrows", ("src/wire/side.cpp:1", "room 'wire' has no arrow to 'net'"))

    def test_a_relative_include_path_is_checked(self):
        self.write("src/net/ring.h", "#pragma once\n")
        self.write("src/wire/sly.cpp", '#include "../net/ring.h"\n')
        self.assert_reports("check-arrows", ("src/wire/sly.cpp:1", "private to room 'net'"))

    def test_only_programs_include_the_umbrella(self):
        self.write("include/torchspan/torchspan.h", "#pragma once\n#include <torchspan/net/transport.h>\n")
        self.write("examples/program.cpp", "#include <torchspan/torchspan.h>\n")
        self.write("src/session/session.cpp", "#include <torchspan/torchspan.h>\n")
        self.write("src/rpc/lazy.cpp", "#include <torchspan/torchspan.h>\n")
        self.assert_reports("check-arrows", ("src/rpc/lazy.cpp:1", "<torchspan/torchspan.h> is for programs"),
                            ("src/session/session.cpp:1", "<torchspan/torchspan.h> is for programs"))

    def test_a_commented_include_is_ignored(self):
        self.write("src/net/note.cpp", "// #include <torchspan/rpc/worker.h>\n/*\n#include <ATen/ATen.h>\n*/\n")
        self.assert_clean("check-arrows")

    def test_unknown_rooms_and_missing_guides_are_named(self):
        self.write("src/attic/old.cpp", "int f() { return 0; }\n")
        self.write("src/rpc/new.cpp", "#include <torchspan/attic/old.h>\n")
        (self.root / "src/net/README.md").unlink()
        self.assert_reports("check-arrows", ("src/attic/old.cpp:1", "folder 'attic' is not a room"),
                            ("src/rpc/new.cpp:1", "there is no room 'attic'"),
                            ("src/net/README.md:1", "has no guide"))

    def test_the_picture_of_the_rooms_has_the_arrows_of_the_table(self):
        arrows = ("net-core", "rendezvous-net", "wire-core", "rpc-rendezvous", "rpc-wire", "session-rpc")
        self.write("docs/images/rooms.svg", "".join(f'<path id="{arrow}" d="M0 0"/>' for arrow in arrows))
        self.assert_clean("check-arrows")
        self.write("docs/images/rooms.svg", "".join(f'<path id="{arrow}" d="M0 0"/>' for arrow in (*arrows[1:], "net-wire")))
        self.assert_reports("check-arrows", ("docs/images/rooms.svg:1", "'net-core' is missing"),
                            ("docs/images/rooms.svg:1", "'net-wire' is not in CMakeLists.txt"))

    def test_an_invalid_table_is_rejected(self):
        self.write("CMakeLists.txt", "torchspan_room(net ROOMS rpc)\ntorchspan_room(rpc)\n")
        code, output = self.run_tool("check-arrows")
        self.assertEqual((code, "CMakeLists.txt:1: room 'net' has an arrow to 'rpc'" in output), (2, True), output)
        self.write("CMakeLists.txt", "torchspan_room(core)\ntorchspan_room(wire TORCH)\ntorchspan_room(net ROOMS wire)\n")
        code, output = self.run_tool("check-arrows")
        self.assertEqual((code, "across the torch line" in output), (2, True), output)


class Rules(Tree):
    def test_a_tidy_file_is_clean(self):
        self.write("src/net/tidy.cpp", """// std::thread and a static int in a comment, and "std::async" in a text
#include <thread>
namespace torchspan {
namespace {
constexpr int kLimit = 1'000;
const char* const kName = "std::thread steady_clock";
inline constexpr Class<Encoder, int64_t> kEncoder{"Encoder"};
const std::vector<int> kSizes = {1, 2};
}  // namespace
template <class T, class = std::enable_if_t<(sizeof(T) > 2)>> void put(T value = T{}) { static_assert(sizeof(T) > 2); }
bool operator==(const A& a, const B& b) { return true; }
enum class Kind : int { kOne = 1 };
struct Message { int size = 0; static constexpr int kType = 3; static Message make(int size = 0); };
Message::Message() : size_(3), kind_{4} {}
template <> struct Traits<Message> { static const char* name(); };
void Pool::run() { executor_->sleep(limit); thread_.join(); static const int seven = 7; }
}  // namespace torchspan
""")
        self.assert_clean("check-rules")

    def test_threads_waits_and_clocks_come_from_the_executor(self):
        lines = ["std::thread t;", "std::jthread t;", "auto f = std::async(g);", "std::condition_variable_any c;",
                 "auto now = std::chrono::steady_clock::now();", "std::chrono::system_clock::time_point t;",
                 "high_resolution_clock::now();", "std::this_thread::sleep_for(1s);", "usleep(3);", "::sleep(1);",
                 "std::promise<int> p;", "std::mutex m;", "epoll_wait(fd, e, 1, 0);"]
        self.write("src/net/executor_test.cpp", "void f() {\n" + "\n".join(lines) + "\n}\n")
        self.write("src/core/async/executor.cpp", "void f() {\n" + "\n".join(lines) + "\n}\n")
        self.assert_reports("check-rules",
                            *((f"src/net/executor_test.cpp:{row}", "[executor]") for row in range(2, len(lines) + 2)))

    def test_state_that_can_change_is_named(self):
        lines = ["int counter = 0;", "std::atomic<int> total{0};", "inline std::map<std::string, int> registry;",
                 "template <class T> T slot = T();", 'const char* name = "x";', "int Worker::count_;",
                 "struct A { static int count_; };", "void f() { static auto last = g(); }",
                 "thread_local int depth = 0;"]
        self.write("src/net/state.cpp", "namespace torchspan {\n" + "\n".join(lines) + "\n}\n")
        self.assert_reports("check-rules",
                            *((f"src/net/state.cpp:{row}", "[state]") for row in range(2, len(lines) + 2)))

    def test_an_exception_covers_one_line_and_must_be_needed(self):
        self.write("src/rpc/current.cpp", "thread_local Context* current = nullptr;\nthread_local int other = 0;\n")
        self.write("tools/check-rules.allow", "# why\nstate src/rpc/current.cpp Context* current\n")
        self.assert_reports("check-rules", ("src/rpc/current.cpp:2", "thread_local"))
        self.write("src/rpc/current.cpp", "\n")
        self.assert_reports("check-rules", ("check-rules.allow:2", "matches no finding any more"))

    def test_public_headers_include_neither_heavy_nor_private_libraries(self):
        self.write("include/torchspan/rpc/heavy.h",
                   "#pragma once\n// Heavy. Includes torch/nn.\n#include <torch/torch.h>\n#include <fmt/format.h>\n")
        self.write("include/torchspan/session.h", "#pragma once\n// All. Includes torch/nn.\n#include <torch/torch.h>\n")
        self.write("include/torchspan/rpc/bare.h", "// Bare. Includes no LibTorch.\nstruct Bare {};\n")
        self.assert_reports("check-rules", ("include/torchspan/rpc/heavy.h:3", "[heavy-include]"),
                            ("include/torchspan/rpc/heavy.h:4", "[leak]"),
                            ("include/torchspan/rpc/bare.h:1", "[guard]"))

    def test_public_headers_say_what_they_include_of_libtorch(self):
        self.write("include/torchspan/detail/rpc/value.h", "#pragma once\n#include <ATen/core/Tensor.h>\n")
        self.write("include/torchspan/rpc/value.h", "#pragma once\n// Values. Includes no LibTorch.\n"
                   "#include <torchspan/detail/rpc/value.h>\n")
        self.write("include/torchspan/rpc/module.h", "#pragma once\n// Modules.\n#include <torch/nn/module.h>\n"
                   "#include <torchspan/rpc/value.h>\n")
        self.write("include/torchspan/rpc/name.h", "#pragma once\n// Names. Includes\n// no LibTorch.\n#include <string>\n")
        self.assert_reports("check-rules", ("include/torchspan/rpc/value.h:2", "ends with 'Includes no torch/nn.'"),
                            ("include/torchspan/rpc/module.h:2", "ends with 'Includes torch/nn.'"))

    def test_a_source_that_uses_a_type_whose_header_it_does_not_include_is_named(self):
        self.write("src/rpc/caller.h", "#pragma once\nclass Caller {\n};\n")
        self.write("src/rpc/calls.h", '#pragma once\n#include "rpc/caller.h"\nclass Callee;\n')
        self.write("src/rpc/callee.h", "#pragma once\nclass Callee {\n};\n")
        self.write("src/rpc/one.cpp", '#include "rpc/calls.h"\nvoid one(Caller& a, Callee* b) { Caller c; }\n')
        self.write("src/rpc/two.cpp", '#include "rpc/calls.h"\nTEST(Callee, Calls) {}\nvoid two() { Callee callee; }\n'
                   "void three() { at::Caller(); }\n")
        self.assert_reports("check-rules", ("src/rpc/two.cpp:3", "[uses] Callee is used here: include src/rpc/callee.h"))

    def test_unfinished_work_long_files_and_machine_paths_are_named(self):
        self.write("src/net/later.cpp", "// TO" "DO: later\n" + "\n" * 1199)
        self.write("src/net/long.cpp", "\n" * 1201)
        self.write("src/net/long.h", "#pragma once\n" + "\n" * 400)
        self.write("docs/where.md", "Look at /work" "/main.\nOr at /usr/share and https://a.b/work" "/x.\n")
        self.write("src/net/README.md", "line\n" * 41)
        self.write("src/net/off_test.cpp", "TEST(Net, DISABLED_Flaky) {}\n")
        self.assert_reports("check-rules", ("src/net/later.cpp:1", "[unfinished]"),
                            ("src/net/long.cpp:1201", "[long-file] 1201 lines; at most 1200"),
                            ("src/net/long.h:401", "[long-file] 401 lines; at most 400"), ("docs/where.md:1", "[machine-path]"),
                            ("src/net/README.md:41", "[long-guide]"), ("src/net/off_test.cpp:1", "[disabled-test]"))

    def test_long_main_files_of_examples_are_named(self):
        self.write("examples/train.cpp", "\n" * 150)
        self.write("examples/train/data.cpp", "\n" * 151)
        self.assert_clean("check-rules")
        self.write("examples/train.cpp", "\n" * 151)
        self.assert_reports("check-rules", ("examples/train.cpp:151", "[long-example] 151 lines"))

    def test_dead_links_are_named(self):
        self.write("docs/threads.md", "# Threads\n")
        self.write("docs/map.md", "[a](threads.md) [b](threads.md#core) [c](https://a.b/c) `[d](e)`\n\n[f](gone.md)\n")
        self.assert_reports("check-rules", ("docs/map.md:3", "[dead-link] 'gone.md'"))

    def test_long_functions_are_named(self):
        body = "  step();\n" * 99
        self.write("src/net/run.cpp", "struct A {\n  void run() const {\n" + body + "  }\n};\nint go(int a)\n{\n" + body
                   + "}\nint short_one() {\n  return 1;\n}\n")
        self.assert_reports("check-rules", ("src/net/run.cpp:2", "[long-function]"),
                            ("src/net/run.cpp:104", "[long-function]"))


@unittest.skipUnless(shutil.which("g++"), "needs g++")
class Headers(Tree):
    def test_a_header_that_is_not_self_contained_is_named_and_clean_ones_are_not_recompiled(self):
        self.assertIn("2 compiled: clean", self.assert_clean("check-headers", "--compiler", "g++"))
        self.assertIn("0 compiled: clean", self.assert_clean("check-headers", "--compiler", "g++"))
        self.write("include/torchspan/core/error.h", "#pragma once\nstruct Error { int kind; };\n")
        self.assertIn("2 compiled: clean", self.assert_clean("check-headers", "--compiler", "g++"))
        self.write("include/torchspan/net/lean.h", "#pragma once\nstruct Lean { std::string name; };\n")
        self.assert_reports("check-headers", ("include/torchspan/net/lean.h:2", "<torchspan/net/lean.h>"))

    def test_a_time_limit_lists_what_was_not_reached(self):
        output = self.assert_clean("check-headers", "--compiler", "g++", "--seconds", "1e-9")
        self.assertIn("note: 2 of 2 files were not reached", output)
        self.assertIn("include/torchspan/core/error.h", output)
        self.assertIn("0 compiled: clean", output)
        self.assertIn("2 compiled: clean", self.assert_clean("check-headers", "--compiler", "g++"))


    @unittest.skipUnless(shutil.which("clang++-19"), "needs clang 19")
    def test_a_precompiled_header_hides_no_missing_include(self):
        shutil.rmtree(self.root / "include")
        base = "#pragma once\n#include <chrono>\n#include <string>\n"
        self.write("include/torchspan/net/full.h", base + "#include <vector>\nusing Names = std::vector<std::string>;\n")
        self.write("include/torchspan/net/user.h", "#pragma once\n#include <torchspan/net/full.h>\nusing All = Names;\n")
        self.write("include/torchspan/net/lean.h", base + "#include <vector>\nusing Map = std::map<int, std::string>;\n")
        self.write("include/torchspan/net/less.h", base + "#if 0\n#include <vector>\n#endif\nusing List = std::vector<int>;\n")
        self.assert_reports("check-headers", ("include/torchspan/net/lean.h:5", "<torchspan/net/lean.h>"),
                            ("include/torchspan/net/less.h:7", "<torchspan/net/less.h>"), compiler="clang++-19")
        self.assertEqual([path.name[:17] for path in (self.root / "cache/precompiled").glob("*.pch")], ["headers-standard-"])


@unittest.skipUnless(shutil.which("clang-tidy"), "needs clang-tidy")
class Tidy(Tree):
    def test_a_planted_bug_is_named_and_clean_files_are_not_read_again(self):
        self.write(".clang-tidy", "Checks: '-*,bugprone-use-after-move'\nWarningsAsErrors: '*'\n")
        self.write("src/net/good.cpp", "int good() { return 0; }\n")
        self.assertIn("1 read, 0 known clean: clean", self.assert_clean("check-tidy", "src/net/good.cpp"))
        self.assertIn("0 read, 1 known clean: clean", self.assert_clean("check-tidy", "src/net/good.cpp"))
        self.write("src/net/bad.cpp", "#include <string>\n#include <utility>\nvoid take(std::string);\n"
                   "int bad(std::string a) {\n  take(std::move(a));\n  return a.size();\n}\n")
        code, output = self.run_tool("check-tidy", "src/net/bad.cpp")
        self.assertEqual(code, 1, output)
        self.assertIn("src/net/bad.cpp:6: 'a' used after it was moved", output)

    def test_a_guarded_field_read_without_its_lock_is_named(self):
        repository = TOOLS.parent
        self.write(".clang-tidy", (repository / ".clang-tidy").read_text())
        self.write("include/torchspan/detail/core/mutex.h",
                   (repository / "include/torchspan/detail/core/mutex.h").read_text())
        self.write("src/net/bare.cpp", "#include <torchspan/detail/core/mutex.h>\nstruct Counter {\n  torchspan::Mutex mutex;\n"
                   "  int count TORCHSPAN_GUARDED_BY(mutex) = 0;\n  int get() { return count; }\n};\n")
        code, output = self.run_tool("check-tidy", "src/net/bare.cpp")
        self.assertEqual(code, 1, output)
        self.assertIn("src/net/bare.cpp:5: reading variable 'count' requires holding mutex 'mutex'", output)


class InstallDeps(unittest.TestCase):
    def test_it_reports_invalid_arguments(self):
        done = subprocess.run([TOOLS / "install-deps", "everything"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("unknown argument 'everything'", done.stderr)

    def test_without_root_and_sudo_it_names_the_command(self):
        with tempfile.TemporaryDirectory() as folder:
            # A machine where nothing is installed, nobody is root and there is no sudo.
            for name, body in (("dpkg-query", "exit 1"), ("apt-get", "exit 9"), ("id", "echo 1000"),
                               ("update-alternatives", "exit 0")):
                script = Path(folder) / name
                script.write_text(f"#!/bin/sh\n{body}\n")
                script.chmod(0o755)
            for name in ("bash", "sort", "grep", "env", "mapfile"):
                if shutil.which(name):
                    (Path(folder) / name).symlink_to(shutil.which(name))
            done = subprocess.run([shutil.which("bash"), TOOLS / "install-deps", "check"], env={"PATH": folder},
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn("run this as root: apt-get install", done.stderr)
            self.assertIn("clang-tidy", done.stderr)


class Guide(Tree):
    """A document, and what docs/snippets declares for it."""

    def setUp(self):
        super().setUp()
        self.write("docs/snippets/guide.h", "#pragma once\nint answer();\nstruct [[nodiscard]] Done {};\nDone start();\n")

    def guide(self, *blocks):
        self.write("docs/guide.md", "# Guide\n\n" + "\n".join(f"```cpp{kind}\n{code}```\n" for kind, code in blocks))


class Docs(Guide):
    """Code blocks of documents, compiled without a build."""

    def test_statements_declarations_and_programs_compile(self):
        self.guide(("", "int x = answer();\n"), ("", "int x = 2;\n"), (" declarations", "int twice(int x) { return 2 * x; }\n"),
                   ("", "#include <vector>\nstd::vector<int> all{twice(1)};\n"), ("", "int main() {\n  answer();\n}\n"))
        self.assertIn("5 blocks of 1 documents, 1 compiled: clean", self.assert_clean("check-docs"))
        self.assertIn("0 compiled: clean", self.assert_clean("check-docs"))
        self.write("docs/snippets/guide.h", "#pragma once\nvoid answer();\n")
        self.assert_reports("check-docs", ("docs/guide.md:4", "void value not ignored"))

    def test_a_block_that_does_not_compile_is_named_by_its_line_in_the_document(self):
        self.guide(("", "answer();\n"), ("", "answer();\nanswer(3);\n"))
        self.assert_reports("check-docs", ("docs/guide.md:9", "too many arguments"))

    def test_a_program_that_returns_nothing_from_main_is_named(self):
        self.guide(("", "void stop();\nint main() {\n  return stop();\n}\n"))
        self.assert_reports("check-docs", ("docs/guide.md:6", "void value not ignored"))

    def test_a_result_that_must_be_used_is_named(self):
        self.guide(("", "start();\n"))
        self.assert_reports("check-docs", ("docs/guide.md:4", "ignoring returned value"))

    def test_an_uncompiled_block_is_not_compiled(self):
        self.guide((" uncompiled", "#include <no_such_header.h>\nanswer(3);\n"), ("", "answer();\n"))
        self.assertIn("1 blocks of 1 documents, 1 compiled: clean", self.assert_clean("check-docs"))

    def test_a_kind_of_block_that_does_not_exist_is_named(self):
        self.guide((" fragment", "answer();\n"))
        self.assert_reports("check-docs", ("docs/guide.md:3", "a block is"))


@unittest.skipUnless(shutil.which("clang++-19") and shutil.which("ninja"), "needs clang 19 and ninja")
class DocsWithABuild(Guide):
    """Documents compiled with the precompiled header of a build, whose one header is docs/precompiled.h."""

    def setUp(self):
        super().setUp()
        build = self.root / "build/dev"
        self.write("docs/precompiled.h", "#pragma once\n#include <vector>\n")
        ninja, entries = ["rule compile", "  command = $line", "  depfile = $out.d", "  deps = gcc"], []
        for size in ("narrow", "whole"):
            folder = f"CMakeFiles/torchspan_torch_{size}_programs.dir"
            self.write(f"build/dev/{folder}/cmake_pch.hxx", f'#include "{self.root}/docs/precompiled.h"\n')
            self.write(f"build/dev/{folder}/cmake_pch.hxx.cxx", "")
            text, output = build / folder / "cmake_pch.hxx", f"{folder}/cmake_pch.hxx.pch"
            line = (f"clang++-19 -std=c++20 -DOF_THE_BUILD=1 -Xclang -emit-pch -Xclang -include -Xclang {text} -x c++-header "
                    f"-o {output} -c {text}.cxx")
            entries.append({"directory": str(build), "command": line, "file": f"{text}.cxx"})
            ninja += [f"build {output}: compile", f"  line = {line} -MD -MF {output}.d"]
        self.write("build/dev/compile_commands.json", json.dumps(entries))
        self.write("build/dev/build.ninja", "\n".join(ninja) + "\n")

    def test_the_precompiled_header_is_used_and_built_again_after_a_change(self):
        self.guide(("", "std::vector<int> all{answer(), OF_THE_BUILD};\n"))
        self.assertIn("1 compiled: clean", self.assert_clean("check-docs"))
        self.write("docs/precompiled.h", "#pragma once\n#include <string>\n#include <vector>\n")
        self.assertIn("1 compiled: clean", self.assert_clean("check-docs"))
        self.guide(("", "start();\n"))
        self.assert_reports("check-docs", ("docs/guide.md:4", "ignoring return value"))

    def test_a_precompiled_header_that_cannot_be_built_is_reported(self):
        self.guide(("", "answer();\n"))
        self.write("docs/precompiled.h", "#include <no_such_header.h>\n")
        code, output = self.run_tool("check-docs")
        self.assertEqual(code, 2, output)
        self.assertIn("ninja cannot build the precompiled header", output)
        self.assertIn("no_such_header.h", output)


class WireTables(Tree):
    """The tables of messages in docs/wire.md against the structs."""

    MESSAGE = ("#pragma once\nnamespace torchspan::rpc {\n/// Says hello. And more.\nstruct Hello {\n"
               "  static constexpr wire::MessageType kType{0x0001};\n  using Reply = bool;\n  std::string name;\n"
               "  std::uint64_t sent = 0, received = 0;\n  int here = 0;  ///< does not travel\n};\n}\n"
               "template <>\nstruct Wire<rpc::Hello>\n    : WireStruct<rpc::Hello, \"rpc.Hello\", &rpc::Hello::name,\n"
               "                 &rpc::Hello::sent, &rpc::Hello::received> {};\n")

    def setUp(self):
        super().setUp()
        self.write("src/rpc/hello.h", self.MESSAGE)
        self.write("docs/wire.md", "# Wire\n\n<!-- messages of rpc -->\n<!-- end -->\n")

    def test_what_it_writes_is_clean_and_has_fields_types_and_reply(self):
        self.assert_clean("check-wire", "--write")
        self.assertIn("| 0x0001 | Hello. Says hello | `name string, sent uint64, received uint64` | `bool` |",
                      (self.root / "docs/wire.md").read_text())
        self.assert_clean("check-wire")

    def test_a_field_that_the_document_lacks_is_named(self):
        self.assert_clean("check-wire", "--write")
        self.write("src/rpc/hello.h", self.MESSAGE.replace("::received>", "::received, &rpc::Hello::here>"))
        self.assert_reports("check-wire", ("docs/wire.md:6", "differs from the sources"), ("docs/wire.md:4", "here int"))

    def test_a_struct_that_states_its_wire_name_sends_all_its_members(self):
        message = self.MESSAGE.split("template <>")[0].replace("{0x0001};\n", "{0x0001};\n  static constexpr FixedString kWireName = \"rpc.Hello\";\n")
        self.write("src/rpc/hello.h", message)
        self.assert_clean("check-wire", "--write")
        self.assertIn("`name string, sent uint64, received uint64, here int`", (self.root / "docs/wire.md").read_text())

    def test_a_room_without_a_table_is_named(self):
        self.assert_clean("check-wire", "--write")
        self.write("src/net/ping.h", self.MESSAGE.replace("rpc", "net").replace("Hello", "Ping"))
        self.assert_reports("check-wire", ("docs/wire.md:1", "messages of net"))


class RunBench(unittest.TestCase):
    """In a folder with a bench whose peer is a program in Python, and tools that only say what they were asked."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for path in ("tools", "bench", "build/release/bin", "bin"):
            (self.root / path).mkdir(parents=True)
        shutil.copy(TOOLS / "run-bench", self.root / "tools/run-bench")
        (self.root / "bench/peered_bench.cpp").write_text('const char* kPeer = "bench/peers/torch_any.py";\n')
        (self.root / "bench/alone_bench.cpp").write_text("int main() {}\n")
        self.script("bin/ninja", "exit 0")
        for section in ("peered", "alone"):
            self.script(f"build/release/bin/bench_{section}", 'printf \'{"arguments": "%s"}\' "$*"')

    def script(self, name, body):
        path = self.root / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run_bench(self, section, *arguments, install="exit 0"):
        self.script("tools/install-deps", f'echo "$*" >>"{self.root}/asked"; {install}')
        done = subprocess.run([self.root / "tools/run-bench", section, *arguments], capture_output=True, text=True,
                              env={"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        asked = self.root / "asked"
        figures = json.loads((self.root / f"build/bench/{section}.json").read_text())
        return asked.read_text() if asked.exists() else "", figures["arguments"], done.stderr

    def test_it_installs_the_peer_of_a_section_that_has_one(self):
        asked, arguments, _ = self.run_bench("peered", "--rounds", "2")
        self.assertEqual((asked, arguments), ("bench\n", "--rounds 2"))

    def test_a_section_without_a_peer_installs_nothing(self):
        self.assertEqual(self.run_bench("alone")[:2], ("", ""))
        self.assertEqual(self.run_bench("peered", "--no-peer")[:2], ("", "--no-peer"))

    def test_a_peer_that_cannot_be_installed_is_left_out_and_reported(self):
        asked, arguments, errors = self.run_bench("peered", install="exit 1")
        self.assertEqual((asked, arguments), ("bench\n", "--no-peer"))
        self.assertIn("the peer of 'peered' is not installed", errors)


if __name__ == "__main__":
    unittest.main()
