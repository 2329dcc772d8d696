#include "benchmarks/plain_peers/serve.h"

#include <chrono>
#include <iostream>
#include <map>
#include <stdexcept>

#include "benchmarks/plain_peers/reduction_case.h"

namespace lockstep::internal::bench {
namespace {

using kernels::DType;
using kernels::ReduceOp;
using nlohmann::json;
using std::chrono::steady_clock;

const std::map<std::string, DType> kDTypes{
    {"float32", DType::float32}, {"float64", DType::float64},
    {"float16", DType::float16}, {"bfloat16", DType::bfloat16},
    {"int8", DType::int8},       {"uint8", DType::uint8},
    {"int32", DType::int32},     {"int64", DType::int64},
};
const std::map<std::string, ReduceOp> kReduceOps{
    {"sum", ReduceOp::sum},         {"avg", ReduceOp::avg},
    {"product", ReduceOp::product}, {"min", ReduceOp::min},
    {"max", ReduceOp::max},         {"band", ReduceOp::band},
    {"bor", ReduceOp::bor},         {"bxor", ReduceOp::bxor},
};

void say(const json& line) { std::cout << line.dump() << '\n' << std::flush; }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

// Does what meet() of rank/main.cpp does.
void meet(Reducer& reducer, int64_t after_ns) {
  const int64_t latest = reducer.greatest(now_ns());
  if (after_ns == 0) return;
  while (now_ns() < latest + after_ns) {
  }
}

// Every rank refuses for the same reasons, so that all stay in step.
json answer_to(Reducer& reducer, const json& line) {
  if (line.at("operation") != "all_reduce" || line.at("async").get<bool>()) {
    throw std::invalid_argument("this side does only synchronous all_reduce");
  }
  const std::string name = line.at("dtype");
  const auto dtype = kDTypes.find(name);
  if (dtype == kDTypes.end()) {
    throw std::invalid_argument("this side does not know dtype " + name);
  }
  ReductionCase one(reducer, line.at("elements").get<size_t>(), dtype->second,
                    kReduceOps.at(line.at("reduce_op")));
  json answer{{"wrong", 0}};
  if (line.at("check").get<bool>()) {
    one.fill();
    reducer.greatest(0);  // a side may reduce without waiting for others
    one.run();
    reducer.greatest(0);
    std::string first;
    answer["wrong"] = one.count_wrong(first);
    if (!first.empty()) answer["first_wrong"] = first;
    reducer.greatest(0);
  }
  one.clear();
  const int64_t warmup = line.at("warmup");
  const int64_t iterations = line.at("iterations");
  const int64_t start_after = line.at("start_after_us").get<int64_t>() * 1000;
  std::vector<int64_t> times;
  times.reserve(static_cast<size_t>(iterations));
  for (int64_t i = -warmup; i < iterations; ++i) {
    meet(reducer, start_after);
    const int64_t begin = now_ns();
    one.run();
    const int64_t took = now_ns() - begin;
    if (i >= 0) times.push_back(took);
  }
  answer["ns"] = std::move(times);
  reducer.greatest(0);  // before any rank takes its memory away
  return answer;
}

json refusal(const std::exception& error) {
  return {
      {"error", error.what()},
      {"usage", dynamic_cast<const std::invalid_argument*>(&error) != nullptr}};
}

}  // namespace

void serve(Reducer& reducer) {
  const bool is_first = reducer.rank() == 0;
  if (is_first) {
    json facts = reducer.facts();
    facts["id"] = 0;
    facts["rank"] = 0;
    say(facts);
  }
  while (true) {
    std::string text;
    if (is_first && !std::getline(std::cin, text)) text.clear();
    text = reducer.from_first(text);
    if (text.empty()) return;
    const json line = json::parse(text);
    json answer;
    try {
      answer = answer_to(reducer, line);
    } catch (const std::invalid_argument& error) {
      answer = refusal(error);
    }
    answer["rank"] = reducer.rank();
    json answers = json::array();
    for (const auto& one : reducer.to_first(answer.dump())) {
      answers.push_back(json::parse(one));
    }
    if (is_first) say({{"id", line.at("id")}, {"ranks", std::move(answers)}});
  }
}

void say_failure(const std::exception& error) {
  json answer = refusal(error);
  answer["id"] = 0;
  answer["rank"] = 0;
  say(answer);
}

}  // namespace lockstep::internal::bench
