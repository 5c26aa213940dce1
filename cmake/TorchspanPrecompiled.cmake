# Precompiled headers that many targets share. A precompiled header serves one optimization level, so tests and examples have
# others.
#
# Those of clang also contain fmt and, for programs, GoogleTest, and there is one for sources without LibTorch. Behind them,
# gcc 12 with -O3 reports more of the false alarms that TorchspanGcc12.cmake describes.
set(torchspan_rich OFF)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  set(torchspan_rich ON)
endif()
set(torchspan_kinds "")
if(TORCHSPAN_PROGRAM_OPTIONS OR torchspan_rich)
  set(torchspan_kinds _programs)
endif()

# torchspan_precompile(name header… [LINK library…]): the precompiled headers `name` and, for programs, `name`_programs.
function(torchspan_precompile name)
  cmake_parse_arguments(PARSE_ARGV 1 HEADER "" "" "LINK")
  foreach(kind "" ${torchspan_kinds})
    set(target torchspan_${name}${kind})
    add_library(${target} STATIC EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/cmake/precompiled.cpp)
    target_link_libraries(${target} PRIVATE ${HEADER_LINK} fmt::fmt)
    target_precompile_headers(${target} PRIVATE ${HEADER_UNPARSED_ARGUMENTS})
    if(torchspan_rich)
      target_precompile_headers(${target} PRIVATE <fmt/format.h>)
    endif()
    if(kind)
      target_compile_options(${target} PRIVATE ${TORCHSPAN_PROGRAM_OPTIONS})
      if(TORCHSPAN_TESTS AND torchspan_rich)
        target_link_libraries(${target} PRIVATE GTest::gmock)
        target_precompile_headers(${target} PRIVATE <gmock/gmock.h>)
      endif()
    endif()
    if(TORCHSPAN_PCH_LAUNCHER)
      set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER "${TORCHSPAN_PCH_LAUNCHER}")
    endif()
  endforeach()
endfunction()

# torchspan_use_precompiled(target name [PROGRAM]): PROGRAM: a test or an example, or a part of one, which is compiled with
# TORCHSPAN_PROGRAM_OPTIONS. The headers are compiled with -fPIC, so executables are too (CMake would give them -fPIE).
function(torchspan_use_precompiled target name)
  cmake_parse_arguments(PARSE_ARGV 2 USE "PROGRAM" "" "")
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE" AND (torchspan_rich OR NOT name STREQUAL standard))
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_link_libraries(${target} PRIVATE fmt::fmt)  # gcc wants the macros of the precompiled header defined
  set(kind "")
  if(USE_PROGRAM)
    target_compile_options(${target} PRIVATE ${TORCHSPAN_PROGRAM_OPTIONS})
    set(kind ${torchspan_kinds})
  endif()
  if(torchspan_rich OR NOT name STREQUAL standard)
    target_precompile_headers(${target} REUSE_FROM torchspan_${name}${kind})
  endif()
endfunction()
