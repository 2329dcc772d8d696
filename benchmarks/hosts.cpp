// One rank of `./dev bench hosts`: all_reduce by the hierarchy of the backend
// "lockstep" and by Gloo between all ranks, in turns in the same processes.
// Rank 0 prints one line of JSON:
//
//   {"lockstep": [us, ...], "gloo": [us, ...]}   the median of each round
//
// The time of a call is from the end of a barrier to the call's end on the
// slowest rank.
#include <ATen/ATen.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int64_t bytes = 16 << 20;
  int rounds = 5;
  int calls = 5;  // in a round, for each backend
};

Options parse(int argc, char** argv) {
  CLI::App app("All-reduce between hosts, with and without shared memory");
  Options options;
  app.add_option("--bytes", options.bytes, "size of the tensor")
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "rounds of each backend")
      ->check(CLI::PositiveNumber);
  app.add_option("--calls", options.calls, "calls in a round")
      ->check(CLI::PositiveNumber);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

double slowest(double us, const lockstep::ProcessGroupPtr& group) {
  auto time = at::full({1}, us, at::kDouble);
  lockstep::all_reduce(time, {.op = lockstep::ReduceOp::MAX, .group = group});
  return time.item<double>();
}

double median_call(const Options& options, const at::Tensor& tensor,
                   const lockstep::ProcessGroupPtr& group) {
  std::vector<double> times;
  for (int call = 0; call < options.calls; ++call) {
    tensor.fill_(1);
    lockstep::barrier({.group = group});
    const auto begin = Clock::now();
    lockstep::all_reduce(tensor, {.group = group});
    const std::chrono::duration<double, std::micro> time = Clock::now() - begin;
    times.push_back(slowest(time.count(), group));
    const auto size = lockstep::get_world_size();
    if (!tensor.eq(size).all().item<bool>()) {
      throw std::runtime_error("the sum is wrong");
    }
  }
  std::ranges::sort(times);
  return times[times.size() / 2];
}

void run(const Options& options) {
  auto hierarchy = lockstep::init_process_group("lockstep");
  auto gloo = lockstep::new_group({}, {.backend = "gloo"});
  auto tensor = at::empty({options.bytes / 4});
  nlohmann::json figures;
  const std::pair<const char*, lockstep::ProcessGroupPtr> sides[] = {
      {"lockstep", hierarchy.get()}, {"gloo", gloo}};
  for (int round = -1; round < options.rounds; ++round) {
    for (const auto& [name, group] : sides) {
      const double us = median_call(options, tensor, group);
      if (round >= 0) figures[name].push_back(us);  // the first warms up
    }
  }
  if (lockstep::get_rank() == 0) {
    std::printf("%s\n", figures.dump().c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = parse(argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hosts: %s\n", error.what());
    return 1;
  }
  return 0;
}
