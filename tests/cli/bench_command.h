#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {

// A test of `lockstep bench` of this build.
class BenchTest : public ProgramTest {
 protected:
  // Runs `lockstep bench` with `arguments`.
  ProgramResult bench(const std::vector<std::string>& arguments,
                      ProgramSetup setup = {});
  std::unique_ptr<RunningProgram> start_bench(
      const std::vector<std::string>& arguments, ProgramSetup setup = {});
  // Does the same with --json and returns the document that was written.
  nlohmann::json bench_json(std::vector<std::string> arguments,
                            ProgramSetup setup = {});
};

// Fails the test if a result of `document` contradicts itself: percentiles out
// of order, bandwidths that do not follow from the latency by the formulas of
// NCCL's tests, wrong elements.
void expect_plausible(const nlohmann::json& document);

}  // namespace lockstep::internal::testing
