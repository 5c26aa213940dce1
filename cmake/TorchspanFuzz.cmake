# Fuzz targets: src/<room>/…/<name>_fuzz.cpp becomes <room>_<name>_fuzz, linked with its room. Built by clang, with the
# rooms themselves instrumented; `make fuzz` runs them.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "TORCHSPAN_FUZZ needs clang: configure with --preset fuzz (tools/install-deps fuzz installs it)")
endif()

# Before the rooms are declared: their code must be instrumented too.
macro(torchspan_fuzz_instrument)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
  # LibTorch is built without type information for the vptr check.
  add_compile_options(-fno-sanitize=vptr,function)
  add_link_options(-fsanitize=address,undefined)
endmacro()

# After the rooms: one executable for each fuzz file, and the target `fuzzers` for all of them.
function(torchspan_fuzz_targets)
  add_custom_target(fuzzers)
  get_property(rooms GLOBAL PROPERTY TORCHSPAN_ROOMS)
  foreach(room ${rooms})
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/*_fuzz.cpp)
    get_property(torch GLOBAL PROPERTY TORCHSPAN_ROOM_${room}_TORCH)
    get_property(private GLOBAL PROPERTY TORCHSPAN_ROOM_${room}_PRIVATE)
    foreach(source ${sources})
      get_filename_component(stem ${source} NAME_WE)
      set(target ${room}_${stem})
      add_executable(${target} ${source})
      target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
      target_link_libraries(${target} PRIVATE torchspan_${room} ${private})
      target_link_options(${target} PRIVATE -fsanitize=fuzzer)
      if(torch)
        torchspan_use_torch(${target})
      endif()
      add_dependencies(fuzzers ${target})
    endforeach()
  endforeach()
endfunction()
