# Every compile goes through ccache. Precompiled headers need its "sloppiness":
# their time stamps differ between builds although their content does not. The
# same holds for the plugin of LockstepPchTemplates.cmake, which ccache treats as
# a part of the compiler.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_COMPILERCHECK=content
      ${CCACHE_PROGRAM})
endif()
