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

namespace lockstep::internal::bench {

inline constexpr const char* kName = "lockstep bench";  // of its messages

// The peers that can be named alone.
inline constexpr std::array<std::string_view, 4> kPeers{
    "registered", "gloo", "python", "python-lockstep"};
// The one that needs lockstep-torch, and that "all" leaves out therefore.
inline constexpr std::string_view kPythonLockstep = kPeers[3];

struct Peer {
  std::string name;
  std::string program{};  // of the user's, or empty for one of kPeers
};

// The options, checked.
struct Options {
  std::vector<Operation> operations{};
  std::vector<int64_t> sizes{};  // bytes, as NCCL's tests count them
  std::vector<DType> dtypes{};
  std::vector<int> ranks{};
  std::string backend{};
  std::string reduce_op{};
  bool async_op = false;
  // Each measurement has this many iterations, or as many as fit into
  // `seconds`.
  std::optional<int64_t> iterations{};
  double seconds = 0;
  int64_t warmup = 0;
  int rounds = 0;
  int competing = 0;          // processes that compute meanwhile
  std::vector<Peer> peers{};  // in the order of the table
  // --python; if it is empty, it is searched for.
  std::string python{};
  std::chrono::milliseconds timeout{};
  std::string json{};  // a path, "-" or empty
};

// Parses the arguments after `lockstep bench`; argv[0] is the program. Throws
// std::invalid_argument, one line. If the help is asked for, prints it and
// returns nothing.
std::optional<Options> parse_options(int argc, char** argv);

// Parses a number of bytes such as "4", "1K" or "1M"; K, M and G are powers of
// 1024. Throws std::invalid_argument.
int64_t parse_bytes(const std::string& text);

}  // namespace lockstep::internal::bench
