"""What tools/bench-report says of the files that `make bench` writes."""
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench-report"


def figure(name, ratio):
    return {"name": name, "unit": "us", "value": 10 * ratio, "peer": "peer/" + name, "peer_value": 10.0, "ratio": ratio}


class BenchReport(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.results = self.root / "build" / "bench"
        for path in (self.root / "tools", self.root / "bench", self.results / "torch2"):
            path.mkdir(parents=True)
        shutil.copy(TOOL, self.root / "tools" / "bench-report")
        self.record = self.root / "bench" / "ratios.json"
        self.record.write_text(json.dumps({"rpc": {"rpc/call": 0.5, "rpc/echo": 0.8, "rpc/gone": 0.7}}))

    def write(self, section, *metrics, folder=None, **more):
        data = {"machine": "x86_64 <2 cores>", "metrics": list(metrics), **more}
        ((folder or self.results) / f"{section}.json").write_text(json.dumps(data))

    def run_tool(self, *arguments):
        done = subprocess.run([sys.executable, self.root / "tools" / "bench-report", *arguments], capture_output=True,
                              text=True, check=False)
        return done.returncode, done.stdout.splitlines(), done.stderr

    def test_ratios_that_changed_or_are_missing_are_printed_and_shown(self):
        self.record.write_text(json.dumps({"rpc": {"rpc/add": 0.9, "rpc/call": 0.5, "rpc/echo": 0.8, "rpc/gone": 0.7}}))
        self.write("rpc", figure("rpc/add", 0.6), figure("rpc/call", 0.7), figure("rpc/echo", 0.9), figure("rpc/new", 5.0))
        code, lines, _ = self.run_tool()
        self.assertEqual(code, 0)
        self.assertEqual(lines[:-1], ["rpc/call: 0.7, recorded 0.5 (slower)", "rpc/gone: not measured, recorded 0.7",
                                      "rpc/add: 0.6, recorded 0.9 (faster)", "rpc/new: 5, not recorded"])
        page = (self.results / "report.html").read_text()
        for text in ("<li>rpc/call: 0.7, recorded 0.5 (slower)</li>", "4 figures, 4 ratios, 4 changed", "<svg",
                     '<tr class="flag"><td>rpc/call</td>', "<tr><td>rpc/echo</td>", "x86_64 &lt;2 cores&gt;",
                     "<a href='#rpc'>rpc</a>"):
            self.assertIn(text, page)
        self.assertNotIn("Quick run", page)

    def test_record_replaces_the_ratios_of_the_measured_sections(self):
        self.record.write_text(json.dumps({"rpc": {"rpc/gone": 0.7}, "optim": {"optim/adam": 0.3}}))
        self.write("rpc", figure("rpc/call", 0.71234567))
        self.assertEqual(self.run_tool("--record")[0], 0)
        self.assertEqual(json.loads(self.record.read_text()), {"rpc": {"rpc/call": 0.7123}, "optim": {"optim/adam": 0.3}})
        self.assertEqual(len(self.run_tool()[1]), 1, "only the report's path")

    def test_quick_runs_are_named_and_not_recorded(self):
        self.write("rpc", figure("rpc/call", 0.5), quick=True)
        before = self.record.read_text()
        code, _, errors = self.run_tool("--record")
        self.assertEqual(code, 1)
        self.assertIn("rpc: quick runs are too rough to be recorded", errors)
        self.assertEqual(self.record.read_text(), before)
        self.assertIn("Quick run: one round", (self.results / "report.html").read_text())

    def test_the_two_libtorchs_have_their_own_ratios(self):
        torch2 = self.results / "torch2"
        self.write("rpc", figure("rpc/call", 0.9), folder=torch2)
        self.assertEqual(self.run_tool(str(torch2))[1], [str(torch2 / "report.html")])
        self.assertIn("none recorded", (torch2 / "report.html").read_text())
        self.assertEqual(self.run_tool("--record", str(torch2))[0], 0)
        self.assertEqual(json.loads((self.root / "bench" / "ratios_torch2.json").read_text()), {"rpc": {"rpc/call": 0.9}})
        self.assertIn("rpc/gone", self.record.read_text())

    def test_a_section_without_figures_has_no_plot(self):
        self.write("hosts")
        self.assertEqual(self.run_tool()[0], 0)
        page = (self.results / "report.html").read_text()
        self.assertIn("0 figures, 0 ratios, none recorded", page)
        self.assertNotIn("<svg", page)

    def test_files_that_are_no_results_are_named(self):
        for text in ("{", "[]", "{}"):
            (self.results / "rpc.json").write_text(text)
            code, _, errors = self.run_tool()
            self.assertEqual(code, 1)
            self.assertIn("rpc.json is not the file of a section: delete it, and run make bench again", errors)
        (self.results / "rpc.json").unlink()
        self.assertIn("has no results: run make bench first", self.run_tool()[2])


if __name__ == "__main__":
    unittest.main()
