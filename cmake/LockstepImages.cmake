# Finds the libraries that decode images. Each may be left out: files of that
# format are then refused with the name of the library. JPEG::JPEG and PNG::PNG
# are used by lockstep_data alone, which does not show them to its users.
set(LOCKSTEP_JPEG AUTO CACHE STRING
    "Decode JPEG: AUTO (if libjpeg is there), ON (an error if not) or OFF")
set(LOCKSTEP_PNG AUTO CACHE STRING
    "Decode PNG: AUTO (if libpng is there), ON (an error if not) or OFF")
foreach(format JPEG PNG)
  set(LOCKSTEP_HAS_${format} OFF)
  if(LOCKSTEP_${format} STREQUAL "OFF")
    continue()
  endif()
  if(LOCKSTEP_${format} STREQUAL "ON")
    find_package(${format} REQUIRED)
  else()
    find_package(${format} QUIET)
  endif()
  if(${format}_FOUND)
    set(LOCKSTEP_HAS_${format} ON)
  else()
    message(STATUS "Lockstep: no ${format} images: the library was not found "
                   "(Debian: libjpeg-dev, libpng-dev)")
  endif()
endforeach()
