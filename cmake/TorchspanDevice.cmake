# Groups and calls on GPUs need CUDA's runtime, for native streams and for memory that processes share. NCCL is loaded
# when a group needs it.
if(TORCHSPAN_HAS_CUDA)
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND)
    set_property(SOURCE src/device/cuda_runtime.cpp APPEND PROPERTY COMPILE_DEFINITIONS TORCHSPAN_CUDA_RUNTIME)
    set_property(SOURCE src/device/cuda_runtime.cpp APPEND PROPERTY INCLUDE_DIRECTORIES ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(torchspan_device PRIVATE libtorch::c10_cuda ${CUDA_cudart_LIBRARY} ${CMAKE_DL_LIBS})
  elseif(TORCHSPAN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TORCHSPAN_CUDA is ON, but there is no CUDA toolkit: install one of LibTorch's major version (its "
                        "headers and libcudart are enough) and set CUDAToolkit_ROOT, or leave TORCHSPAN_CUDA out.")
  else()
    message(STATUS "No groups and no shared memory on GPUs: there is no CUDA toolkit (set CUDAToolkit_ROOT).")
  endif()
endif()
