"""What an environment that does not fit the package gets."""

import os
import subprocess
import sys
import unittest

import torch


def printed_by(program):
    """What the program, run by this Python, writes to its error output."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return done.returncode, done.stderr


OTHER_TORCH = "import torch; torch.__version__ = '2.98.1+cpu'\n"
ADVICE = r"torchspan was built for torch [0-9.]+ \(cpython-.*\), and this is torch 2\.98\.1\+cpu \(cpython-.*\)\. Build it for this environment, in a clone"
RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])


class Package(unittest.TestCase):
    def test_another_torch_than_that_of_the_build_is_refused_with_what_to_do(self):
        code, output = printed_by(OTHER_TORCH + "import torchspan")
        self.assertEqual(code, 1)
        self.assertRegex(output, "ImportError: " + ADVICE)

    @unittest.skipIf(RELEASE < (2, 14), "this torch does not look for backends of packages")
    def test_a_program_that_leaves_the_import_to_torch_learns_the_same(self):
        code, output = printed_by(OTHER_TORCH + "import torch.distributed as d; d.init_process_group('torchspan', rank=0, world_size=1, init_method='tcp://127.0.0.1:0')")
        self.assertEqual(code, 1)
        self.assertRegex(output, "ImportError: " + ADVICE)

    def test_free_threaded_python_is_refused(self):
        code, output = printed_by("import sysconfig; sysconfig.get_config_var = lambda name: int(name == 'Py_GIL_DISABLED')\nimport torchspan")
        self.assertEqual(code, 1)
        self.assertRegex(output, "ImportError: torchspan needs the global interpreter lock")


if __name__ == "__main__":
    unittest.main()
