# False warnings of gcc 12 with -O3, all inside libstdc++'s inlined headers: in branches that are never taken, it assumes that a
# string or a vector has 2^63 bytes, or none (appending to a string, inserting into a vector, comparing two). Each is
# disabled only in the file where it appears; with one disabled, gcc may report another for the same line.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  function(torchspan_false_alarm warning)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:Release>:-Wno-${warning}>)
  endfunction()
  torchspan_false_alarm(restrict src/core/reporting/progress.cpp src/launch/display/board.cpp src/net/network/network_transport.cpp
                        src/schedule/draw.cpp src/collective/serial/serial_backend.cpp src/session/session.cpp)
  torchspan_false_alarm(stringop-overread src/net/ucx/ucx_transport.cpp)
  torchspan_false_alarm(stringop-overflow src/net/local/shared_lane.cpp src/collective/c10d/gloo.cpp
                        src/collective/serial/serial_backend.cpp src/optim/functional/algorithms.cpp src/session/session.cpp)
  torchspan_false_alarm(array-bounds src/optim/functional/algorithms.cpp src/session/session.cpp)
endif()
