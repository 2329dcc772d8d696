#pragma once

#include <cstddef>
#include <vector>

namespace lockstep {

// Which gradients are ready in the iteration that is under way: each parameter
// is awaited until its gradient has come as often as it is to come, or it is
// known that none will.
//
//   idle --- begin() ---> collecting
//   collecting --- end(): nothing is awaited any more ---> idle
//   collecting --- give_up() ---> idle
//
// A call that does not fit the state throws std::logic_error.
//
// With a static graph the first iteration learns how often each gradient
// comes: nothing is ready before learn(), which is called at the end of its
// backward. Not for several threads.
class Readiness {
 public:
  Readiness(size_t parameters, bool static_graph);

  void begin();
  // Counts a gradient of `parameter`. `surplus`: it is ready already, or is
  // known to have none.
  enum class Gradient { awaits_more, ready, surplus };
  Gradient count(size_t parameter);
  // Makes `parameter` ready without a gradient, unless it is ready. Returns
  // whether it was awaited.
  bool set_unused(size_t parameter);
  // Every parameter is ready; those whose gradient did not come are unused.
  // Only if learns().
  void learn();
  void end();
  void give_up();

  bool is_collecting() const { return state_ == State::collecting; }
  bool learns() const { return static_graph_ && !learnt_; }
  // Whether this is known to stay without a gradient, from learn().
  bool is_never_used(size_t parameter) const {
    return learnt_ && parameters_[parameter].expected == 0;
  }
  size_t awaited() const { return awaited_; }
  bool is_ready(size_t parameter) const { return parameters_[parameter].ready; }
  bool is_unused(size_t parameter) const {
    return parameters_[parameter].unused;
  }
  // These are not awaited in any iteration. While idle.
  void exclude(const std::vector<bool>& parameters);
  bool is_excluded(size_t parameter) const {
    return parameters_[parameter].excluded;
  }
  // The parameters as their gradients became ready in the last iteration that
  // was ended; those without are left out.
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

}  // namespace lockstep
