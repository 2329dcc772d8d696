# LibTorch's inline functions use thousands of templates. GCC does not instantiate
# them in a precompiled header but in each source that reads it, for 4 s and
# 400 MB a source, even if the source is empty. The plugin in gcc_plugin/ does it
# once, in the header. It needs the headers of GCC's plugins (Debian:
# gcc-12-plugin-dev); without them the build is only slower. Clang needs no
# plugin: CMake gives it -fpch-instantiate-templates.
option(LOCKSTEP_GCC_PLUGIN
       "Instantiate templates in precompiled headers, if GCC can load plugins"
       ON)
set(LOCKSTEP_GCC_PLUGIN_SOURCES ${CMAKE_CURRENT_LIST_DIR}/gcc_plugin)
set(LOCKSTEP_GCC_PLUGIN_FILE ${CMAKE_BINARY_DIR}/instantiate_templates.so)
set(LOCKSTEP_GCC_PLUGIN_HEADERS "")
if(LOCKSTEP_GCC_PLUGIN AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=plugin
                  OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(EXISTS ${folder}/include/cp/cp-tree.h)
    set(LOCKSTEP_GCC_PLUGIN_HEADERS ${folder}/include)
  else()
    string(REGEX MATCH "^[0-9]+" version ${CMAKE_CXX_COMPILER_VERSION})
    message(STATUS "Lockstep: the build takes longer, because GCC's headers for "
                   "plugins were not found (Debian: gcc-${version}-plugin-dev)")
  endif()
endif()

# lockstep_instantiate_in_pch(TARGET): the precompiled header of TARGET, which
# has all its headers already, shall hold the instances of their templates, too.
function(lockstep_instantiate_in_pch target)
  if(NOT LOCKSTEP_GCC_PLUGIN_HEADERS)
    return()
  endif()
  if(NOT TARGET lockstep_gcc_plugin)
    # A custom command, because CMake lets a header be compiled before a library
    # is linked.
    set(source ${LOCKSTEP_GCC_PLUGIN_SOURCES}/instantiate_templates.cpp)
    add_custom_command(
      OUTPUT ${LOCKSTEP_GCC_PLUGIN_FILE}
      COMMAND ${CMAKE_CXX_COMPILER} -O1 -fPIC -shared -fno-rtti
              -isystem ${LOCKSTEP_GCC_PLUGIN_HEADERS} ${source}
              -o ${LOCKSTEP_GCC_PLUGIN_FILE}
      DEPENDS ${source}
      VERBATIM)
    add_custom_target(lockstep_gcc_plugin DEPENDS ${LOCKSTEP_GCC_PLUGIN_FILE})
  endif()
  target_precompile_headers(${target} PRIVATE
    ${LOCKSTEP_GCC_PLUGIN_SOURCES}/instantiate_templates.h)
  target_compile_options(${target} PRIVATE
    -fplugin=${LOCKSTEP_GCC_PLUGIN_FILE})
  add_dependencies(${target} lockstep_gcc_plugin)
  # Clang, which reads the commands of this file for `./dev lint`, cannot load the
  # plugin.
  set_target_properties(${target} PROPERTIES EXPORT_COMPILE_COMMANDS OFF)
endfunction()
