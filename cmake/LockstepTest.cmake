# lockstep_test(NAME SOURCES ... LABELS ... [LIBRARIES ...] [TORCH] [DEADLINE s])
#
# One test program and one ctest entry: its cases share a process world
# (tests/harness/process_world.h), which costs too much to start for each.
# TORCH: it includes LibTorch, takes the precompiled header and links the
# harness with ranks; without it, GoogleTest's own main and nothing of torch.
# DEADLINE: seconds until ctest kills it, a backstop behind its own deadlines.
function(lockstep_test name)
  cmake_parse_arguments(arg "TORCH" "DEADLINE" "SOURCES;LABELS;LIBRARIES"
                        ${ARGN})
  if(NOT arg_DEADLINE)
    set(arg_DEADLINE 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  lockstep_options(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin/tests)
  target_compile_definitions(${name} PRIVATE
    LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
    LOCKSTEP_BIN_DIR="${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  if(arg_TORCH)
    lockstep_use_torch_pch(${name})
    target_link_libraries(${name} PRIVATE lockstep_test_harness)
  else()
    target_link_libraries(${name} PRIVATE GTest::gtest GTest::gtest_main)
  endif()
  target_link_libraries(${name} PRIVATE GTest::gmock ${arg_LIBRARIES})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_DEADLINE}
    FIXTURES_REQUIRED leftovers)
endfunction()
