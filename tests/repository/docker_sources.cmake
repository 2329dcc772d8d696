# Configures Lockstep from what the Dockerfiles copy and nothing else.
file(STRINGS ${SOURCE}/docker/Dockerfile copies REGEX "^COPY ")
file(STRINGS ${SOURCE}/docker/Dockerfile.cuda copies_cuda REGEX "^COPY ")
if(NOT copies STREQUAL copies_cuda)
  message(FATAL_ERROR "docker/Dockerfile copies\n${copies}\nand "
                      "docker/Dockerfile.cuda\n${copies_cuda}\n; make them equal")
endif()

set(root ${BUILD}/docker_sources)
file(REMOVE_RECURSE ${root})
foreach(copy IN LISTS copies)
  separate_arguments(words UNIX_COMMAND "${copy}")
  list(POP_FRONT words)
  list(POP_BACK words to)
  foreach(from IN LISTS words)
    if(IS_DIRECTORY ${SOURCE}/${from})
      file(COPY ${SOURCE}/${from}/ DESTINATION ${root}${to})
    else()
      file(COPY ${SOURCE}/${from} DESTINATION ${root}${to})
    endif()
  endforeach()
endforeach()

execute_process(
  COMMAND ${CMAKE_COMMAND} --preset release -DCMAKE_CXX_COMPILER=${COMPILER}
          -DTorch_DIR=${TORCH} -DLOCKSTEP_BUILD_TESTS=OFF
          -DLOCKSTEP_BUILD_EXAMPLES=OFF -DLOCKSTEP_BUILD_BENCHMARKS=OFF
  WORKING_DIRECTORY ${root}/src
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "a Dockerfile copies too little; CMake said:\n${output}")
endif()
