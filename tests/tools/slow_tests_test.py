"""tools/slow-tests: what it reads from ctest's log."""
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOG = """1/3 Testing: net_test
1/3 Test: net_test
[ RUN      ] Tls/Transport.Sends/One
[       OK ] Tls/Transport.Sends/One (1500 ms)
[       OK ] Tls/Transport.Sends/Two, where GetParam() = Two (2500 ms)
2/3 Testing: cluster_test_shard_1
2/3 Test: cluster_test_shard_1
[       OK ] Groups.Work (3000 ms)
[  FAILED  ] Groups.Fail (9000 ms)
"""


class SlowTests(unittest.TestCase):
    def test_cases_and_sums_are_sorted(self):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "Testing/Temporary/LastTest.log"
            log.parent.mkdir(parents=True)
            log.write_text(LOG)
            output = subprocess.run([ROOT / "tools/slow-tests", folder], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in output.splitlines()]
        self.assertEqual(rows[0][:4], ["3", "cases,", "7", "s;"])
        self.assertEqual([row[0] for row in rows[1:4]], ["3.0", "2.5", "1.5"])
        self.assertEqual(rows[1][2:], ["cluster_test_shard_1", "Groups.Work"])
        self.assertEqual([row[0::2] for row in rows[5:]], [["4.0", "net_test"], ["3.0", "cluster_test"]])
        self.assertEqual(rows[5][3], "Transport.Sends")

    def test_a_folder_without_a_run_is_told(self):
        done = subprocess.run([ROOT / "tools/slow-tests", "/nowhere"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("run ctest first", done.stderr)


if __name__ == "__main__":
    unittest.main()
