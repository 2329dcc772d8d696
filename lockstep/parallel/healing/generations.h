#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/comm/launcher_store.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal {

// The worlds that this job has one after the other, as the launcher announces
// them (worker/healing_place.h). For one thread.
class Generations {
 public:
  // A newer generation was announced while this rank made its groups for
  // another.
  struct Superseded {};

  // Connects to the launcher's store. Throws std::invalid_argument if the ranks
  // do not meet there.
  Generations();

  // Waits until a generation is announced that this rank has not taken, and
  // takes the newest, with the causes of all that it had not taken; 60 s at
  // most, and 10 s if no rank is known to be gone.
  // `is_next`: the generation before was not complete. `failure`: what is
  // thrown if none comes, or another rank has ended its training; null for a
  // rank that joins, which throws std::runtime_error. It is thrown, too, if
  // another process has the place of this one.
  GenerationNotice await(const std::exception_ptr& failure, bool is_next);
  // Returns the number of the generation that was taken last.
  int number() const { return number_; }
  // Returns the ranks with the places that are left, as this process has
  // numbered them when it made its groups; none if all are.
  std::vector<int> members(const GenerationNotice& notice) const;

  // Ends a wait for a generation that will never be complete: throws Superseded
  // or, in a rank that joins, std::runtime_error if another has ended its
  // training.
  void look(bool joins);

  // Tells the others that this rank's training has ended.
  void end_training();

  const c10::intrusive_ptr<LauncherStore>& store() const { return store_; }

 private:
  GenerationNotice notice_of(int generation);
  void require_own_place(const GenerationNotice& notice) const;
  void tell_agent(const GenerationNotice& notice) const;
  bool comes_within(const std::string& key, std::chrono::milliseconds time);
  bool is_superseded();
  bool training_has_ended();

  c10::intrusive_ptr<LauncherStore> store_;
  int number_ = 0;
  std::vector<int> places_{};  // of the ranks
  int place_;                  // of this one
};

}  // namespace lockstep::internal
