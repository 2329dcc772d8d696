#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/cli/bench/operations.h"

namespace lockstep::bench {

// What was asked for, checked.
struct Options {
  std::vector<Operation> operations{};
  std::vector<int64_t> sizes{};  // bytes, as NCCL's tests count them
  std::vector<DType> dtypes{};
  std::vector<int> ranks{};
  std::string backend{};
  std::string reduce_op{};
  bool async_op = false;
  // Of each measurement: this many iterations, or as many as fit `seconds`.
  std::optional<int64_t> iterations{};
  double seconds = 0;
  int64_t warmup = 0;
  int rounds = 0;
  std::vector<std::string> peers{};  // names of kPeers, in its order
  std::string python{};              // --python; empty: to be searched for
  std::chrono::milliseconds timeout{};
  std::string json{};  // a path, "-" or empty
  std::string plot{};  // a path, or empty
};

// Who can stand beside ours, in the order of the table.
inline constexpr std::array<std::string_view, 6> kPeers{
    "registered", "protocol", "kernel", "openmpi", "gloo", "python"};

// From the arguments behind `lockstep bench`; argv[0] is the program. Throws
// std::invalid_argument, one line. Prints the help where it is asked for, and
// returns nothing.
std::optional<Options> parse_options(int argc, char** argv);

// "4,1K,1M" and the like: bytes, K, M and G being powers of 1024.
int64_t parse_bytes(const std::string& text);

}  // namespace lockstep::bench
