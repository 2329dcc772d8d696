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
run(${binary}/consumer spawn)
if(NOT output MATCHES "rank 1 of 2 trained.*both ended well")
  message(FATAL_ERROR "the consumer said:\n${output}")
endif()
run(${prefix}/bin/lockstep run --standalone --nproc-per-node=2
    ${binary}/consumer)
if(NOT output MATCHES "rank 0 of 2 trained" OR
   NOT output MATCHES "rank 1 of 2 trained")
  message(FATAL_ERROR "the consumer said:\n${output}")
endif()
run(${prefix}/bin/lockstep run --standalone --nproc-per-node=2
    ${binary}/consumer sharded)
if(NOT output MATCHES "rank 0 stepped its part" OR
   NOT output MATCHES "rank 1 stepped its part")
  message(FATAL_ERROR "the consumer said:\n${output}")
endif()
run(${binary}/consumer data ${binary}/table.csv)
if(NOT output MATCHES "read 2 rows")
  message(FATAL_ERROR "the consumer said:\n${output}")
endif()

# The example of docs/install.md finds the installed Lockstep, too.
run(${CMAKE_COMMAND} -S ${OWN_PROJECT} -B ${binary}/own_project -G Ninja
    -D CMAKE_CXX_COMPILER=${COMPILER}
    -D Torch_DIR=${TORCH} -D CMAKE_PREFIX_PATH=${prefix})

# On two nodes, the installed launcher must find its modules, and that of c10d
# LibTorch.
string(RANDOM LENGTH 4 ALPHABET 0123456789 digits)
foreach(store "static" "lockstep --rdzv-insecure")
  set(node "${prefix}/bin/lockstep run --nnodes=2 --rdzv-backend=${store} \
--master-addr=127.0.0.1 --master-port=2${digits} --rdzv-conf=join_timeout=60")
  run(sh -c "${node} --node-rank=1 true & ${node} --node-rank=0 true && wait $!")
endforeach()
# A subcommand that is a program of its own must be found, and find LibTorch.
run(${prefix}/bin/lockstep bench all_reduce --sizes=4 --iters=1)
if(NOT output MATCHES "# all_reduce sum float32, 2 ranks")
  message(FATAL_ERROR "lockstep bench said:\n${output}")
endif()

# The module of MPI must be found where it was installed, if there is one.
file(GLOB_RECURSE mpi_backend ${prefix}/mpi_backend.so)
if(NOT mpi_backend)
  message(STATUS "not run over MPI: it was not built")
elseif(NOT EXISTS "${MPIRUN}")
  message(STATUS "not run over MPI: there is no mpirun (Debian: openmpi-bin)")
else()
  cmake_path(GET mpi_backend PARENT_PATH modules)
  # Puts MPI's shared memory into a folder of this test, and allows root, which
  # is common in containers.
  run(${CMAKE_COMMAND} -E env LOCKSTEP_MODULE_PATH=${modules}
      OMPI_MCA_btl_vader_backing_directory=${binary}
      OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      ${MPIRUN} --oversubscribe -n 2 ${binary}/consumer mpi)
  if(NOT output MATCHES "rank 0 of 2 trained" OR
     NOT output MATCHES "rank 1 of 2 trained")
    message(FATAL_ERROR "over MPI the consumer said:\n${output}")
  endif()
endif()
