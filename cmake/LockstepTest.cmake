# A precompiled header for tests without LibTorch: GoogleMock and JSON are most of
# what such a test compiles. A target that adds options of its own cannot use it
# (DISABLE_PRECOMPILE_HEADERS).
function(lockstep_use_plain_test_pch target)
  if(NOT TARGET lockstep_plain_test_pch)
    lockstep_add_pch(lockstep_plain_test_pch
      HEADERS <gmock/gmock.h> <nlohmann/json.hpp> <chrono> <filesystem>
              <fstream> <functional> <map> <memory> <sstream> <string> <thread>
              <vector>
      LIBRARIES GTest::gmock nlohmann_json::nlohmann_json)
  endif()
  target_precompile_headers(${target} REUSE_FROM lockstep_plain_test_pch)
endfunction()

# lockstep_test(NAME SOURCES ... LABELS ... [LIBRARIES ...] [TORCH [PLAIN_MAIN]]
#               [SANITIZERS ...] [SLOW_CASES ...])
#
# Adds one test program and one ctest entry: the cases share a process world
# (tests/harness/process_world.h), which costs too much to start for each.
# TORCH: the program includes LibTorch, takes the precompiled header and links
# the harness with ranks. Without TORCH it has a main() without ranks and no
# LibTorch. PLAIN_MAIN: the program includes LibTorch but has no ranks.
# SANITIZERS: `address`, `thread` or both, if the preset of that sanitizer is to
# build and run the program (target sanitized_tests, label `sanitized`). Such a
# program must not link LibTorch, which is not instrumented. SLOW_CASES: patterns
# of GoogleTest for cases that vary what other cases of the program test, and take
# long; they are a ctest entry of their own, NAME_slow with the label `slow`.
#
# Programs run side by side. Of those with the label `faults`, whose ranks must
# notice deaths soon, one runs at a time. With a sanitizer, which makes ranks
# slow, these and those with the label `multiprocess` run with no other program
# beside them. A program writes GoogleTest's report to
# test-results/NAME.xml in the build folder, from which `./dev test` counts cases
# (harness/summary.py).
function(lockstep_test name)
  cmake_parse_arguments(arg "TORCH;PLAIN_MAIN" ""
                        "SOURCES;LABELS;LIBRARIES;SANITIZERS;SLOW_CASES"
                        ${ARGN})
  # Seconds until ctest kills the program, in case its own deadlines fail. On a
  # busy machine programs take ten times as long as they need.
  set(deadline 600)
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
  else()
    lockstep_use_plain_test_pch(${name})
  endif()
  if(arg_TORCH AND NOT arg_PLAIN_MAIN)
    target_link_libraries(${name} PRIVATE lockstep_test_harness)
  else()
    target_link_libraries(${name} PRIVATE lockstep_test_main)
  endif()
  target_link_libraries(${name} PRIVATE GTest::gmock ${arg_LIBRARIES})
  if(arg_SLOW_CASES)
    list(JOIN arg_SLOW_CASES : slow_cases)
    add_test(NAME ${name} COMMAND ${name} --gtest_filter=-${slow_cases})
    add_test(NAME ${name}_slow COMMAND ${name} --gtest_filter=${slow_cases})
    set_tests_properties(${name}_slow PROPERTIES
      LABELS slow TIMEOUT 3600 SKIP_RETURN_CODE 77 RESOURCE_LOCK faults
      FIXTURES_REQUIRED leftovers)
  else()
    add_test(NAME ${name} COMMAND ${name})
  endif()
  set(alone OFF)
  if(LOCKSTEP_SANITIZE AND
     (faults IN_LIST arg_LABELS OR multiprocess IN_LIST arg_LABELS))
    set(alone ON)
  endif()
  if(LOCKSTEP_SANITIZE)  # everything takes longer
    math(EXPR deadline "${deadline} * 5")
  endif()
  if(LOCKSTEP_SANITIZE IN_LIST arg_SANITIZERS)
    list(APPEND arg_LABELS sanitized)
    add_dependencies(sanitized_tests ${name})
  endif()
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${deadline} RUN_SERIAL ${alone}
    SKIP_RETURN_CODE 77  # kAllSkipped in tests/harness/all_tests.h
    ENVIRONMENT GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/${name}.xml
    FIXTURES_REQUIRED leftovers)
  if(faults IN_LIST arg_LABELS)
    set_tests_properties(${name} PROPERTIES RESOURCE_LOCK faults)
  endif()
endfunction()
