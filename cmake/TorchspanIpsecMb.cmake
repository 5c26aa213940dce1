# TORCHSPAN_IPSEC_MB: AES-GCM by Intel's IPsec-MB (src/net/tls/ipsec_mb.cpp), where OpenSSL is older than 3.1. It needs the
# library's header to build, and loads the library on demand at run time.
set(TORCHSPAN_IPSEC_MB AUTO CACHE STRING "build AES-GCM by IPsec-MB: AUTO (if its header is installed), ON or OFF")
set_property(CACHE TORCHSPAN_IPSEC_MB PROPERTY STRINGS AUTO ON OFF)

set(TORCHSPAN_HAS_IPSEC_MB OFF)
if(TORCHSPAN_IPSEC_MB)
  find_path(TORCHSPAN_IPSEC_MB_INCLUDE intel-ipsec-mb.h)
  mark_as_advanced(TORCHSPAN_IPSEC_MB_INCLUDE)
  if(TORCHSPAN_IPSEC_MB_INCLUDE)
    set(TORCHSPAN_HAS_IPSEC_MB ON)
  elseif(NOT TORCHSPAN_IPSEC_MB STREQUAL "AUTO")
    message(FATAL_ERROR "TORCHSPAN_IPSEC_MB is ${TORCHSPAN_IPSEC_MB}, but intel-ipsec-mb.h was not found: install "
                        "libipsec-mb-dev, or name its folder in TORCHSPAN_IPSEC_MB_INCLUDE")
  endif()
endif()
if(TORCHSPAN_HAS_IPSEC_MB)
  message(STATUS "AES-GCM by IPsec-MB: built")
else()
  message(STATUS "AES-GCM by IPsec-MB: not built (libipsec-mb-dev is not installed, or TORCHSPAN_IPSEC_MB is OFF)")
endif()
