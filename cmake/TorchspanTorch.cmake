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
function(torchspan_use_torch target)
  target_link_libraries(${target} PUBLIC torchspan_torch)
  target_precompile_headers(${target} REUSE_FROM torchspan_torch_pch)
endfunction()
