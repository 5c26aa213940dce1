# `cmake --install`: the public headers, the rooms' libraries, the `torchspan` command, and what find_package(torchspan)
# and pkg-config need. Programs link torchspan::torchspan, or single rooms (torchspan::rpc).
#
# Components: `command`, `development`, `documents`. cmake/TorchspanPackage.cmake makes a package of each.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/torchspan)

get_property(rooms GLOBAL PROPERTY TORCHSPAN_ROOMS)
foreach(room ${rooms})
  set_target_properties(torchspan_${room} PROPERTIES EXPORT_NAME ${room})
  install(TARGETS torchspan_${room} EXPORT torchspan ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
endforeach()
set_target_properties(torchspan_torch PROPERTIES EXPORT_NAME torch_headers)
install(TARGETS torchspan torchspan_torch EXPORT torchspan COMPONENT development)
if(TARGET torchspan_cli)
  install(TARGETS torchspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT command)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/torchspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
        FILES_MATCHING PATTERN "*.h")
install(EXPORT torchspan NAMESPACE torchspan:: FILE torchspan-targets.cmake DESTINATION ${package_folder}
        COMPONENT development)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/torchspan-config.cmake.in
                              ${PROJECT_BINARY_DIR}/torchspan-config.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/torchspan-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/torchspan-config.cmake ${PROJECT_BINARY_DIR}/torchspan-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/TorchspanLibtorch.cmake ${PROJECT_SOURCE_DIR}/cmake/FindxxHash.cmake
        DESTINATION ${package_folder} COMPONENT development)

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
              ${PROJECT_SOURCE_DIR}/SECURITY.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documents)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documents
        FILES_MATCHING PATTERN "*.md" PATTERN "*.png" PATTERN "*.svg")

# pkg-config describes a build with a distribution's LibTorch. Wheels and zips have headers that only CMake can select
# (TorchspanLibtorch.cmake), so there is no torchspan.pc for them.
if(NOT TORCHSPAN_LIBTORCH_PREFIX)
  # A static library precedes those that it uses, so the rooms come in the reverse order of their definition.
  set(linked ${rooms})
  list(REMOVE_ITEM linked launch)
  list(REVERSE linked)
  list(TRANSFORM linked PREPEND -ltorchspan_)
  list(APPEND linked -ltorch -ltorch_cpu -lc10 -lfmt -lssl -lcrypto -lxxhash ${CMAKE_DL_LIBS} -lpthread)
  if(TORCHSPAN_MPI)
    list(APPEND linked ${MPI_CXX_LIBRARIES})
  endif()
  list(TRANSFORM linked REPLACE "^([a-z]+)$" "-l\\1")
  list(JOIN linked " " pc_libraries)
  set(pc_torch_flags ${TORCHSPAN_LIBTORCH_INCLUDE})
  list(REMOVE_ITEM pc_torch_flags /usr/include)
  list(TRANSFORM pc_torch_flags PREPEND "-isystem ")
  list(JOIN pc_torch_flags " " pc_torch_flags)
  # Relative to the file, so that an installation can be moved, and `cmake --install --prefix` is right.
  file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" pc_prefix ${pc_prefix})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/torchspan.pc.in ${PROJECT_BINARY_DIR}/torchspan.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/torchspan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
endif()
