#include "tests/cli/bench_command.h"

#include <map>
#include <utility>

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;

// busbw / algbw, as doc/PERFORMANCE.md of nccl-tests and its sources say.
double factor_of(const std::string& operation, double n) {
  const std::map<std::string, double> factors{{"all_reduce", 2 * (n - 1) / n},
                                              {"all_gather", (n - 1) / n},
                                              {"reduce_scatter", (n - 1) / n},
                                              {"all_to_all", (n - 1) / n},
                                              {"gather", (n - 1) / n},
                                              {"scatter", (n - 1) / n},
                                              {"broadcast", 1},
                                              {"reduce", 1},
                                              {"send_recv", 1},
                                              {"barrier", 1}};
  return factors.at(operation);
}

void expect_plausible_entry(const json& entry) {
  const json& times = entry.at("latency_us");
  const double p50 = times.at("p50");
  EXPECT_GT(times.at("min"), 0);
  EXPECT_LE(times.at("min"), times.at("p50"));
  EXPECT_LE(times.at("p50"), times.at("p90"));
  EXPECT_LE(times.at("p90"), times.at("p99"));
  EXPECT_LE(times.at("p99"), times.at("max"));
  EXPECT_EQ(entry.at("wrong"), 0);
  int64_t iterations = 0;
  for (const json& round : entry.at("rounds")) {
    iterations += round.at("iterations").get<int64_t>();
  }
  EXPECT_EQ(entry.at("iterations"), iterations);

  const std::string operation = entry.at("operation");
  const double factor = factor_of(operation, entry.at("ranks"));
  EXPECT_DOUBLE_EQ(entry.at("bus_factor"), factor);
  if (operation == "barrier") {
    EXPECT_EQ(entry.at("bytes"), 0);
    EXPECT_TRUE(entry.at("algbw_gbps").is_null());
    EXPECT_TRUE(entry.at("busbw_gbps").is_null());
    return;
  }
  const double algorithm = entry.at("bytes").get<double>() / p50 / 1000;
  // The latency is rounded to nanoseconds, so the bandwidths need some
  // allowance.
  const double near = 1e-6 + (1e-3 + 0.001 / p50) * algorithm;
  EXPECT_NEAR(entry.at("algbw_gbps"), algorithm, near);
  EXPECT_NEAR(entry.at("busbw_gbps"), algorithm * factor, 2 * near);
}

}  // namespace

std::unique_ptr<RunningProgram> BenchTest::start_bench(
    const std::vector<std::string>& arguments, ProgramSetup setup) {
  std::vector<std::string> command{LOCKSTEP_BIN_DIR "/lockstep", "bench"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return start_program(command, std::move(setup));
}

ProgramResult BenchTest::bench(const std::vector<std::string>& arguments,
                               ProgramSetup setup) {
  return start_bench(arguments, std::move(setup))
      ->finish(std::chrono::seconds(90));
}

json BenchTest::bench_json(std::vector<std::string> arguments,
                           ProgramSetup setup) {
  const std::string path = scratch() / "bench.json";
  arguments.insert(arguments.end(), {"--json", path});
  const auto result = bench(arguments, std::move(setup));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return json::parse(read_file(path));
}

void expect_plausible(const json& document) {
  EXPECT_EQ(document.at("format"), 1);
  const json& machine = document.at("machine");
  EXPECT_GT(machine.at("cores"), 0);
  EXPECT_FALSE(machine.at("cpu").get<std::string>().empty());
  EXPECT_FALSE(machine.at("torch").get<std::string>().empty());
  for (const json& entry : document.at("results")) {
    SCOPED_TRACE(entry.dump());
    expect_plausible_entry(entry);
  }
}

}  // namespace lockstep::internal::testing
