# Configures examples/own_project with Lockstep's sources as a part of it
# (FetchContent, without the download), and compiles its source. With WHOLE it
# builds and runs all of it, which takes as long as building Lockstep.
set(binary ${BUILD}/own_project)
file(REMOVE_RECURSE ${binary})

# The path is the same each time, so ccache recognises unchanged sources.
set(launcher "")
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(launcher -D CMAKE_CXX_COMPILER_LAUNCHER=${CCACHE_PROGRAM})
  set(ENV{CCACHE_SLOPPINESS}
      pch_defines,time_macros,include_file_mtime,include_file_ctime)
endif()

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGV}\nended with ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} -S ${SOURCE}/examples/own_project -B ${binary} -G Ninja
    -D CMAKE_CXX_COMPILER=${COMPILER}
    ${launcher}
    "-D CMAKE_CXX_FLAGS=-O0 -fpch-preprocess -Wall -Wextra -Werror"
    -D Torch_DIR=${TORCH}
    -D LOCKSTEP_REPOSITORY=${SOURCE}
    -D FETCHCONTENT_SOURCE_DIR_LOCKSTEP=${SOURCE})
if(NOT WHOLE)
  run(${CMAKE_COMMAND} --build ${binary}
      --target CMakeFiles/train.dir/main.cpp.o)
  return()
endif()
run(${CMAKE_COMMAND} --build ${binary})
run(${binary}/train)
if(NOT output MATCHES "rank 0 of 1 has trained")
  message(FATAL_ERROR "the program said:\n${output}")
endif()
run(${binary}/bin/lockstep run --nproc-per-node=2 ${binary}/train)
if(NOT output MATCHES "rank 0 of 2 has trained" OR
   NOT output MATCHES "rank 1 of 2 has trained")
  message(FATAL_ERROR "the program said:\n${output}")
endif()
