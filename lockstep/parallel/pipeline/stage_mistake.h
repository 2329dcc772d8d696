#pragma once

#include <stdexcept>

namespace lockstep::internal {

// Is thrown for what a stage or the loss has returned, if a pipeline cannot use
// it. The text does not say where: Pipeline::step() and eval() put rank, stage
// and micro-batch before it, and throw std::invalid_argument.
class StageMistake : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace lockstep::internal
