"""How CMake finds LibTorch, and what it says of one that is missing or odd (cmake/TorchspanLibtorch.cmake)."""
import subprocess
import tempfile
import unittest
from pathlib import Path

MODULE = Path(__file__).resolve().parents[2] / "cmake" / "TorchspanLibtorch.cmake"
PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES NONE)
if(WITHOUT_THE_SYSTEM)
  set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
  set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
endif()
include({MODULE})
get_target_property(links libtorch::torch INTERFACE_LINK_LIBRARIES)
message(STATUS "probe: ${{TORCHSPAN_LIBTORCH_VERSION}} cuda ${{TORCHSPAN_HAS_CUDA}} ${{links}}")
"""


class FindLibTorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "CMakeLists.txt").write_text(PROJECT)

    def library(self, path, *needs):
        """A shared library; those it needs are named and deleted."""
        gone = []
        for name in needs:
            gone.append(path.parent / f"lib{name}.so")
            self.library(gone[-1])
        subprocess.run(["cc", "-shared", "-nostdlib", "-Wl,--no-as-needed", f"-Wl,-soname,{path.name}", "-x", "c",
                        "/dev/null", "-o", path, f"-L{path.parent}", *(f"-l{name}" for name in needs)], check=True)
        for one in gone:
            one.unlink()

    def wheel(self, *, version="2.15.0", config="", cpu_needs=(), cuda_needs=None):
        """A folder like that of pip's torch."""
        prefix = self.root / "site-packages" / "torch"
        package = prefix / "share" / "cmake" / "Torch"
        package.mkdir(parents=True)
        (package / "TorchConfigVersion.cmake").write_text(f'set(PACKAGE_VERSION "{version}")\n')
        (package / "TorchConfig.cmake").write_text('message(FATAL_ERROR "this package was run")\n' + config)
        api = prefix / "include" / "torch" / "csrc" / "api" / "include" / "torch"
        api.mkdir(parents=True)
        (api / "version.h").touch()
        (prefix / "include" / "fmt").mkdir()
        (prefix / "lib").mkdir()
        for name in ("c10", "c10_cuda") if cuda_needs is not None else ("c10",):
            self.library(prefix / "lib" / f"lib{name}.so")
        self.library(prefix / "lib" / "libtorch_cpu.so", *cpu_needs)
        if cuda_needs is not None:
            self.library(prefix / "lib" / "libtorch_cuda.so", *cuda_needs)
        return prefix

    def configure(self, prefix, *arguments):
        done = subprocess.run(["cmake", "-S", self.root, "-B", self.root / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
                               *arguments], capture_output=True, text=True)
        return done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    def refused(self, prefix, *arguments):
        works, text = self.configure(prefix, *arguments)
        self.assertFalse(works, text)
        return text

    def accepted(self, prefix, *arguments):
        works, text = self.configure(prefix, *arguments)
        self.assertTrue(works, text)
        return text

    def test_a_wheel_for_cpus(self):
        prefix = self.wheel()
        for given in (prefix, prefix / "share" / "cmake"):  # the second is torch.utils.cmake_prefix_path
            text = self.accepted(given)
            self.assertIn("probe: 2.15.0 cuda OFF", text)
            self.assertIn("LibTorch 2.15.0, for CPUs:", text)

    def test_headers_of_other_libraries_are_left_out(self):
        self.accepted(self.wheel())
        self.assertEqual([entry.name for entry in (self.root / "build" / "torchspan-libtorch").iterdir()], ["torch"])

    def test_a_wheel_for_cuda_with_all_that_it_needs(self):
        text = self.accepted(self.wheel(cuda_needs=()))
        self.assertIn("cuda ON", text)
        self.assertIn("libtorch_cuda.so", text.split("probe:")[1])

    def test_a_wheel_for_cuda_without_what_it_needs(self):
        prefix = self.wheel(cuda_needs=("probe_cublas",))
        text = self.accepted(prefix)
        self.assertIn("cuda OFF", text)
        self.assertIn("its CPU half (for CUDA, libprobe_cublas.so is missing)", text)
        self.assertIn("lacks libprobe_cublas.so: install", self.refused(prefix, "-DTORCHSPAN_CUDA=ON"))

    def test_cuda_can_be_left_out(self):
        text = self.accepted(self.wheel(cuda_needs=()), "-DTORCHSPAN_CUDA=OFF")
        self.assertIn("cuda OFF", text)

    def test_cuda_in_a_wheel_for_cpus(self):
        self.assertIn("lacks libtorch_cuda.so: install", self.refused(self.wheel(), "-DTORCHSPAN_CUDA=ON"))

    def test_a_library_that_cannot_be_loaded(self):
        text = self.refused(self.wheel(cpu_needs=("probe_cudart",)))
        self.assertIn("because libprobe_cudart.so is missing: install", text)

    def test_a_library_of_another_machine(self):
        prefix = self.wheel()
        (prefix / "lib" / "libtorch_cpu.so").write_bytes(b"\x7fELF of another machine")
        self.assertRegex(self.refused(prefix), r"because a libtorch_cpu.so for \S+ is missing: install")

    def test_half_a_wheel(self):
        prefix = self.wheel()
        (prefix / "lib" / "libtorch_cpu.so").unlink()
        self.assertIn("has no libtorch_cpu.so: install it again", self.refused(prefix))

    def test_headers_that_need_a_package_that_is_missing(self):
        text = self.refused(self.wheel(), "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON")
        self.assertIn("need nlohmann-json, which was not found: install it", text)

    def test_another_prefix_in_the_same_build_folder(self):
        first = self.wheel()
        self.assertIn("probe: 2.15.0", self.accepted(first))
        first.parent.rename(self.root / "first")
        second = self.wheel(version="2.14.0")
        self.assertIn("probe: 2.14.0", self.accepted(second))
        first = self.root / "first" / "torch"
        self.assertIn("probe: 2.15.0", self.accepted(first))
        self.assertIn("probe: 2.15.0", self.accepted(first), "nothing changed")
        given = second / "share" / "cmake" / "Torch"
        self.assertIn("probe: 2.14.0", self.accepted("/nowhere", f"-DTorch_DIR={given}"))
        self.assertIn("probe: 2.14.0", self.accepted(first), "what was given stays")

    def test_none(self):
        text = self.refused("/nowhere", "-DWITHOUT_THE_SYSTEM=ON")
        self.assertIn("TorchSpan needs LibTorch, which was not found: pass -DCMAKE_PREFIX_PATH=", text)

    def test_one_that_is_too_old(self):
        self.assertIn("LibTorch 1.12.1 in", self.refused(self.wheel(version="1.12.1")))
        self.assertIn("older than 2.16", self.refused(self.root / "site-packages" / "torch",
                                                      "-DTORCHSPAN_LIBTORCH_AT_LEAST=2.16"))

    def test_one_with_the_old_abi(self):
        text = self.refused(self.wheel(config='set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n'))
        self.assertIn("use LibTorch 2.7 or later", text)

    def test_one_without_headers(self):
        prefix = self.wheel()
        (prefix / "include" / "torch" / "csrc" / "api" / "include" / "torch" / "version.h").unlink()
        self.assertIn("has no headers: install it again", self.refused(prefix))


if __name__ == "__main__":
    unittest.main()
