# Installs the build in BUILD to a prefix of its own, then configures, builds
# and runs the project in SOURCE against it, alone and under `lockstep run`.
set(prefix ${BUILD}/consumer/prefix)
set(binary ${BUILD}/consumer/build)
file(REMOVE_RECURSE ${BUILD}/consumer)

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result
                  OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 300)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGV}\nended with ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${binary} -G Ninja
    -D CMAKE_CXX_COMPILER=${COMPILER}
    -D Torch_DIR=${TORCH} -D CMAKE_PREFIX_PATH=${prefix}
    "-D CMAKE_CXX_FLAGS=-O1 -Wall -Wextra -Werror")
run(${CMAKE_COMMAND} --build ${binary})
run(${binary}/consumer)
if(NOT output MATCHES "rank 0 of 1 trained")
  message(FATAL_ERROR "the consumer said:\n${output}")
endif()
run(${prefix}/bin/lockstep run --standalone --nproc-per-node=2
    ${binary}/consumer)
if(NOT output MATCHES "rank 0 of 2 trained" OR
   NOT output MATCHES "rank 1 of 2 trained")
  message(FATAL_ERROR "the consumer said:\n${output}")
endif()
