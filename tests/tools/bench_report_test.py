"""What tools/bench-report says of the files that `make bench` writes."""
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
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
        for path in (self.root / "tools", self.root / "bench", self.root / "docs" / "images", self.results / "torch2"):
            path.mkdir(parents=True)
        for tool in (TOOL, TOOL.with_name("line_plot.py")):
            shutil.copy(tool, self.root / "tools" / tool.name)
        self.record = self.root / "bench" / "recorded.json"
        self.page = self.root / "docs" / "performance.md"
        self.page.write_text("# Text\n\n<!-- figures\n     rpc/(call|echo) rpc/g.* -->\nold\n<!-- end -->\nend\n")
        self.write_record({"rpc": {"rpc/call": 0.5, "rpc/echo": 0.8, "rpc/gone": 0.7}})

    def write_record(self, ratios):
        """`ratios`: by section and name of figure."""
        self.record.write_text(json.dumps({
            section: {"machine": "x86_64", "measured": "2026-01-31",
                      "figures": {name: {"unit": "us", "value": 10 * ratio, "ratio": ratio} for name, ratio in named.items()}}
            for section, named in ratios.items()}))

    def write(self, section, *metrics, folder=None, **more):
        data = {"machine": "x86_64 <2 cores>", "metrics": list(metrics), **more}
        ((folder or self.results) / f"{section}.json").write_text(json.dumps(data))

    def run_tool(self, *arguments):
        done = subprocess.run([sys.executable, self.root / "tools" / "bench-report", *arguments], capture_output=True,
                              text=True, check=False)
        return done.returncode, done.stdout.splitlines(), done.stderr

    def test_ratios_that_changed_or_are_missing_are_printed_and_shown(self):
        self.write_record({"rpc": {"rpc/add": 0.9, "rpc/call": 0.5, "rpc/echo": 0.8, "rpc/gone": 0.7}})
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

    def test_record_replaces_the_figures_of_the_measured_sections(self):
        self.write_record({"rpc": {"rpc/gone": 0.7}, "optim": {"optim/adam": 0.3}})
        self.page.write_text("")
        self.write("rpc", figure("rpc/call", 0.71234567), {"name": "rpc/idle", "unit": "%", "value": 0.0})
        self.assertEqual(self.run_tool("--record")[0], 0)
        recorded = json.loads(self.record.read_text())
        self.assertEqual(recorded["rpc"]["figures"], {
            "rpc/call": {"unit": "us", "value": 7.123, "peer": "peer/rpc/call", "peer_value": 10.0, "ratio": 0.7123},
            "rpc/idle": {"unit": "%", "value": 0.0}})
        self.assertEqual(recorded["rpc"]["machine"], "x86_64 <2 cores>")
        self.assertEqual(recorded["optim"]["figures"]["optim/adam"]["ratio"], 0.3)
        self.assertEqual(len(self.run_tool()[1]), 1, "only the report's path")

    def test_all_figures_are_printed_as_a_page(self):
        self.write_record({"optim": {"optim/adam": 0.3}})
        self.write("rpc", figure("rpc/call", 0.5), {"name": "rpc/idle", "unit": "%", "value": 0.0})
        self.page.write_text("")
        self.assertEqual(self.run_tool("--record")[0], 0)
        code, lines, _ = self.run_tool("--figures", str(self.record))
        self.assertEqual((code, lines[0]), (0, "# Recorded figures, LibTorch 1.13"))
        for line in ("## optim", "| `optim/adam` | 3 µs |  |  | 0.3 |", "## rpc", "| `rpc/call` | 5 µs |  | 10 µs | 0.5 |",
                     "| `rpc/idle` | 0 % |  |  |  |"):
            self.assertIn(line, lines)

    def test_tables_of_the_page_are_written_and_its_text_stays(self):
        self.assertEqual(self.run_tool("--page")[0], 0)
        table = ["| x86_64, 2026-01-31 | TorchSpan | peer | ratio | goal |", "|---|---|---|---|---|", "| `rpc/call` | 5 µs |  | 0.5 |  |",
                 "| `rpc/echo` | 8 µs |  | 0.8 |  |", "| `rpc/gone` | 7 µs |  | 0.7 |  |"]
        self.assertEqual(self.page.read_text().splitlines(), ["# Text", "", "<!-- figures", "     rpc/(call|echo) rpc/g.* -->",
                                                              *table, "<!-- end -->", "end"])

    def test_goals_for_ratios_and_values_are_shown_and_marked_if_they_are_missed(self):
        self.page.write_text("<!-- figures rpc/call<=0.5 rpc/echo<=0.75 rpc/echo<=value:8 rpc/gone<=value:6.5 -->\n<!-- end -->\n")
        self.assertEqual(self.run_tool("--page")[0], 0)
        self.assertEqual(self.page.read_text().splitlines()[3:-1], [
            "| `rpc/call` | 5 µs |  | 0.5 | 0.5 |", "| `rpc/echo` | 8 µs |  | 0.8 | 0.75, **missed** |",
            "| `rpc/echo` | 8 µs |  | 0.8 | 8 µs |", "| `rpc/gone` | 7 µs |  | 0.7 | 6.5 µs, **missed** |"])

    def test_plots_are_drawn_of_recorded_sections(self):
        self.write_record({"rpc": {"rpc/call": 0.5, "rpc/echo": 0.8, "rpc/gone": 0.7},
                           "survive": {"survive/goodput/kill_5s": 1.25, "survive/goodput/kill_20s": 1.0},
                           "collective": {f"{who}/all_reduce/{size}{rest}": 0.5 for who, rest in
                                          (("gloo", ""), ("collective", "/private/gloo")) for size in ("64B", "1KiB", "2MiB")}})
        self.assertEqual(self.run_tool("--page")[0], 0)
        images = self.root / "docs" / "images"
        self.assertEqual(sorted(path.name for path in images.iterdir()), ["bench_all_reduce.svg", "bench_goodput.svg"])
        drawn = (images / "bench_all_reduce.svg").read_text()
        for text in (">64 B<", ">1 KiB<", ">2 MiB<", ">Gloo<", "2026-01-31", "prefers-color-scheme: dark"):
            self.assertIn(text, drawn)
        self.assertEqual(drawn.count("<polyline"), 2)
        goodput = ElementTree.parse(images / "bench_goodput.svg").getroot()
        points = goodput.find("{http://www.w3.org/2000/svg}polyline").get("points").split()
        heights = [float(point.split(",")[1]) for point in points]
        lines = sorted({float(line.get("y1")) for line in goodput.findall("{http://www.w3.org/2000/svg}line")})
        self.assertEqual(len(lines), 6)
        self.assertAlmostEqual(heights[1], lines[0], delta=0.2, msg="no loss is 100 %")
        self.assertAlmostEqual(heights[0], lines[1], delta=0.2, msg="1.25 times the time is 80 %")

    def test_recording_writes_the_tables_of_the_page(self):
        self.write("rpc", figure("rpc/call", 0.4), figure("rpc/echo", 0.5), figure("rpc/gone", 0.6))
        self.assertEqual(self.run_tool("--record")[0], 0)
        self.assertIn("\n| `rpc/call` | 4 µs | 10 µs | 0.4 |  |\n", self.page.read_text())

    def test_tables_of_nothing_are_errors_and_nothing_is_written(self):
        for marker, text in (("rpc/nothing", "no recorded figure matches 'rpc/nothing'"), ("rpc/call rpc/x<=1", "matches 'rpc/x'")):
            self.page.write_text(f"<!-- figures {marker} -->\nold\n<!-- end -->\n")
            code, _, errors = self.run_tool("--page")
            self.assertEqual(code, 1)
            self.assertIn(text, errors)
            self.assertIn("\nold\n", self.page.read_text())

    def test_quick_runs_are_named_and_not_recorded(self):
        self.write("rpc", figure("rpc/call", 0.5), quick=True)
        before = self.record.read_text()
        code, _, errors = self.run_tool("--record")
        self.assertEqual(code, 1)
        self.assertIn("rpc: quick runs are too rough to be recorded", errors)
        self.assertEqual(self.record.read_text(), before)
        self.assertIn("Quick run: one round", (self.results / "report.html").read_text())

    def test_the_page_of_this_repository_has_the_recorded_figures(self):
        root = TOOL.parents[1]
        shutil.copy(root / "bench" / "recorded.json", self.record)
        shutil.copy(root / "docs" / "performance.md", self.page)
        self.assertEqual(self.run_tool("--page")[0], 0)
        self.assertGreater(self.page.read_text().count("<!-- figures "), 5)
        self.assertEqual(self.page.read_text(), (root / "docs" / "performance.md").read_text(), "run tools/bench-report --page")

    def test_the_two_libtorchs_have_their_own_figures(self):
        torch2 = self.results / "torch2"
        self.write("rpc", figure("rpc/call", 0.9), folder=torch2)
        self.assertEqual(self.run_tool(str(torch2))[1], [str(torch2 / "report.html")])
        self.assertIn("none recorded", (torch2 / "report.html").read_text())
        self.assertEqual(self.run_tool("--record", str(torch2))[0], 0)
        recorded = json.loads((self.root / "bench" / "recorded_torch2.json").read_text())
        self.assertEqual(recorded["rpc"]["figures"]["rpc/call"]["ratio"], 0.9)
        figures = self.run_tool("--figures", str(self.root / "bench" / "recorded_torch2.json"))[1]
        self.assertEqual(figures[0], "# Recorded figures, LibTorch 2.15")
        self.assertIn("old", self.page.read_text(), "the page has the figures of the default LibTorch")
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
