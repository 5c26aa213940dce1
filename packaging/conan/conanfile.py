"""Conan 2 recipe. Builds TorchSpan from its source tarball (`make tarball`), or from the checkout that contains it.

    tar -xf torchspan-0.2.0.tar.gz && conan create torchspan-0.2.0/packaging/conan [-o torchspan/*:shared=True]

LibTorch, OpenSSL, fmt, CLI11, JSON and xxHash come from the system: they must be those that LibTorch itself loads. Another
LibTorch (the folder of pip's torch or of a zip): -c user.torchspan:libtorch=/path/to/libtorch
"""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

SOURCES = ("CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "cmake/*", "docs/*",
           "include/*", "src/*")


class TorchspanRecipe(ConanFile):
    name = "torchspan"
    license = "Apache-2.0"
    description = "Training across processes for C++ programs on LibTorch"
    topics = ("machine-learning", "distributed", "libtorch", "rpc")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    # Options whose headers come from the system (libgloo-dev, libopenmpi-dev, libucx-dev, libipsec-mb-dev).
    options = {name: [True, False] for name in ("shared", "gloo", "mpi", "ucx", "ipsec_mb")}
    default_options = {name: False for name in ("shared", "gloo", "mpi", "ucx", "ipsec_mb")}

    def set_version(self):
        lists = load(self, os.path.join(self.recipe_folder, "..", "..", "CMakeLists.txt"))
        self.version = re.search(r"project\(torchspan VERSION ([0-9.]+)", lists).group(1)

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch != "x86_64":
            raise ConanInvalidConfiguration("TorchSpan supports Linux on x86_64 only")

    def layout(self):
        cmake_layout(self)

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "..", "..")
        for pattern in SOURCES:
            copy(self, pattern, root, self.export_sources_folder)

    def generate(self):
        toolchain = CMakeToolchain(self)
        # The project's presets are for its own builds.
        toolchain.user_presets_path = False
        toolchain.cache_variables["TORCHSPAN_TESTS"] = False
        toolchain.cache_variables["TORCHSPAN_EXAMPLES"] = False
        toolchain.cache_variables["TORCHSPAN_UNITY_BATCH"] = "16"
        for option in ("shared", "gloo", "mpi", "ucx", "ipsec_mb"):
            toolchain.cache_variables[f"TORCHSPAN_{option.upper()}"] = bool(self.options.get_safe(option))
        libtorch = self.conf.get("user.torchspan:libtorch")
        if libtorch:
            toolchain.cache_variables["CMAKE_PREFIX_PATH"] = libtorch
        toolchain.generate()

    def package_id(self):
        # A package fits only the LibTorch that it was built with.
        self.info.conf.define("user.torchspan:libtorch", self.conf.get("user.torchspan:libtorch"))

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # TorchSpan's own CMake package also brings LibTorch, so consumers use it instead of a generated one.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "torchspan")]
        # Also for a consumer that does not ask for programs (run=True) of this library.
        self.runenv_info.prepend_path("PATH", os.path.join(self.package_folder, "bin"))
