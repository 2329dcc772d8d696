#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::internal {

// Tracks which gradients are ready in the current iteration. A parameter is
// awaited until its gradient has come as often as expected, or until it is
// known that no gradient will come.
//
//   idle --- begin() ---> collecting
//   collecting --- end(): nothing is awaited any more ---> idle
//   collecting --- give_up() ---> idle
//
// A call that does not fit the state throws std::logic_error.
//
// With a static graph the first iteration learns how often each gradient comes:
// nothing is ready before learn(), which is called at the end of the first
// backward. One thread at a time.
class Readiness {
 public:
  Readiness(size_t parameters, bool static_graph);

  void begin();
  // Counts a gradient of `parameter`. `surplus`: the parameter is ready
  // already, or it was known to get no gradient.
  enum class Gradient { awaits_more, ready, surplus };
  Gradient count(size_t parameter);
  // Makes `parameter` ready without a gradient, unless it is ready already.
  // Returns whether it was awaited.
  bool set_unused(size_t parameter);
  // Makes every parameter ready; those whose gradient did not come are unused.
  // Requires learns().
  void learn();
  void end();
  void give_up();

  bool is_collecting() const { return state_ == State::collecting; }
  bool learns() const { return static_graph_ && !learnt_; }
  // Returns whether learn() has found that this parameter never gets a
  // gradient.
  bool is_never_used(size_t parameter) const {
    return learnt_ && parameters_[parameter].expected == 0;
  }
  size_t awaited() const { return awaited_; }
  bool is_ready(size_t parameter) const { return parameters_[parameter].ready; }
  bool is_unused(size_t parameter) const {
    return parameters_[parameter].unused;
  }
  // Sets the parameters that are not awaited in any iteration. Call it while
  // idle.
  void exclude(const std::vector<bool>& parameters);
  bool is_excluded(size_t parameter) const {
    return parameters_[parameter].excluded;
  }
  // Returns the parameters in the order in which their gradients became ready
  // in the last iteration that ended; those without a gradient are left out.
  const std::vector<size_t>& last_order() const { return last_order_; }

 private:
  enum class State { idle, collecting };
  struct Parameter {
    bool excluded = false;
    bool ready = false;
    bool unused = false;
    int expected = 1;  // gradients in an iteration
    int came = 0;
  };
  void require(State state, const char* call) const;
  void make_ready(size_t parameter);

  State state_ = State::idle;
  const bool static_graph_;
  bool learnt_ = false;
  std::vector<Parameter> parameters_;
  size_t awaited_ = 0;
  std::vector<size_t> order_;
  std::vector<size_t> last_order_;
};

}  // namespace lockstep::internal
