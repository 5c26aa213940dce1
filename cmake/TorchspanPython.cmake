# torchspan._C: the module of the Python package, for the Python and the torch of one environment, in a folder of the release of
# torch, so that one package may have several. Only its target sees Python.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT CMAKE_PREFIX_PATH)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
                  OUTPUT_VARIABLE CMAKE_PREFIX_PATH OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: install it first, then this package with "
                        "'pip install --no-build-isolation', so that its module is built for that torch.")
  endif()
endif()

# After the rooms: the module.
function(torchspan_python_module)
  find_library(TORCHSPAN_TORCH_PYTHON torch_python HINTS ${TORCHSPAN_LIBTORCH_PREFIX}/lib NO_DEFAULT_PATH)
  if(NOT TORCHSPAN_TORCH_PYTHON)
    message(FATAL_ERROR "TORCHSPAN_PYTHON is ON, but this LibTorch is not pip's: set CMAKE_PREFIX_PATH to the folder of the "
                        "package torch (python3 -c 'import torch; print(torch.__path__[0])').")
  endif()
  target_include_directories(torchspan_python SYSTEM PUBLIC ${Python_INCLUDE_DIRS})
  target_compile_definitions(torchspan_python PUBLIC USE_DISTRIBUTED USE_C10D TORCH_API_INCLUDE_EXTENSION_H)
  Python_add_library(torchspan_C MODULE WITH_SOABI ${PROJECT_SOURCE_DIR}/src/python/module_main.cpp)
  string(REGEX REPLACE "^([0-9]+)\\.([0-9]+).*" "torchspan/torch_\\1_\\2" folder "${TORCHSPAN_LIBTORCH_VERSION}")
  set_target_properties(torchspan_C PROPERTIES OUTPUT_NAME _C LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/python/${folder}
                                               CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_definitions(torchspan_C PRIVATE TORCH_EXTENSION_NAME=_C TORCHSPAN_VERSION="${PROJECT_VERSION}")
  target_include_directories(torchspan_C PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(torchspan_C PRIVATE torchspan_python fmt::fmt ${TORCHSPAN_TORCH_PYTHON})
  # A process may have another OpenSSL, fmt or TorchSpan.
  target_link_options(torchspan_C PRIVATE -Wl,--exclude-libs,ALL)
  install(TARGETS torchspan_C LIBRARY DESTINATION ${folder} COMPONENT python)
endfunction()
