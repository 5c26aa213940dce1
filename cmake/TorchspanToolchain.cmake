# Compiler, linker and cache settings shared by every target.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# libtorchspan.so exports by a list, which cannot name hidden symbols (docs/adr/0011).
if(DEFINED CMAKE_CXX_VISIBILITY_PRESET)
  set(CMAKE_CXX_VISIBILITY_PRESET default)
endif()
set(CMAKE_VISIBILITY_INLINES_HIDDEN OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

find_program(TORCHSPAN_CCACHE ccache)
if(TORCHSPAN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache caches users of a precompiled header only with these settings. precompile.py writes the headers' checksums. Base
  # directory and __FILE__ are relative, for clones in other folders (docs/adr/0012).
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_PCH_EXTSUM=1
      ${TORCHSPAN_CCACHE})
  set(TORCHSPAN_PCH_LAUNCHER ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/cmake/precompile.py ${PROJECT_SOURCE_DIR})
  add_compile_options(-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
endif()
find_program(TORCHSPAN_MOLD mold)
if(TORCHSPAN_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

if(TORCHSPAN_DEBUG_INFO)
  add_compile_options(-g1)
endif()
add_compile_options(-Wall -Wextra -Wno-unused-parameter -fno-omit-frame-pointer)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # gcc 12 reports these inside its own and LibTorch's inlined headers.
  add_compile_options(-Wno-maybe-uninitialized -Wno-dangling-pointer -fpch-preprocess)
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    # With its optimizer also of appends to a std::vector<std::byte> and of std::string's operator+.
    add_compile_options(-Wno-stringop-overflow -Wno-restrict)
  endif()
  if(TORCHSPAN_UNITY)
    # In a unity build no source is the main file, so gcc warns about its unnamed namespaces as if it were a header.
    add_compile_options(-Wno-subobject-linkage)
  endif()
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # ccache caches the users of a precompiled header of clang only if it names no times.
  # libstdc++'s std::stable_sort uses what is deprecated since C++17, and silences gcc only.
  add_compile_options(-Wthread-safety -Wno-deprecated-declarations "SHELL:-Xclang -fno-pch-timestamp")
endif()
if(TORCHSPAN_SANITIZE)
  add_compile_options(-fsanitize=${TORCHSPAN_SANITIZE} -fno-sanitize-recover=all)
  if(TORCHSPAN_SANITIZE MATCHES "undefined")
    # LibTorch hides the type information of some classes that the vptr check would ask for.
    add_compile_options(-fno-sanitize=vptr)
  endif()
  add_link_options(-fsanitize=${TORCHSPAN_SANITIZE})
endif()
# Sources ask for the sanitizers by the macros of gcc, which clang 19 does not define.
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  if(TORCHSPAN_FUZZ OR TORCHSPAN_SANITIZE MATCHES "address")
    add_compile_definitions(__SANITIZE_ADDRESS__=1)
  elseif(TORCHSPAN_SANITIZE MATCHES "thread")
    add_compile_definitions(__SANITIZE_THREAD__=1)
  endif()
endif()
