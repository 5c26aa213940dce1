# LibTorch and the precompiled headers of the targets that use it.
include(TorchspanLibtorch)

# LibTorch's own headers are not ours to warn about.
add_library(torchspan_torch INTERFACE)
target_include_directories(torchspan_torch SYSTEM INTERFACE ${TORCHSPAN_LIBTORCH_INCLUDE})
target_link_libraries(torchspan_torch INTERFACE ${TORCHSPAN_LIBTORCH})

# A precompiled torch/torch.h costs each source four times as much as the narrow one, so only targets that use it get the large
# one.
torchspan_precompile(torch_narrow ${PROJECT_SOURCE_DIR}/cmake/torch_narrow.h OVER standard LINK torchspan_torch)
torchspan_precompile(
  torch_whole ${PROJECT_SOURCE_DIR}/cmake/torch_whole.h
  OVER torch_narrow
  PUBLIC <torchspan/torchspan.h> <torchspan/elastic.h> <torchspan/sharded.h>
  LINK torchspan_torch)

# Sets `result` to whether a file includes LibTorch's modules or optimizers, itself or through headers of this tree.
function(torchspan_sees_modules result file)
  get_property(sees GLOBAL PROPERTY "torchspan_sees_modules ${file}")
  if("${sees}" STREQUAL "")
    set(sees NO)
    # Before the headers that it includes are read: they may include it again.
    set_property(GLOBAL PROPERTY "torchspan_sees_modules ${file}" ${sees})
    file(STRINGS ${file} includes REGEX "^#include [<\"]")
    foreach(line ${includes})
      string(REGEX REPLACE "^#include [<\"]([^>\"]*).*" "\\1" header "${line}")
      if(header MATCHES "^torch/(torch|nn|optim)")
        set(sees YES)
      elseif(header MATCHES "/")
        foreach(root ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
          if(NOT sees AND EXISTS ${root}/${header})
            torchspan_sees_modules(sees ${root}/${header})
          endif()
        endforeach()
      endif()
    endforeach()
    set_property(GLOBAL PROPERTY "torchspan_sees_modules ${file}" ${sees})
  endif()
  set(${result} ${sees} PARENT_SCOPE)
endfunction()

# torchspan_use_torch(target [LIGHT | PROGRAM] [WHOLE]): links a target with LibTorch and gives it the precompiled header that
# suits its sources (TorchspanPrecompiled.cmake), or the large one, which what it is built with needs.
function(torchspan_use_torch target)
  cmake_parse_arguments(PARSE_ARGV 1 TORCH "WHOLE" "" "")
  target_link_libraries(${target} PUBLIC torchspan_torch)
  get_target_property(sources ${target} SOURCES)
  set(size narrow)
  if(TORCH_WHOLE)
    set(size whole)
  endif()
  foreach(source ${sources})
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    if(EXISTS ${source})
      torchspan_sees_modules(modules ${source})
      if(modules)
        set(size whole)
      endif()
    endif()
  endforeach()
  torchspan_use_precompiled(${target} torch_${size} ${TORCH_UNPARSED_ARGUMENTS})
endfunction()
