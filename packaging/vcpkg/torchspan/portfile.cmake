# Builds from the source tarball that `make tarball` writes:
#   VCPKG_KEEP_ENV_VARS="TORCHSPAN_TARBALL;TORCHSPAN_LIBTORCH" TORCHSPAN_TARBALL=/path/to/torchspan-0.1.0.tar.gz \
#     vcpkg install torchspan --overlay-ports=packaging/vcpkg
# LibTorch comes from the system; TORCHSPAN_LIBTORCH names the folder of another one.
if(NOT EXISTS "$ENV{TORCHSPAN_TARBALL}")
  message(FATAL_ERROR "set TORCHSPAN_TARBALL to TorchSpan's source tarball, and keep it with VCPKG_KEEP_ENV_VARS")
endif()
vcpkg_check_linkage(ONLY_STATIC_LIBRARY)
vcpkg_extract_source_archive(source ARCHIVE "$ENV{TORCHSPAN_TARBALL}")
set(options -DTORCHSPAN_TESTS=OFF -DTORCHSPAN_EXAMPLES=OFF)
if(NOT "$ENV{TORCHSPAN_LIBTORCH}" STREQUAL "")
  list(APPEND options "-DCMAKE_PREFIX_PATH=$ENV{TORCHSPAN_LIBTORCH}")
endif()
vcpkg_cmake_configure(SOURCE_PATH "${source}" OPTIONS ${options})
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/torchspan)
vcpkg_copy_tools(TOOL_NAMES torchspan AUTO_CLEAN)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${source}/LICENSE")
