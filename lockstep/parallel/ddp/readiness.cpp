#include "lockstep/parallel/ddp/readiness.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep::internal {

Readiness::Readiness(size_t parameters, bool static_graph)
    : static_graph_(static_graph), parameters_(parameters) {}

void Readiness::require(State state, const char* call) const {
  if (state_ == state) return;
  throw std::logic_error(std::string("DistributedDataParallel: ") + call +
                         " was called while " +
                         (state_ == State::idle ? "no gradients are collected"
                                                : "gradients are collected"));
}

void Readiness::begin() {
  require(State::idle, "begin()");
  state_ = State::collecting;
  order_.clear();
  awaited_ = 0;
  for (auto& parameter : parameters_) {
    parameter.ready = parameter.excluded;
    parameter.unused = false;
    parameter.came = 0;
    if (!parameter.ready) ++awaited_;
  }
}

Readiness::Gradient Readiness::count(size_t index) {
  require(State::collecting, "count()");
  auto& parameter = parameters_[index];
  ++parameter.came;
  if (learns()) {
    order_.push_back(index);  // the last occurrence counts
    return Gradient::awaits_more;
  }
  if (parameter.ready) return Gradient::surplus;
  if (parameter.came < parameter.expected) return Gradient::awaits_more;
  order_.push_back(index);
  make_ready(index);
  return Gradient::ready;
}

bool Readiness::set_unused(size_t index) {
  require(State::collecting, "set_unused()");
  auto& parameter = parameters_[index];
  if (parameter.ready) return false;
  parameter.unused = true;
  make_ready(index);
  return true;
}

void Readiness::make_ready(size_t index) {
  parameters_[index].ready = true;
  --awaited_;
}

void Readiness::learn() {
  require(State::collecting, "learn()");
  std::vector<size_t> order;
  for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
    if (std::ranges::find(order, *at) == order.end()) order.push_back(*at);
  }
  std::ranges::reverse(order);
  order_ = std::move(order);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    if (parameter.ready) continue;
    parameter.expected = parameter.came;
    parameter.unused = parameter.came == 0;
    make_ready(i);
  }
}

void Readiness::end() {
  require(State::collecting, "end()");
  if (awaited_ != 0) {
    throw std::logic_error("DistributedDataParallel: a backward ends, but " +
                           std::to_string(awaited_) +
                           " gradients are still awaited");
  }
  state_ = State::idle;
  learnt_ = static_graph_;
  last_order_ = std::move(order_);
}

void Readiness::give_up() { state_ = State::idle; }

void Readiness::exclude(const std::vector<bool>& parameters) {
  require(State::idle, "exclude()");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].excluded = parameters[i];
  }
}

}  // namespace lockstep::internal
