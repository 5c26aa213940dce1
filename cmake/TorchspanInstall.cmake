# `cmake --install`: the public headers, the rooms' libraries, the `torchspan` command, and what find_package(torchspan)
# needs. Programs link torchspan::torchspan, or single rooms (torchspan::rpc).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/torchspan)

get_property(rooms GLOBAL PROPERTY TORCHSPAN_ROOMS)
foreach(room ${rooms})
  set_target_properties(torchspan_${room} PROPERTIES EXPORT_NAME ${room})
  install(TARGETS torchspan_${room} EXPORT torchspan ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endforeach()
set_target_properties(torchspan_torch PROPERTIES EXPORT_NAME torch_headers)
install(TARGETS torchspan torchspan_torch EXPORT torchspan)
if(TARGET torchspan_cli)
  install(TARGETS torchspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/torchspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
install(EXPORT torchspan NAMESPACE torchspan:: FILE torchspan-targets.cmake DESTINATION ${package_folder})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/torchspan-config.cmake.in
                              ${PROJECT_BINARY_DIR}/torchspan-config.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/torchspan-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/torchspan-config.cmake ${PROJECT_BINARY_DIR}/torchspan-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/TorchspanLibtorch.cmake ${PROJECT_SOURCE_DIR}/cmake/FindxxHash.cmake
        DESTINATION ${package_folder})
