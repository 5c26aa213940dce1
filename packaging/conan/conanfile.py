"""Conan 2 recipe. Builds TorchSpan from its source tarball (`make tarball`), or from the checkout that contains it.

    conan create packaging/conan --build=missing -c user.torchspan:libtorch=/path/to/libtorch

LibTorch and OpenSSL come from the system, as programs on LibTorch use them; the option names another LibTorch (a folder of
pip's torch or of a zip).
"""
import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class TorchspanRecipe(ConanFile):
    name = "torchspan"
    version = "0.1.0"
    license = "Apache-2.0"
    description = "Training across processes for C++ programs on LibTorch"
    topics = ("machine-learning", "distributed", "libtorch", "rpc")
    package_type = "static-library"
    settings = "os", "arch", "compiler", "build_type"

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch != "x86_64":
            raise ConanInvalidConfiguration("TorchSpan supports Linux on x86_64 only")

    def layout(self):
        cmake_layout(self)

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "..", "..")
        for pattern in ("CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", "CHANGELOG.md", "cmake/*", "docs/*",
                        "include/*", "src/*"):
            copy(self, pattern, root, self.export_sources_folder)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["TORCHSPAN_TESTS"] = False
        toolchain.cache_variables["TORCHSPAN_EXAMPLES"] = False
        libtorch = self.conf.get("user.torchspan:libtorch")
        if libtorch:
            toolchain.cache_variables["CMAKE_PREFIX_PATH"] = libtorch
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # TorchSpan's own CMake package also brings LibTorch, so consumers use it instead of a generated one.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "torchspan")]
