# LibTorch and the one precompiled header that every torch-side target shares.
find_package(Torch ${TORCHSPAN_LIBTORCH_AT_LEAST} REQUIRED)

# LibTorch's own headers are not ours to warn about.
add_library(torchspan_torch INTERFACE)
target_include_directories(torchspan_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_link_libraries(torchspan_torch INTERFACE ${TORCH_LIBRARIES})

add_library(torchspan_torch_pch STATIC ${CMAKE_SOURCE_DIR}/cmake/torch_pch.cpp)
target_link_libraries(torchspan_torch_pch PUBLIC torchspan_torch)
target_precompile_headers(torchspan_torch_pch PRIVATE ${CMAKE_SOURCE_DIR}/cmake/torch_pch.h)

# Links a target with LibTorch and gives it the shared precompiled header.
# The header is compiled with -fPIC, so executables are too (CMake would give them -fPIE).
function(torchspan_use_torch target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_link_libraries(${target} PUBLIC torchspan_torch)
  target_precompile_headers(${target} REUSE_FROM torchspan_torch_pch)
endfunction()
