include(CMakePackageConfigHelpers)

get_property(layers GLOBAL PROPERTY LOCKSTEP_LAYERS)
install(TARGETS ${layers} lockstep
        EXPORT LockstepTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS lockstep_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
# The launcher looks for its modules in ../lib/lockstep, whatever the platform
# calls its folder of libraries.
install(TARGETS lockstep_c10d_store lockstep_own_store lockstep_sources
        LIBRARY DESTINATION lib/lockstep)
if(TARGET lockstep_mpi)
  install(TARGETS lockstep_mpi LIBRARY DESTINATION lib/lockstep)
endif()
lockstep_installed_headers(headers)
foreach(header IN LISTS headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES lockstep/${header}
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep/${folder})
endforeach()
# A static library leaves what it uses to the program that links it.
get_target_property(data_type lockstep_data TYPE)
set(LOCKSTEP_FIND_IMAGES "")
foreach(format JPEG PNG)
  if(LOCKSTEP_HAS_${format} AND data_type STREQUAL "STATIC_LIBRARY")
    string(APPEND LOCKSTEP_FIND_IMAGES "find_dependency(${format})\n")
  endif()
endforeach()
install(EXPORT LockstepTargets NAMESPACE Lockstep::
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
configure_package_config_file(
  cmake/LockstepConfig.cmake.in ${CMAKE_BINARY_DIR}/LockstepConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
write_basic_package_version_file(
  ${CMAKE_BINARY_DIR}/LockstepConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/LockstepConfig.cmake
              ${CMAKE_BINARY_DIR}/LockstepConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
