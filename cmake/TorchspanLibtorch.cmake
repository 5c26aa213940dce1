# Finds LibTorch: TORCHSPAN_LIBTORCH (targets and libraries to link), TORCHSPAN_LIBTORCH_INCLUDE, _VERSION, _PREFIX.
# The include folders of a wheel or zip are in the targets below.
#
# pip's wheels and the zips get the targets below, because their CMake package demands a CUDA toolkit with nvcc, cuDNN
# and more, of which TorchSpan needs nothing. Distributions' packages use their own CMake package.
set(torchspan_find_hint "pass -DCMAKE_PREFIX_PATH=\"$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)')\" \
for pip's torch or the folder of an unpacked libtorch zip, or install Debian's libtorch-dev (tools/install-deps)")

# A build folder remembers the LibTorch that was found; another CMAKE_PREFIX_PATH asks for another one. A Torch_DIR that
# was given stays.
if(NOT TARGET libtorch::torch
   AND DEFINED TORCHSPAN_LIBTORCH_SEARCHED
   AND NOT TORCHSPAN_LIBTORCH_SEARCHED STREQUAL "${CMAKE_PREFIX_PATH}"
   AND TORCHSPAN_LIBTORCH_FOUND STREQUAL "${Torch_DIR}")
  unset(Torch_DIR CACHE)
endif()
set(torchspan_given "${Torch_DIR}")
# Only finds the folder and the version: the package's own configuration is not run here.
find_package(Torch CONFIG QUIET CONFIGS TorchConfigVersion.cmake)
set(TORCHSPAN_LIBTORCH_SEARCHED "${CMAKE_PREFIX_PATH}" CACHE INTERNAL "where LibTorch was searched")
if(NOT torchspan_given)
  set(TORCHSPAN_LIBTORCH_FOUND "${Torch_DIR}" CACHE INTERNAL "and found")
endif()
if(NOT Torch_FOUND)
  message(FATAL_ERROR "TorchSpan needs LibTorch, which was not found: ${torchspan_find_hint}.")
endif()
file(STRINGS ${Torch_DIR}/TorchConfigVersion.cmake TORCHSPAN_LIBTORCH_VERSION REGEX "^set\\(PACKAGE_VERSION ")
string(REGEX REPLACE ".*\"([0-9.]+).*" "\\1" TORCHSPAN_LIBTORCH_VERSION "${TORCHSPAN_LIBTORCH_VERSION}")
set(torchspan_least 1.13)
if(TORCHSPAN_LIBTORCH_AT_LEAST)
  set(torchspan_least ${TORCHSPAN_LIBTORCH_AT_LEAST})
endif()
if(TORCHSPAN_LIBTORCH_VERSION VERSION_LESS torchspan_least)
  message(FATAL_ERROR "LibTorch ${TORCHSPAN_LIBTORCH_VERSION} in ${Torch_DIR} is older than ${torchspan_least}, which "
                      "this build needs: ${torchspan_find_hint}.")
