#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/checkpoint/training_state.h"

namespace lockstep::internal {

// Where a rank is in the program around its HealedTraining: which calls of
// next() and run() it has made, and with which samples. A process that takes a
// place begins at the top of the program, and goes from there to where the
// others are: calls that they have completed are passed over. For one thread.
class LoopPosition {
 public:
  // The text in which a rank tells the others its position.
  using Status = nlohmann::json;
  // The numbers of the loop, which a program counts by itself.
  struct Numbers {
    int64_t epochs_run = -1;
    int64_t step = 0;
  };

  // `state` must outlive this object.
  explicit LoopPosition(TrainingState& state);

  // ---- What the program does ----

  // next() was called. Calls `begin_pass` and returns true if another loop over
  // a loader begins. Throws std::logic_error if the loop over another loader
  // has not ended.
  bool next_begins(const void* loader, const std::function<void()>& begin_pass);
  void pass_ends() { loader_ = nullptr; }

  // run() was called.
  void call_begins() {
    call_ends_ = calls_ + 1;
    was_passed_over_ = false;
  }
  // Returns whether that call is still to be made. Counts one that the others
  // have completed.
  bool must_run();
  void call_has_ended() { ++calls_; }
  // Returns whether the call was not made here, because the others had
  // completed it.
  bool was_passed_over() const { return was_passed_over_; }

  // run(compute, update) has completed a step.
  void step_has_ended();

  int64_t iteration() const { return iteration_; }  // calls of next()
  int64_t calls() const { return calls_; }          // of run(), completed
  int64_t steps() const { return steps_; }          // completed

  Numbers numbers() const { return {state_.epochs_run, state_.step}; }
  void set_numbers(const Numbers& numbers);
  // As they were after the last step.
  const Numbers& numbers_after() const { return after_; }

  // ---- Where the others are ----

  void add_to(Status& status) const;
  // Returns whether the rank with the status `one` has come farther. Of two
  // that have taken the same steps, one may still have to call next().
  static bool is_ahead(const Status& one, const Status& other);

  // This rank, which joins, goes to the top of the loop in which `from` is.
  void take_top_of(const Status& from);
  // Its steps are those of `from`, whose state it has.
  void take_steps_of(const Status& from);
  // Its state is that after `steps` steps, which are as many or one less.
  void return_to(int64_t steps);
  void set_numbers_after(const Numbers& numbers) { after_ = numbers; }
  // The others have completed `calls` calls of run().
  void pass_over(int64_t calls);
  // Returns whether the call in progress is to be made again.
  bool is_repeated() const {
    return calls_ < call_ends_ && calls_ >= passed_over_;
  }

  // The job goes on with fewer ranks, as one that has loaded a snapshot of the
  // rank `from`: these ranks share the samples that are left when next() is
  // called the next time. If no step was made with the batch that `from` has
  // got last, that is at once: the batch is given up, with the calls of run()
  // that were made with it. Returns whether this rank gives up its batch.
  bool share_samples(const Status& from);

 private:
  // How next() goes on with fewer ranks, once it was called so often.
  struct Resume {
    int64_t iteration = 0;
    nlohmann::json samplers = nlohmann::json::object();  // as item_json()
    std::optional<Numbers> numbers{};                    // nothing if they stay
    std::optional<int64_t> epoch{};                      // of the samplers
  };

  std::optional<int64_t> sampler_epoch() const;
  void load_samplers(const nlohmann::json& samplers);
  void take_top();
  std::map<std::string, ItemState> states_of_samplers() const;
  // Begins a pass, whose top is where it begins.
  void begin(const std::function<void()>& begin_pass);

  TrainingState& state_;
  int64_t steps_ = 0;
  int64_t calls_ = 0;
  int64_t iteration_ = 0;
  int64_t call_ends_ = 0;  // calls_ after the call of run() in progress
  // Until calls_ is this, calls of run() are passed over.
  int64_t passed_over_ = 0;
  bool was_passed_over_ = false;  // the last call
  // Whether calls of run() return at once, until next() is called.
  bool waits_for_next_ = false;
  std::optional<Resume> resume_{};
  // Over which a loop runs: next() was called and has not returned null.
  const void* loader_ = nullptr;
  // The sampler's epoch in that loop. If the program leaves the loop and
  // selects another one, the next call begins another loop.
  std::optional<int64_t> epoch_{};
  // Over which the first loop ran since epochs_run has changed, the sampler's
  // epoch in the last one, and whether there was another loop.
  const void* first_loader_ = nullptr;
  int64_t first_loader_after_ = 0;
  std::optional<int64_t> last_epoch_{};
  bool second_loop_ = false;
  // As of the last call of next() before which run() was called, before it took
  // a batch.
  int64_t top_iteration_ = 0;
  int64_t top_calls_ = 0;
  int64_t top_steps_ = 0;
  Numbers top_{};
  SamplerState top_sampler_state_{};
  std::map<std::string, ItemState> top_samplers_{};
  Numbers after_{};   // the last step
  Numbers before_{};  // the step before it
};

}  // namespace lockstep::internal
