"""tools/scale-report: plots and the table of measurements."""
import json
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "scale-report"


class ScaleReport(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)

    def run_tool(self, *lines):
        measurements = self.path / "measurements.jsonl"
        measurements.write_text("\n".join(lines) + "\n")
        return subprocess.run([sys.executable, "-B", TOOL, measurements, self.path / "plots"], capture_output=True,
                              text=True, check=False)

    @staticmethod
    def barrier(workers, messages):
        return json.dumps({"what": "barrier", "workers": workers, "messages_per_worker": messages,
                           "bytes_per_worker": 65, "microseconds": 40})

    def test_draws_a_line_for_each_measurement_and_lists_every_value(self):
        ran = self.run_tool(self.barrier(64, 2), self.barrier(256, 2.5))
        self.assertEqual(ran.returncode, 0, ran.stderr)
        drawn = ElementTree.parse(self.path / "plots" / "scale_messages.svg").getroot()
        lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
        self.assertEqual(len(lines), 1)
        self.assertEqual(len(lines[0].get("points").split()), 2)
        self.assertIn("| what | per | 64 | 256 |", ran.stdout)
        self.assertIn("| barrier | messages per worker | 2 | 2.5 |", ran.stdout)

    def test_leaves_out_plots_without_measurements(self):
        self.assertEqual(self.run_tool(self.barrier(64, 2)).returncode, 0)
        self.assertFalse((self.path / "plots" / "scale_memory.svg").exists())

    def test_names_the_line_that_is_not_a_measurement(self):
        for line in ("{", "[1]", '{"what": "barrier"}'):
            ran = self.run_tool(self.barrier(64, 2), line)
            self.assertEqual(ran.returncode, 1)
            self.assertIn("measurements.jsonl:2 is not a measurement", ran.stderr)


if __name__ == "__main__":
    unittest.main()
