# `cmake --install`: the public headers, the libraries, the `torchspan` command, and what find_package(torchspan) and
# pkg-config need. Programs link torchspan::torchspan, or single rooms (torchspan::rpc).
#
# Components: `command`, `runtime` (libtorchspan.so.0.2, with TORCHSPAN_SHARED), `development`, `documents`.
# cmake/TorchspanPackage.cmake makes a package of each.
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/torchspan)

# The command's own room has no public headers.
get_property(rooms GLOBAL PROPERTY TORCHSPAN_ROOMS)
list(REMOVE_ITEM rooms launch)
set_target_properties(torchspan_torch PROPERTIES EXPORT_NAME torch_headers)
install(TARGETS torchspan torchspan_torch EXPORT torchspan COMPONENT development)
if(TORCHSPAN_SHARED)
  install(TARGETS torchspan_shared EXPORT torchspan LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime
                                                            NAMELINK_COMPONENT development)
else()
  foreach(room ${rooms})
    set_target_properties(torchspan_${room} PROPERTIES EXPORT_NAME ${room})
    install(TARGETS torchspan_${room} EXPORT torchspan ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  endforeach()
  install(TARGETS torchspan_rooms EXPORT torchspan COMPONENT development)
endif()
if(TARGET torchspan_cli)
  install(TARGETS torchspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT command)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/torchspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
        FILES_MATCHING PATTERN "*.h")
install(EXPORT torchspan NAMESPACE torchspan:: FILE torchspan-targets.cmake DESTINATION ${package_folder}
        COMPONENT development)

set(config_rooms ${rooms})
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
  set(linked -ltorch -ltorch_cpu -lc10)
  if(TORCHSPAN_SHARED)
    list(PREPEND linked -ltorchspan)
  else()
    # A static library precedes those that it uses, so the rooms come in the reverse order of their definition.
    set(archives ${rooms})
    list(REVERSE archives)
    list(TRANSFORM archives PREPEND -ltorchspan_)
    list(PREPEND linked ${archives})
    list(APPEND linked -lfmt -lssl -lcrypto -lxxhash ${CMAKE_DL_LIBS} -lpthread)
    if(TORCHSPAN_MPI)
      list(APPEND linked ${MPI_CXX_LIBRARIES})
    endif()
    list(TRANSFORM linked REPLACE "^([a-z]+)$" "-l\\1")
  endif()
  list(JOIN linked " " pc_libraries)
  set(pc_torch_flags ${TORCHSPAN_LIBTORCH_INCLUDE})
  list(REMOVE_ITEM pc_torch_flags /usr/include)
  list(TRANSFORM pc_torch_flags PREPEND "-isystem ")
  list(JOIN pc_torch_flags " " pc_torch_flags)
  set(pc_prefix ${CMAKE_INSTALL_PREFIX})
  if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    # Relative to the file, so that an installation can be moved, and `cmake --install --prefix` is right.
    file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    string(REGEX REPLACE "/$" "" pc_prefix "\${pcfiledir}/${pc_prefix}")
  endif()
  foreach(kind lib include)
    string(TOUPPER CMAKE_INSTALL_${kind}DIR folder)
    set(pc_${kind}dir ${${folder}})
    if(NOT IS_ABSOLUTE "${${folder}}")
      string(PREPEND pc_${kind}dir "\${prefix}/")
    endif()
  endforeach()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/torchspan.pc.in ${PROJECT_BINARY_DIR}/torchspan.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/torchspan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
endif()