endif()
file(STRINGS ${Torch_DIR}/TorchConfig.cmake torchspan_old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
if(torchspan_old_abi)
  message(FATAL_ERROR "LibTorch ${TORCHSPAN_LIBTORCH_VERSION} in ${Torch_DIR} has std::string's ABI from before C++11, "
                      "which does not link with this system's libraries: use LibTorch 2.7 or later, or a zip named "
                      "cxx11-abi.")
endif()

get_filename_component(TORCHSPAN_LIBTORCH_PREFIX ${Torch_DIR}/../../.. ABSOLUTE)
if(NOT EXISTS ${TORCHSPAN_LIBTORCH_PREFIX}/lib/libtorch_cpu.so)
  if(EXISTS ${TORCHSPAN_LIBTORCH_PREFIX}/lib/libc10.so)
    message(FATAL_ERROR "LibTorch ${TORCHSPAN_LIBTORCH_VERSION} in ${TORCHSPAN_LIBTORCH_PREFIX} has no libtorch_cpu.so: \
install it again (pip install --force-reinstall torch).")
  endif()
  message(STATUS "LibTorch ${TORCHSPAN_LIBTORCH_VERSION}, the system's: ${Torch_DIR}")
  set(TORCHSPAN_LIBTORCH_PREFIX "")
  find_package(Torch REQUIRED)
  set(TORCHSPAN_LIBTORCH ${TORCH_LIBRARIES})
  set(TORCHSPAN_LIBTORCH_INCLUDE ${TORCH_INCLUDE_DIRS})
  return()
endif()

set(torchspan_lib ${TORCHSPAN_LIBTORCH_PREFIX}/lib)
set(TORCHSPAN_LIBTORCH_INCLUDE "")
if(NOT EXISTS ${TORCHSPAN_LIBTORCH_PREFIX}/include/torch/csrc/api/include/torch/version.h)
  message(FATAL_ERROR "LibTorch ${TORCHSPAN_LIBTORCH_VERSION} in ${TORCHSPAN_LIBTORCH_PREFIX} has no headers: install it "
                      "again (pip install --force-reinstall torch).")
endif()

# The missing libraries that one of LibTorch's libraries needs, for a message.
function(torchspan_missing_libraries library result)
  execute_process(COMMAND ldd ${library} OUTPUT_VARIABLE needed ERROR_QUIET RESULT_VARIABLE failed)
  if(failed EQUAL 1)
    get_filename_component(name ${library} NAME)
    set(${result} "a ${name} for ${CMAKE_HOST_SYSTEM_PROCESSOR}" PARENT_SCOPE)
    return()
  endif()
  string(REGEX MATCHALL "[^ \t\n]+ => not found" missing "${needed}")
  list(TRANSFORM missing REPLACE " .*" "")
  list(JOIN missing ", " missing)
  set(${result} "${missing}" PARENT_SCOPE)
endfunction()
torchspan_missing_libraries(${torchspan_lib}/libtorch_cpu.so torchspan_missing)
if(torchspan_missing)
  message(FATAL_ERROR "LibTorch ${TORCHSPAN_LIBTORCH_VERSION} in ${TORCHSPAN_LIBTORCH_PREFIX} cannot be loaded, because "
                      "${torchspan_missing} is missing: install the packages that pip's torch requires (pip install torch, "
                      "without --no-deps).")
endif()

# TORCHSPAN_CUDA: with OFF, programs load the CPU half of a CUDA build only, which needs none of CUDA's large libraries.
set(TORCHSPAN_CUDA AUTO CACHE STRING "link the CUDA half of LibTorch: AUTO (if it can be loaded), ON or OFF")
set_property(CACHE TORCHSPAN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(TORCHSPAN_HAS_CUDA OFF)
if(NOT TORCHSPAN_CUDA STREQUAL "OFF")
  if(NOT EXISTS ${torchspan_lib}/libtorch_cuda.so)
    set(torchspan_missing "libtorch_cuda.so")
  else()
    torchspan_missing_libraries(${torchspan_lib}/libtorch_cuda.so torchspan_missing)
  endif()
  if(NOT torchspan_missing)
    set(TORCHSPAN_HAS_CUDA ON)
  elseif(NOT TORCHSPAN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "TORCHSPAN_CUDA is ON, but LibTorch ${TORCHSPAN_LIBTORCH_VERSION} in ${TORCHSPAN_LIBTORCH_PREFIX} "
                        "lacks ${torchspan_missing}: install pip's torch for CUDA with all that it requires, or leave "
                        "TORCHSPAN_CUDA out.")
  endif()
endif()

# Links to the headers: their folder also contains those of another fmt, which would hide the fmt that TorchSpan links.
set(torchspan_headers ${CMAKE_BINARY_DIR}/torchspan-libtorch)
file(REMOVE_RECURSE ${torchspan_headers})
file(MAKE_DIRECTORY ${torchspan_headers})
file(GLOB names RELATIVE ${TORCHSPAN_LIBTORCH_PREFIX}/include ${TORCHSPAN_LIBTORCH_PREFIX}/include/*)
list(REMOVE_ITEM names fmt)
foreach(name ${names})
  file(CREATE_LINK ${TORCHSPAN_LIBTORCH_PREFIX}/include/${name} ${torchspan_headers}/${name} SYMBOLIC)
endforeach()

if(NOT TARGET libtorch::torch)
  foreach(name c10 torch_cpu c10_cuda torch_cuda)
    if(EXISTS ${torchspan_lib}/lib${name}.so)
      add_library(libtorch::${name} SHARED IMPORTED GLOBAL)
      set_target_properties(libtorch::${name} PROPERTIES IMPORTED_LOCATION ${torchspan_lib}/lib${name}.so)
    endif()
  endforeach()
  target_include_directories(
    libtorch::c10 SYSTEM INTERFACE ${torchspan_headers} ${torchspan_headers}/torch/csrc/api/include)
  # What the library was built with; its headers ask for these.
  target_compile_definitions(libtorch::torch_cpu INTERFACE USE_DISTRIBUTED USE_RPC USE_TENSORPIPE)
  target_link_libraries(libtorch::torch_cpu INTERFACE libtorch::c10)
  if(TORCHSPAN_LIBTORCH_VERSION VERSION_GREATER_EQUAL 2.10)
    # Its headers include nlohmann/json.hpp, which the package does not contain.
    find_package(nlohmann_json QUIET)
    if(NOT nlohmann_json_FOUND)
      message(FATAL_ERROR "The headers of LibTorch ${TORCHSPAN_LIBTORCH_VERSION} need nlohmann-json, which was not \
found: install it (apt install nlohmann-json3-dev).")
    endif()
    target_link_libraries(libtorch::torch_cpu INTERFACE nlohmann_json::nlohmann_json)
  endif()
  add_library(libtorch::torch INTERFACE IMPORTED GLOBAL)
  target_link_libraries(libtorch::torch INTERFACE libtorch::torch_cpu)
  if(TARGET libtorch::torch_cuda)
    target_link_libraries(libtorch::c10_cuda INTERFACE libtorch::c10)
    target_link_libraries(libtorch::torch_cuda INTERFACE libtorch::c10_cuda libtorch::torch_cpu)
    if(TORCHSPAN_HAS_CUDA)
      # pip installs CUDA's libraries beside torch. Without this, GNU ld may check against other releases in the system.
      file(GLOB folders ${TORCHSPAN_LIBTORCH_PREFIX}/../nvidia/*/lib)
      list(TRANSFORM folders PREPEND -Wl,-rpath-link,)
      target_link_options(libtorch::torch_cuda INTERFACE ${folders})
      # The library registers its kernels when it is loaded; nothing refers to it by name.
      target_link_libraries(
        libtorch::torch INTERFACE
        "-Wl,--push-state,--no-as-needed,\"${torchspan_lib}/libtorch_cuda.so\" -Wl,--pop-state" libtorch::torch_cuda)
    endif()
  endif()
endif()
set(TORCHSPAN_LIBTORCH libtorch::torch)

if(TORCHSPAN_HAS_CUDA)
  set(torchspan_half "with CUDA")
elseif(EXISTS ${torchspan_lib}/libtorch_cuda.so)
  set(torchspan_half "its CPU half")
  if(torchspan_missing)
    string(APPEND torchspan_half " (for CUDA, ${torchspan_missing} is missing)")
  endif()
else()
  set(torchspan_half "for CPUs")
endif()
message(STATUS "LibTorch ${TORCHSPAN_LIBTORCH_VERSION}, ${torchspan_half}: ${TORCHSPAN_LIBTORCH_PREFIX}")
