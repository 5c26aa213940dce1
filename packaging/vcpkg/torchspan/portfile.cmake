# Builds from the source tarball that `make tarball` writes:
#   VCPKG_KEEP_ENV_VARS="TORCHSPAN_TARBALL;TORCHSPAN_LIBTORCH" TORCHSPAN_TARBALL=/path/to/torchspan-0.2.0.tar.gz \
#     vcpkg install torchspan --overlay-ports=packaging/vcpkg --binarysource=clear
# LibTorch comes from the system; TORCHSPAN_LIBTORCH names the folder of another one. A dynamic triplet gives
# libtorchspan.so, a static one the static libraries.
if(NOT EXISTS "$ENV{TORCHSPAN_TARBALL}")
  message(FATAL_ERROR "set TORCHSPAN_TARBALL to TorchSpan's source tarball, and keep it with VCPKG_KEEP_ENV_VARS")
endif()
vcpkg_extract_source_archive(source ARCHIVE "$ENV{TORCHSPAN_TARBALL}")
string(COMPARE EQUAL "${VCPKG_LIBRARY_LINKAGE}" "dynamic" shared)
# Backends that the build would use if it found them on the system are not dependencies of the port.
set(options -DTORCHSPAN_TESTS=OFF -DTORCHSPAN_EXAMPLES=OFF -DTORCHSPAN_UCX=OFF -DTORCHSPAN_IPSEC_MB=OFF -DTORCHSPAN_GLOO=OFF
            -DTORCHSPAN_MPI=OFF -DTORCHSPAN_UNITY_BATCH=16 -DTORCHSPAN_SHARED=${shared})
if(shared)
  vcpkg_find_acquire_program(PYTHON3)
  list(APPEND options "-DPython3_EXECUTABLE=${PYTHON3}")
endif()
if(NOT "$ENV{TORCHSPAN_LIBTORCH}" STREQUAL "")
  list(APPEND options "-DCMAKE_PREFIX_PATH=$ENV{TORCHSPAN_LIBTORCH}")
endif()
vcpkg_cmake_configure(SOURCE_PATH "${source}" OPTIONS ${options})
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME torchspan CONFIG_PATH lib/cmake/torchspan)
# Only a build with a distribution's LibTorch installs torchspan.pc.
if("$ENV{TORCHSPAN_LIBTORCH}" STREQUAL "")
  vcpkg_fixup_pkgconfig()
endif()
vcpkg_copy_tools(TOOL_NAMES torchspan AUTO_CLEAN)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${source}/LICENSE")
