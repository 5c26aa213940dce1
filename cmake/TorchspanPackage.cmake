# `cpack` (presets `package`, `package-shared`): Debian packages of the components that cmake/TorchspanInstall.cmake
# installs. With TORCHSPAN_SHARED, libtorchspan0.2 contains the library, and libtorchspan-dev links it.
set(CPACK_GENERATOR DEB)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_PACKAGE_CONTACT "TorchSpan maintainers <torchspan@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "training across processes for C++ programs on LibTorch")
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL command development documents)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS OFF)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(packages command:torchspan development:libtorchspan-dev documents:torchspan-doc)

set(CPACK_DEBIAN_COMMAND_PACKAGE_NAME torchspan)
set(CPACK_COMPONENT_COMMAND_DESCRIPTION "The torchspan command: starts and supervises jobs, draws pipeline schedules.")
set(CPACK_DEBIAN_COMMAND_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMMAND_PACKAGE_RECOMMENDS "torchspan-doc")

# torchspan-config.cmake accepts no other LibTorch, and static libraries no other ABI of fmt. (Debian's 1.13.1 calls itself
# 1.13.0, so the patch does not count.)
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" libtorch ${TORCHSPAN_LIBTORCH_VERSION})
math(EXPR next_minor "${CMAKE_MATCH_2} + 1")
set(this_libtorch "libtorch-dev (>= ${libtorch}), libtorch-dev (<< ${CMAKE_MATCH_1}.${next_minor}~)")
string(REGEX MATCH "^[0-9]+" fmt_major ${fmt_VERSION})
math(EXPR next_fmt "${fmt_major} + 1")
set(this_fmt "libfmt-dev (>= ${fmt_major}), libfmt-dev (<< ${next_fmt}~)")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libtorchspan-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_RECOMMENDS "torchspan, torchspan-doc")
if(TORCHSPAN_SHARED)
  set(abi ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  list(APPEND CPACK_COMPONENTS_ALL runtime)
  list(APPEND packages runtime:libtorchspan${abi})
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libtorchspan${abi})
  set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "The shared library with ABI version ${abi}.")
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SUGGESTS "libipsec-mb1")
  # What dpkg-shlibdeps reads when another package links the library, and a run of ldconfig.
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
  set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers, and files for CMake and pkg-config.")
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libtorchspan${abi} (= ${PROJECT_VERSION}), ${this_libtorch}")
else()
  # What programs that link the static libraries need.
  set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers, static libraries, and files for CMake and pkg-config.")
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS
      "${this_libtorch}, libssl-dev, ${this_fmt}, nlohmann-json3-dev, libxxhash-dev")
  if(TORCHSPAN_MPI)
    string(APPEND CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS ", libopenmpi-dev")
  endif()
endif()

set(CPACK_DEBIAN_DOCUMENTS_PACKAGE_NAME torchspan-doc)
set(CPACK_COMPONENT_DOCUMENTS_DESCRIPTION "README, guides, and design of TorchSpan.")
set(CPACK_DEBIAN_DOCUMENTS_PACKAGE_SECTION doc)
set(CPACK_DEBIAN_DOCUMENTS_PACKAGE_ARCHITECTURE all)

find_program(TORCHSPAN_DPKG_QUERY dpkg-query)
mark_as_advanced(TORCHSPAN_DPKG_QUERY)
if(TORCHSPAN_SBOM AND NOT TORCHSPAN_DPKG_QUERY)
  message(STATUS "No list of what is linked: this is not a Debian system.")
  set(TORCHSPAN_SBOM OFF)
endif()

# Without them, cpack makes packages without dependencies.
foreach(program dpkg-shlibdeps file)
  find_program(found_program ${program} NO_CACHE)
  if(TORCHSPAN_SBOM AND NOT found_program)
    message(WARNING "cpack needs '${program}' to find the dependencies of packages: tools/install-deps package")
  endif()
  unset(found_program)
endforeach()

# A list of what is linked. The static libraries have the dependencies of the shared one.
if(TORCHSPAN_SBOM)
  set(compiled_in libcli11-dev nlohmann-json3-dev)
  if(TORCHSPAN_GLOO)
    list(APPEND compiled_in libgloo-dev)
  endif()
  if(TORCHSPAN_HAS_UCX)
    list(APPEND compiled_in libucx-dev)
  endif()
  if(TORCHSPAN_HAS_IPSEC_MB)
    list(APPEND compiled_in libipsec-mb-dev)
  endif()
  set(sbom ${PROJECT_BINARY_DIR}/torchspan.spdx.json)
  add_custom_command(
    OUTPUT ${sbom}
    COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/sbom ${PROJECT_VERSION} $<TARGET_FILE:torchspan_cli>
            $<TARGET_FILE:torchspan_shared> --headers ${compiled_in} --documented >${sbom}.part
    COMMAND ${CMAKE_COMMAND} -E rename ${sbom}.part ${sbom}
    DEPENDS torchspan_cli torchspan_shared ${PROJECT_SOURCE_DIR}/tools/sbom ${PROJECT_SOURCE_DIR}/docs/licenses.md
    COMMENT "Listing what is linked")
  # Licenses of what is compiled in ask for their notices in binary copies.
  set(notices ${PROJECT_SOURCE_DIR}/LICENSE)
  foreach(package ${compiled_in})
    list(APPEND notices ${PROJECT_SOURCE_DIR}/cmake/compiled_in.txt /usr/share/doc/${package}/copyright)
  endforeach()
  set(copyright ${PROJECT_BINARY_DIR}/copyright)
  add_custom_command(
    OUTPUT ${copyright}
    COMMAND ${CMAKE_COMMAND} -E cat ${notices} >${copyright}.part
    COMMAND ${CMAKE_COMMAND} -E rename ${copyright}.part ${copyright}
    DEPENDS ${notices})
  add_custom_target(torchspan_sbom ALL DEPENDS ${sbom} ${copyright})
endif()

# Debian's places for the license of each package, and the list.
if(TORCHSPAN_SBOM)
  foreach(package ${packages})
    string(REPLACE ":" ";" package ${package})
    list(GET package 0 component)
    list(GET package 1 name)
    set(folder ${CMAKE_INSTALL_DATAROOTDIR}/doc/${name})
    install(FILES ${copyright} DESTINATION ${folder} COMPONENT ${component})
    if(NOT component STREQUAL "documents")
      install(FILES ${sbom} DESTINATION ${folder} COMPONENT ${component})
    endif()
  endforeach()
endif()
include(CPack)
