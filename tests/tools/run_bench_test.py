"""How tools/run-bench runs sections; a stub stands for ninja, and scripts for the built benchmarks."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
WORKS = """#!/bin/sh
echo '{"machine": "m", "metrics": [{"name": "a/b", "value": 1, "arguments": "'"$*"'", "rounds": "'"$TORCHSPAN_BENCH_ROUNDS"'"}]}'
"""


class RunBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.results = self.root / "build" / "bench"
        for path in ("bench", "tools", "build/release/bin", "path"):
            (self.root / path).mkdir(parents=True)
        for tool in ("run-bench", "bench-report", "line_plot.py"):
            shutil.copy(TOOLS / tool, self.root / "tools" / tool)
        self.script("path/ninja", "#!/bin/sh\n")
        self.script("path/nvidia-smi", "#!/bin/sh\nexit 9\n")

    def script(self, path, text):
        file = self.root / path
        file.write_text(text)
        file.chmod(0o755)

    def section(self, name, text=WORKS, source=""):
        (self.root / "bench" / f"{name}_bench.cpp").write_text(source)
        self.script(f"build/release/bin/bench_{name}", text)

    def run_tool(self, *arguments, **variables):
        environment = {**os.environ, "PATH": f"{self.root / 'path'}:{os.environ['PATH']}", **variables}
        environment.pop("TORCHSPAN_BENCH_ROUNDS", None)
        done = subprocess.run([self.root / "tools" / "run-bench", *arguments], env=environment, capture_output=True, text=True,
                              check=False)
        return done.returncode, done.stdout + done.stderr

    def figure(self, section):
        return json.loads((self.results / f"{section}.json").read_text())["metrics"][0]

    def test_all_sections_run_although_one_fails_and_a_report_is_made(self):
        self.section("broken", "#!/bin/sh\nexit 3\n")
        self.section("chatty", "#!/bin/sh\necho no JSON\n")
        self.section("gpu")
        self.section("good")
        code, output = self.run_tool("--quick")
        self.assertEqual(code, 1, output)
        self.assertIn("run-bench: failed: broken chatty", output)
        self.assertIn("bench_chatty printed no JSON", output)
        self.assertTrue((self.results / "report.html").is_file(), output)
        self.assertEqual([path.name for path in self.results.glob("*.json")], ["good.json"])
        self.assertEqual(self.figure("good")["rounds"], "1")

    def test_a_section_gets_its_arguments(self):
        self.section("good")
        self.assertEqual(self.run_tool("good", "--filter", "x")[0], 0)
        self.assertEqual(self.figure("good")["arguments"], "--filter x")
        self.assertEqual(self.figure("good")["rounds"], "", "a whole run")
        self.assertFalse((self.results / "report.html").exists())

    def test_a_section_installs_its_peer_or_does_without(self):
        self.section("good", source='kPeer = "bench/peers/torch_ddp.py"')
        self.script("tools/install-deps", "#!/bin/sh\necho installing $*\nexit 0\n")
        code, output = self.run_tool("good")
        self.assertEqual((code, "installing bench" in output), (0, True), output)
        self.assertEqual(self.figure("good")["arguments"], "")
        self.script("tools/install-deps", "#!/bin/sh\nexit 1\n")
        code, output = self.run_tool("good")
        self.assertEqual((code, "measuring without it" in output), (0, True), output)
        self.assertEqual(self.figure("good")["arguments"], "--no-peer")

    def test_wrong_arguments_are_named(self):
        self.section("good")
        for arguments, variables, text in (
                (("nosuch",), {}, "unknown section 'nosuch'; the sections are: good"),
                (("--rounds", "3"), {}, "--rounds 3: the sections have different options: name a section"),
                (("good",), {"LIBTORCH": "torch3"}, "LIBTORCH=torch3: unset it")):
            code, output = self.run_tool(*arguments, **variables)
            self.assertEqual((code, text in output), (2, True), output)


if __name__ == "__main__":
    unittest.main()
