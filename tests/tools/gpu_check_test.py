"""What tools/gpu-check reports of its steps; scripts stand for the tools and the built programs."""
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu-check"
# Without the folder of a CUDA toolkit.
PATH = ":".join(folder for folder in os.environ["PATH"].split(":")
                if not Path(folder, "nvcc").exists() or Path(folder, "env").exists())
PYTHON = """#!/bin/sh
case "$2" in
*cmake_prefix_path*) echo "$GPU_CHECK_TORCH/share/cmake" ;;
*) echo 2.0 ;;
esac
"""
TESTS = ("device_suites", "engine_test", "data_parallel_test", "collective_conformance_test", "cluster_device_test")
FILTERED = ("collective_conformance_test", "cluster_device_test")
DEMO = """#!/bin/sh
echo 'trained on 25600 images in 5.1 s: 5000 images/s'
"""
FIGURES = """#!/bin/sh
echo 'calls/add_64B   10.0 us   0.20 of torch-rpc-cpp/calls/add_64B (goal 0.30)'
echo 'calls/one_way/64MiB  not measured against torch-rpc-cpp/calls/one_way/64MiB'
"""


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.logs = self.root / "build" / "gpu"
        self.torch = self.root / "torch"
        self.toolkit = None
        for path in ("tools", "docs", "path", "build/gpu/tree/bin", "torch/lib", "torch/share/cmake"):
            (self.root / path).mkdir(parents=True)
        # The CUDA toolkit of this machine, if it has one, is not found.
        self.script("tools/gpu-check", TOOL.read_text().replace("/usr/local/cuda", str(self.root / "cuda")))
        for path in ("README.md", "docs/gpu.md"):
            (self.root / path).write_text("text\n")
        for tool in ("g++", "ninja"):
            self.script(f"path/{tool}")
        self.script("path/cmake", '#!/bin/sh\necho "$*"\n')
        self.script("path/python3", PYTHON)
        for test in TESTS:
            self.program(test, '#!/bin/sh\necho "$OMP_NUM_THREADS thread, $*"\n')
        self.program("torchspan", DEMO)
        self.program("bench_gpu", FIGURES)

    def script(self, path, text="#!/bin/sh\n"):
        file = self.root / path
        file.write_text(text)
        file.chmod(0o755)

    def program(self, name, text):
        self.script(f"build/gpu/tree/bin/{name}", text)

    def start(self, *arguments):
        environment = {**os.environ, "PATH": f"{self.root / 'path'}:{PATH}"}
        environment.pop("OMP_NUM_THREADS", None)
        environment["GPU_CHECK_TORCH"] = str(self.torch)
        environment.pop("CUDAToolkit_ROOT", None)
        if self.toolkit:
            environment["CUDAToolkit_ROOT"] = self.toolkit
        return subprocess.Popen([self.root / "tools" / "gpu-check", "--without-gpu", *arguments], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_tool(self, *arguments):
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def table(self, output):
        """The results by step: the last lines, after the line of the machine."""
        lines = output.split("\n\n")[-1].splitlines()[1:]
        return {line[:34].strip(): line[34:].strip() for line in lines}

    def test_steps_have_one_thread_and_a_row_each(self):
        code, output = self.run_tool()
        self.assertEqual(code, 0, output)
        table = self.table(output)
        for name in (*TESTS, "ucx", "nccl_groups", "nccl_training", "configure", "build", "data_parallel", "pipeline", "figures"):
            self.assertTrue(table[name].startswith("ok "), output)
        self.assertEqual(table["demo on cpu against CPU"], "1.00 (5000 and 5000 images/s)")
        self.assertIn("(goal 0.30)", output.split("\n\n")[-1])
        self.assertIn("not measured against", output.split("\n\n")[-1])
        for test in TESTS:
            log = (self.logs / f"{test}.log").read_text()
            self.assertTrue(log.startswith("1 thread, "), log)
            everything = "--gtest_filter=* " in log
            self.assertEqual(everything, test not in FILTERED, log)

    def test_a_communicator_of_one_rank_and_training_over_nccl_are_run(self):
        code, output = self.run_tool()
        self.assertEqual(code, 0, output)
        self.assertIn("--gtest_filter=NcclEngine.* ", (self.logs / "collective_conformance_test.log").read_text())
        self.assertIn("--gtest_filter=*-*/nccl_*:*Ucx* ", (self.logs / "cluster_device_test.log").read_text())
        self.assertIn("--gtest_filter=*/nccl_views:", (self.logs / "nccl_training.log").read_text())

    def test_tests_that_skip_themselves_are_no_failure_and_not_called_ok(self):
        self.program("cluster_device_test", "#!/bin/sh\necho '[  SKIPPED ] 2 tests'\necho '[  PASSED  ] 0 tests.'\n")
        code, output = self.run_tool()
        self.assertEqual(code, 0, output)
        self.assertTrue(self.table(output)["nccl_groups"].startswith("not possible "), output)
        self.assertTrue(self.table(output)["ucx"].startswith("not possible "), output)

    def configured(self):
        code, output = self.run_tool()
        self.assertEqual(code, 0, output)
        return (self.logs / "configure.log").read_text()

    def test_only_a_collected_ucx_is_used(self):
        self.assertIn("-DTORCHSPAN_UCX=OFF", self.configured())
        (self.root / ".deps/usr/include/ucp").mkdir(parents=True)
        self.assertIn("-DTORCHSPAN_UCX=ON", self.configured())

    def test_the_trial_builds_with_cuda_if_libtorch_has_its_libraries(self):
        self.toolkit = "/toolkit"
        self.script("path/ldd", "#!/bin/sh\necho 'libcublas.so.13 => /lib/libcublas.so.13 (0x0)'\n")
        self.assertNotIn("TORCHSPAN_CUDA", self.configured())
        (self.torch / "lib" / "libtorch_cuda.so").touch()
        self.assertIn("-DTORCHSPAN_CUDA=ON", self.configured())
        self.script("path/ldd", "#!/bin/sh\necho 'libcublas.so.13 => not found'\n")
        self.assertNotIn("TORCHSPAN_CUDA", self.configured())

    @unittest.skipIf(shutil.which("nvcc", path=PATH), "nvcc is in the folder of other tools")
    def test_the_trial_builds_without_cuda_if_there_is_no_toolkit(self):
        self.script("path/ldd", "#!/bin/sh\necho 'libcublas.so.13 => /lib/libcublas.so.13 (0x0)'\n")
        (self.torch / "lib" / "libtorch_cuda.so").touch()
        self.assertNotIn("TORCHSPAN_CUDA", self.configured())
        (self.root / "cuda").mkdir()
        self.assertIn("-DTORCHSPAN_CUDA=ON", self.configured())
        (self.root / "cuda").rmdir()
        self.script("path/nvcc")
        self.assertIn("-DTORCHSPAN_CUDA=ON", self.configured())

    def test_a_step_that_fails_and_a_demo_without_figures_make_the_run_fail(self):
        self.program("engine_test", "#!/bin/sh\nexit 3\n")
        code, output = self.run_tool()
        self.assertEqual((code, self.table(output)["engine_test"].startswith("failed (3)")), (1, True), output)
        self.program("engine_test", "#!/bin/sh\n")
        self.program("torchspan", "#!/bin/sh\n")
        code, output = self.run_tool()
        self.assertEqual((code, self.table(output)["demo on cpu against CPU"]), (1, "not measured"), output)

    def test_steps_without_time_are_skipped(self):
        self.script("path/ninja", "#!/bin/sh\nsleep 20\n")
        code, output = self.run_tool("--limit", "34")
        table = self.table(output)
        self.assertEqual((code, table["build"].startswith("ok ")), (1, True), output)
        for name in (*TESTS, "nccl_groups", "nccl_training", "model_parallel", "pipeline", "figures"):
            self.assertTrue(table[name].startswith("skipped: no time"), output)

    def test_a_signal_ends_the_step_and_prints_the_table(self):
        self.script("path/ninja", "#!/bin/sh\nexec sleep 100\n")
        process = self.start()
        while not (self.logs / "build.log").exists():
            self.assertIsNone(process.poll())
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        self.assertEqual((process.returncode, self.table(output)["build"].startswith("stopped")), (143, True), output)

    def test_wrong_limits_are_named(self):
        for limit in ("0", "soon", ""):
            code, output = self.run_tool("--limit", limit)
            self.assertEqual((code, "--limit needs a number of seconds" in output), (1, True), output)


if __name__ == "__main__":
    unittest.main()
