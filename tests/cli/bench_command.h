#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::testing {

// A test of `lockstep bench` of this build.
class BenchTest : public ProgramTest {
 protected:
  // Arguments behind "lockstep bench".
  ProgramResult bench(const std::vector<std::string>& arguments,
                      ProgramSetup setup = {});
  std::unique_ptr<RunningProgram> start_bench(
      const std::vector<std::string>& arguments, ProgramSetup setup = {});
  // The same with --json behind them, and what was written there.
  nlohmann::json bench_json(std::vector<std::string> arguments,
                            ProgramSetup setup = {});
};

// Fails the test where a result of `document` is not plausible in itself:
// percentiles out of order, bandwidths that do not follow from the latency by
// the formulas of NCCL's tests, wrong elements.
void expect_plausible(const nlohmann::json& document);

}  // namespace lockstep::testing
