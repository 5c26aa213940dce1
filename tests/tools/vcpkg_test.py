"""The vcpkg port, with stand-ins for vcpkg's functions: what it asks for, and that it agrees with the project."""
import json
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORT = ROOT / "packaging" / "vcpkg" / "torchspan"
FUNCTIONS = ("vcpkg_cmake_configure", "vcpkg_cmake_install", "vcpkg_cmake_config_fixup", "vcpkg_fixup_pkgconfig",
             "vcpkg_copy_tools", "vcpkg_install_copyright")
HARNESS = """
cmake_minimum_required(VERSION 3.25)
function(vcpkg_extract_source_archive variable)
  message(NOTICE "call vcpkg_extract_source_archive ${ARGN}")
  set(${variable} /sources PARENT_SCOPE)
endfunction()
function(vcpkg_find_acquire_program variable)
  set(${variable} /python PARENT_SCOPE)
endfunction()
""" + "".join(f'function({name})\n  message(NOTICE "call {name} ${{ARGN}}")\nendfunction()\n' for name in FUNCTIONS) + """
include(${PORT_FILE})
"""


class VcpkgPort(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "debug" / "include").mkdir(parents=True)
        (self.root / "torchspan.tar.gz").touch()
        (self.root / "harness.cmake").write_text(HARNESS)

    def run_port(self, linkage="static", **environment):
        done = subprocess.run(
            ["cmake", f"-DPORT_FILE={PORT / 'portfile.cmake'}", f"-DVCPKG_LIBRARY_LINKAGE={linkage}", "-DPORT=torchspan",
             f"-DCURRENT_PACKAGES_DIR={self.root}", "-P", self.root / "harness.cmake"],
            capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})
        return done, dict(re.findall(r"^call (\w+) ?(.*)$", done.stderr, re.MULTILINE))

    def calls(self, *arguments, **environment):
        done, calls = self.run_port(*arguments, TORCHSPAN_TARBALL=str(self.root / "torchspan.tar.gz"), **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return calls

    def test_the_steps_of_a_port(self):
        calls = self.calls()
        self.assertEqual(list(calls), ["vcpkg_extract_source_archive", *FUNCTIONS])
        self.assertIn("lib/cmake/torchspan", calls["vcpkg_cmake_config_fixup"])
        self.assertEqual(calls["vcpkg_install_copyright"], "FILE_LIST;/sources/LICENSE")
        self.assertFalse((self.root / "debug" / "include").exists())
        self.assertIn("torchspan::torchspan", (self.root / "share" / "torchspan" / "usage").read_text())

    def test_linkage_of_the_triplet(self):
        self.assertIn("-DTORCHSPAN_SHARED=0", self.calls("static")["vcpkg_cmake_configure"])
        dynamic = self.calls("dynamic")["vcpkg_cmake_configure"]
        self.assertIn("-DTORCHSPAN_SHARED=1", dynamic)
        self.assertIn("-DPython3_EXECUTABLE=/python", dynamic)

    def test_another_libtorch_has_no_pkgconfig_file(self):
        calls = self.calls(TORCHSPAN_LIBTORCH="/libtorch")
        self.assertIn("-DCMAKE_PREFIX_PATH=/libtorch", calls["vcpkg_cmake_configure"])
        self.assertNotIn("vcpkg_fixup_pkgconfig", calls)

    def test_without_a_tarball_it_says_what_to_set(self):
        done, calls = self.run_port()
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("set TORCHSPAN_TARBALL", " ".join(done.stderr.split()))
        self.assertEqual(calls, {})

    def test_its_options_are_those_of_the_project(self):
        project = "".join(path.read_text() for path in [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")])
        known = set(re.findall(r"^ *(?:option|set)\((TORCHSPAN_\w+)", project, re.MULTILINE))
        used = set(re.findall(r"-D(TORCHSPAN_\w+)=", (PORT / "portfile.cmake").read_text()))
        self.assertEqual(used - known, set())
        for optional in ("UCX", "GLOO", "MPI"):
            self.assertIn(f"TORCHSPAN_{optional}", used)

    def test_its_manifest_agrees_with_the_project(self):
        manifest = json.loads((PORT / "vcpkg.json").read_text())
        project = (ROOT / "CMakeLists.txt").read_text()
        self.assertEqual(manifest["version"], re.search(r"project\(torchspan VERSION ([\d.]+)", project).group(1))
        names = [entry if isinstance(entry, str) else entry["name"] for entry in manifest["dependencies"]]
        self.assertEqual(names, sorted(names))
        found = {name.lower().replace("_", "-") for name in re.findall(r"^find_package\((\w+) REQUIRED\)", project,
                                                                       re.MULTILINE)}
        self.assertEqual(found - {"threads"}, set(names) - {"vcpkg-cmake", "vcpkg-cmake-config"})


if __name__ == "__main__":
    unittest.main()
