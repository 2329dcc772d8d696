// One rank of ours under `lockstep bench`: lockstep-bench-rank BACKEND
// TIMEOUT_MS MEMORY, with a worker's environment. MEMORY is "ordinary", or
// "registered" for tensors of empty_shared(). It says on stdout that it is
// ready, then answers each line of JSON on stdin with a line, until stdin ends
// (docs/benchmarks.md, "Your own peer",
// has these lines; each rank answers for itself).

#include <torch/version.h>

#include <chrono>
#include <exception>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include <ATen/Functions.h>

#include "lockstep/base/environment.h"
#include "lockstep/cli/bench/rank/operation_case.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/init.h"

namespace {

using lockstep::internal::bench::OperationCase;
using lockstep::internal::bench::Request;
using nlohmann::json;
using std::chrono::steady_clock;

const std::map<std::string, at::ScalarType> kDTypes{
    {"float32", at::kFloat}, {"float64", at::kDouble},
    {"float16", at::kHalf},  {"bfloat16", at::kBFloat16},
    {"int8", at::kChar},     {"uint8", at::kByte},
    {"int16", at::kShort},   {"int32", at::kInt},
    {"int64", at::kLong},
};
const std::map<std::string, lockstep::ReduceOp::RedOpType> kReduceOps{
    {"sum", lockstep::ReduceOp::SUM},
    {"avg", lockstep::ReduceOp::AVG},
    {"product", lockstep::ReduceOp::PRODUCT},
    {"min", lockstep::ReduceOp::MIN},
    {"max", lockstep::ReduceOp::MAX},
    {"band", lockstep::ReduceOp::BAND},
    {"bor", lockstep::ReduceOp::BOR},
    {"bxor", lockstep::ReduceOp::BXOR},
};

void say(const json& line) { std::cout << line.dump() << '\n' << std::flush; }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

// Returns on all ranks at one moment, `after_ns` after the last of them has
// come (the ranks of a host share a clock). With 0, each rank returns when it
// learns that all have come: if ranks share cores, spinning until a moment
// would take the cores from other ranks.
void meet(const at::Tensor& moment, int64_t after_ns) {
  const int64_t came = now_ns();
  *moment.mutable_data_ptr<int64_t>() = came;
  lockstep::all_reduce(moment, {.op = lockstep::ReduceOp::MAX});
  if (after_ns == 0) return;
  const int64_t start = *moment.const_data_ptr<int64_t>() + after_ns;
  while (now_ns() < start) {
  }
}

Request request_of(const json& line, bool registered) {
  const std::string op = line.at("reduce_op");
  return {.operation = line.at("operation"),
          .elements = line.at("elements"),
          .dtype = kDTypes.at(line.at("dtype")),
          .reduce_op = kReduceOps.at(op),
          .async_op = line.at("async"),
          .registered = registered};
}

json answer_to(const json& line, bool registered, int rank, int world_size) {
  json answer{{"wrong", 0}};
  OperationCase one(request_of(line, registered), rank, world_size);
  if (line.at("check").get<bool>()) {
    one.fill();
    one.run();
    std::string first;
    answer["wrong"] = one.count_wrong(first);
    if (!first.empty()) answer["first_wrong"] = first;
  }
  one.clear();
  const int64_t warmup = line.at("warmup");
  const int64_t iterations = line.at("iterations");
  const int64_t start_after = line.at("start_after_us").get<int64_t>() * 1000;
  const at::Tensor moment = at::zeros({1}, at::kLong);
  std::vector<int64_t> times;
  times.reserve(static_cast<size_t>(iterations));
  for (int64_t i = -warmup; i < iterations; ++i) {
    meet(moment, start_after);
    const int64_t begin = now_ns();
    one.run();
    const auto took = static_cast<double>(now_ns() - begin);
    if (i >= 0) times.push_back(static_cast<int64_t>(took * one.share()));
  }
  answer["ns"] = std::move(times);
  return answer;
}

json refusal(const std::exception& error, bool may_be_usage = true) {
  return {{"error", lockstep::internal::words_of(error)},
          {"usage", may_be_usage && dynamic_cast<const std::invalid_argument*>(
                                        &error) != nullptr}};
}

void serve(const std::string& backend, std::chrono::milliseconds timeout,
           bool registered, int rank) {
  auto group = lockstep::init_process_group(backend, {.timeout = timeout});
  say({{"id", 0},
       {"rank", rank},
       {"backend", backend},
       {"memory", registered ? "registered" : "ordinary"},
       {"torch", TORCH_VERSION}});
  for (std::string text; std::getline(std::cin, text);) {
    const json line = json::parse(text);
    json answer;
    try {
      answer = answer_to(line, registered, rank, group->size());
    } catch (const std::exception& error) {
      answer = refusal(error);
    }
    answer["id"] = line.at("id");
    answer["rank"] = rank;
    say(answer);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int rank = 0;
  // `lockstep bench` sets these variables, so a wrong one is not the user's
  // mistake; what is wrong later is one, and the same for all ranks.
  bool environment_is_right = false;
  try {
    rank = static_cast<int>(
        lockstep::internal::get_env_int("RANK", 0, 1 << 20).value());
    lockstep::internal::get_env_int("WORLD_SIZE", 1, 1 << 24);
    environment_is_right = true;
    if (argc != 4) {
      throw std::invalid_argument("give BACKEND, TIMEOUT_MS and MEMORY");
    }
    const std::string memory = argv[3];
    if (memory != "ordinary" && memory != "registered") {
      throw std::invalid_argument("MEMORY is \"" + memory +
                                  "\"; allowed are ordinary and registered");
    }
    const int64_t timeout = lockstep::internal::parse_int("TIMEOUT_MS", argv[2],
                                                          1, int64_t{1} << 40);
    serve(argv[1], std::chrono::milliseconds(timeout), memory == "registered",
          rank);
    return 0;
  } catch (const std::exception& error) {
    // `lockstep bench` reports the failure; this is an answer, in case it still
    // waits for one.
    json answer = refusal(error, environment_is_right);
    answer["id"] = 0;
    answer["rank"] = rank;
    say(answer);
    return 1;
  }
}
