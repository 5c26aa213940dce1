# torchspan_shared: libtorchspan.so, linked from the objects of the static rooms. It exports what the public headers declare
# (export_list.py); everything else is local to it. Its SONAME is the ABI's version: major.minor until 1.0.
#
# With TORCHSPAN_SHARED, torchspan::torchspan and each torchspan::<room> are this library, so a program cannot contain the
# library twice. The command uses the static rooms in any case: it must not load LibTorch.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

get_property(TORCHSPAN_SHARED_ROOMS GLOBAL PROPERTY TORCHSPAN_ROOMS)
list(REMOVE_ITEM TORCHSPAN_SHARED_ROOMS launch)
set(torchspan_objects "")
set(torchspan_archives "")
set(torchspan_linked "")
foreach(room ${TORCHSPAN_SHARED_ROOMS})
  list(APPEND torchspan_objects $<TARGET_OBJECTS:torchspan_${room}>)
  list(APPEND torchspan_archives $<TARGET_FILE:torchspan_${room}>)
  get_target_property(libraries torchspan_${room} LINK_LIBRARIES)
  list(APPEND torchspan_linked ${libraries})
endforeach()
list(FILTER torchspan_linked EXCLUDE REGEX "^torchspan_")
list(REMOVE_DUPLICATES torchspan_linked)

set(torchspan_exports ${PROJECT_BINARY_DIR}/libtorchspan.map)
file(GLOB_RECURSE torchspan_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/*.h)
add_custom_command(
  OUTPUT ${torchspan_exports}
  COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/cmake/export_list.py ${PROJECT_SOURCE_DIR}/include ${CMAKE_NM}
          ${torchspan_exports} ${torchspan_archives}
  DEPENDS ${PROJECT_SOURCE_DIR}/cmake/export_list.py ${torchspan_headers} ${torchspan_archives}
  COMMENT "Listing what libtorchspan.so exports" VERBATIM)
add_custom_target(torchspan_export_list DEPENDS ${torchspan_exports})

set(torchspan_unasked EXCLUDE_FROM_ALL)
if(TORCHSPAN_SHARED)
  set(torchspan_unasked "")
endif()
add_library(torchspan_shared SHARED ${torchspan_unasked} ${torchspan_objects})
add_dependencies(torchspan_shared torchspan_export_list)
set_target_properties(torchspan_shared PROPERTIES
                      OUTPUT_NAME torchspan EXPORT_NAME shared LINKER_LANGUAGE CXX LINK_DEPENDS ${torchspan_exports}
                      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
# LibTorch of a wheel or zip lies in a folder that the loader does not search.
if(TORCHSPAN_LIBTORCH_PREFIX)
  set_target_properties(torchspan_shared PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
endif()
target_link_options(torchspan_shared PRIVATE -Wl,--version-script=${torchspan_exports})
if(NOT TORCHSPAN_SANITIZE)
  target_link_options(torchspan_shared PRIVATE -Wl,-z,defs)
endif()
target_include_directories(torchspan_shared PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                   $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(torchspan_shared PUBLIC cxx_std_20)
target_link_libraries(torchspan_shared PUBLIC torchspan_torch Threads::Threads)
# By their files: programs on the shared library must not need the CMake packages of these.
foreach(library ${torchspan_linked})
  if(NOT TARGET ${library})
    target_link_libraries(torchspan_shared PRIVATE ${library})
    continue()
  endif()
  get_target_property(type ${library} TYPE)
  if(library STREQUAL "MPI::MPI_CXX")
    target_link_libraries(torchspan_shared PRIVATE ${MPI_CXX_LIBRARIES})
  elseif(NOT type STREQUAL "INTERFACE_LIBRARY")
    target_link_libraries(torchspan_shared PRIVATE $<TARGET_LINKER_FILE:${library}>)
  endif()
endforeach()

if(TORCHSPAN_SHARED)
  foreach(room ${TORCHSPAN_SHARED_ROOMS})
    add_library(torchspan::${room} ALIAS torchspan_shared)
  endforeach()
endif()
