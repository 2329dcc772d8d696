#include "lockstep/parallel/healing/healed_training.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/number_list.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/state_transfer.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/healing/buddy_copies.h"
#include "lockstep/parallel/healing/generation_watch.h"
#include "lockstep/parallel/healing/generations.h"
#include "lockstep/parallel/healing/loop_position.h"
#include "lockstep/parallel/healing/rank_record.h"
#include "lockstep/parallel/healing/state_records.h"
#include "lockstep/parallel/healing/trained_parameters.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep {
namespace {

using internal::BuddyCopies;
using internal::FileDescriptor;
using internal::Generations;
using internal::GenerationWatch;
using internal::LoopPosition;
using internal::RankRecord;
using internal::StateRecords;
using Clock = std::chrono::steady_clock;

// After so many healings the ranks begin again from the snapshot.
constexpr int kHealedInOneCall = 8;
// The line about a healing has so much of what has failed.
constexpr size_t kToldBytes = 200;

}  // namespace

class HealedTraining::Work {
 public:
  Work(TrainingState& state, const HealedTrainingOptions& options)
      : state_(state) {
    if (!internal::job_heals() || !is_the_first()) return;
    if (state_.model) parameters_.emplace(state_);
    require_healable();
    generations_.emplace();
    memory_ = internal::take_place_memory();
    record_.emplace(memory_, state_, *parameters_);
    if (internal::get_env_int("GROUP_WORLD_SIZE", 1, 1 << 30) > 1) {
      watch_.emplace(generations_->store());
      if (options.buddy_copies) {
        internal::require_buddies();
        record_copies_.emplace(record_->records(), memory_, kSlots);
      }
    }
    ranks_ = get_world_size();
    if (internal::groups_are_apart()) {
      begin_state_records();
      joins_ = true;
      meet(Clock::now(), nullptr);
      joins_ = false;
      if (!record_->has(position_.steps())) write_record(Moment::begun);
    } else {
      if (watch_) require_same_buddies();
      if (is_divided_anywhere()) {
        begin_state_records();
        states_->write(position_.steps());
      }
      write_record(Moment::begun);
      copy_to_buddy();
    }
    internal::tell_agent_heals(true, states_ && !record_copies_
                                         ? "its state is divided over the ranks"
                                         : "");
    // Nobody replaces a process that ends well in the midst of its training.
    living_ = this;
    static const int registered = ::on_exit(
        [](int status, void*) {
          if (status == 0 && living_ != nullptr) living_->end();
        },
        nullptr);
    static_cast<void>(registered);
  }

  // A process that takes a place would wait for this rank in vain, unless an
  // exception ends this one, too.
  void end() {
    if (living_ == this) living_ = nullptr;
    if (!heals() || std::uncaught_exceptions() > exceptions_) return;
    generations_->end_training();
    internal::tell_agent_heals(false);
  }

  // All ranks have done what they were to do in a loop over the loader.
  void pass_ends() {
    position_.pass_ends();
    if (heals()) run_unit([this] { require_same_place(); });
  }

  // Calls `begin_pass` and returns true if another loop begins.
  bool next_begins(const void* loader,
                   const std::function<void()>& begin_pass) {
    require_outside("next()");
    return position_.next_begins(loader, begin_pass);
  }

  void run_step(const std::function<void()>& compute,
                const std::function<void()>& update) {
    const Inside inside(*this);
    if (!heals()) {
      compute();
      update();
      return;
    }
    const auto before = position_.numbers();
    run_unit([&] {
      // If the update was interrupted, the numbers were perhaps counted.
      position_.set_numbers(before);
      const int64_t steps = position_.steps();
      write_record(Moment::begun);
      copy_to_buddy();
      const auto marks = parameters_->marks();
      compute();
      if (!states_) {
        parameters_->require_unchanged(marks);
        record_->write(steps + 1, position_.calls(), Moment::computed);
        copy_to_buddy();
      }
      require_same_place();
      is_whole_ = false;
      const auto own = record_->mark();
      parameters_->update_begins();
      update();
      parameters_->update_has_ended();
      updated_items_ = record_->changed_items(own);
      const bool changes_own = record_->differs_from(own);
      if (changes_own || !parameters_->kept().empty()) {
        record_->write(steps + 1, position_.calls() + 1, Moment::begun);
      }
      if (changes_own && !states_) own_changed_ = position_.calls() + 1;
      if (states_) states_->write(steps + 1);
      is_whole_ = true;
      position_.step_has_ended();
      may_go_back_ = states_.has_value();
    });
    // The update of a step that was passed over has counted.
    if (position_.was_passed_over()) {
      position_.set_numbers(position_.numbers_after());
    }
  }

  void run_block(const std::function<void()>& function) {
    const Inside inside(*this);
    if (!heals()) return function();
    run_unit([&] {
      const auto own = record_->mark();
      // FullyShard gathers parameters in an evaluation, too, and they may stay.
      if (!states_) parameters_->function_begins();
      function();
      if (!states_) parameters_->require_same_state();
      if (!record_->differs_from(own) &&
          record_->changed_items(own).find('1') == std::string::npos) {
        return;
      }
      own_changed_ = position_.calls() + 1;
      record_->write(position_.steps(), own_changed_, Moment::begun);
    });
  }

  const std::vector<Healing>& healings() const { return healings_; }

 private:
  using Moment = RankRecord::Moment;
  // The text that a rank sends to the others after one was lost.
  using Status = LoopPosition::Status;

  bool heals() const { return generations_.has_value(); }
  void write_record(Moment moment) {
    record_->write(position_.steps(), position_.calls(), moment);
  }
  int next_generation() const { return generations_->number() + 1; }

  // Lives as long as run() is called.
  class Inside {
   public:
    explicit Inside(Work& work) : work_(work) {
      work.require_outside("run()");
      work.is_inside_ = true;
      internal::refuses_new_groups() = work.heals();
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    ~Inside() {
      work_.is_inside_ = false;
      internal::refuses_new_groups() = false;
    }

   private:
    Work& work_;
  };
  void require_outside(const std::string& call) const {
    if (!is_inside_) return;
    throw std::logic_error("HealedTraining: " + call +
                           " was called in a function of run(); call it after "
                           "run() has returned");
  }

  // Calls `unit` until it was completed, here or by the rank whose state this
  // rank has taken.
  template <class Unit>
  void run_unit(const Unit& unit) {
    position_.call_begins();
    while (position_.must_run()) {
      try {
        const GenerationWatch::Collectives watched(watch_, next_generation());
        unit();
        position_.call_has_ended();
        // No rank goes on before all have a record of the new state. If one is
        // lost here, the ranks agree by healing.
        if (may_go_back_) {
          copy_to_buddy();
          require_same_place();
        }
        may_go_back_ = false;
      } catch (...) {
        heal(std::current_exception());
      }
    }
  }

  void begin_state_records() {
    states_.emplace(memory_, RankRecord::kSlots, state_);
    if (!record_copies_) return;
    state_copies_.emplace(states_->records(), memory_,
                          kSlots + RankRecord::kSlots);
  }

  // Collective, if copies on another host are wanted.
  void copy_to_buddy() {
    if (record_copies_) record_copies_->exchange();
    if (state_copies_) state_copies_->exchange();
  }

  // Collective. Returns whether the state of any rank is divided.
  bool is_divided_anywhere() const {
    auto divided = at::full({1}, internal::is_divided(state_) ? 1 : 0,
                            at::TensorOptions(at::kLong));
    all_reduce(divided, {.op = ReduceOp::MAX});
    return divided.item<int64_t>() != 0;
  }

  // Throws std::logic_error if the ranks have come to different places of the
  // program. Collective: all have computed the step when it returns.
  void require_same_place() {
    auto places = at::empty({4}, at::kLong);
    auto* at = places.mutable_data_ptr<int64_t>();
    at[0] = position_.iteration();
    at[1] = -at[0];
    at[2] = position_.calls();
    at[3] = -at[2];
    all_reduce(places, {.op = ReduceOp::MAX});
    if (at[0] == -at[1] && at[2] == -at[3]) return;
    throw std::logic_error(
        "HealedTraining: the ranks are at different places of the program: "
        "this one in call " +
        std::to_string(position_.calls()) + " of run() and " +
        std::to_string(position_.iteration()) + " of next(), others in calls " +
        std::to_string(-at[3]) + " to " + std::to_string(at[2]) + " and " +
        std::to_string(-at[1]) + " to " + std::to_string(at[0]) +
        "; what is done between these calls must follow from TrainingState, "
        "the loader and constants");
  }

  // ---- Healing ----

  // Returns false if a training of this process has ended already: its place
  // has one memory.
  static bool is_the_first() {
    if (living_ != nullptr) {
      throw std::logic_error(
          "HealedTraining: this process has another one; make one of a "
          "TrainingState with both models and optimizers");
    }
    static bool had_one = false;
    if (!std::exchange(had_one, true)) return true;
    TORCH_WARN(
        "lockstep: this is the second HealedTraining of the process, which is "
        "not healed: if a rank dies, all ranks begin again from the last "
        "snapshot");
    return false;
  }

  // Throws std::invalid_argument if a part of the training cannot be healed.
  void require_healable() const {
    const auto refuse = [](const std::string& what) {
      throw std::invalid_argument(
          "HealedTraining: " + what +
          ", which cannot be healed; leave out --heal, so that all ranks are "
          "restarted");
    };
    if (!supports_reconfigure()) {
      refuse("the backend of the default group cannot be made again");
    }
    if (!state_.model) {
      throw std::invalid_argument(
          "HealedTraining: TrainingState.model is not set");
    }
    bool has_sampler = false;
    for (const auto& [name, item] : state_.items) {
      if (item.is_sampler() && item.is_per_rank()) {
        refuse("each rank has its own state of the sampler \"" + name + "\"");
      }
      has_sampler = has_sampler || item.is_sampler();
    }
    if (!has_sampler) {
      throw std::invalid_argument(
          "HealedTraining: TrainingState.items has no sampler, so a rank that "
          "takes another's place would not know which samples come next; add "
          "{\"sampler\", sampler}");
    }
    if (!parameters_->have(internal::parameters_to_reconfigure())) {
      throw std::invalid_argument(
          "HealedTraining: a DistributedDataParallel has parameters that no "
          "module of TrainingState has, so a process that takes a place would "
          "begin with other values; add its module to TrainingState::items");
    }
    try {
      internal::without_samplers(state_);
    } catch (const std::exception& error) {
      refuse("the state cannot be given to another process (" +
             std::string(error.what()) + ")");
    }
  }

  // Throws on all ranks, each of which has found this, so that the launcher
  // restarts them at once and heals no more.
  [[noreturn]] static void give_up(const std::string& why) {
    internal::tell_agent_heals(false);
    throw std::runtime_error("HealedTraining: " + why +
                             "; all ranks begin again from the last snapshot");
  }

  // Goes on after the group of this rank failed, or throws `failure`.
  void heal(const std::exception_ptr& failure) {
    const internal::UserFunction function("HealedTraining::run()");
    const internal::Span span("healing", "heal");
    if (!comes_from_group(failure)) std::rethrow_exception(failure);
    meet(Clock::now(), failure);
  }

  static bool comes_from_group(const std::exception_ptr& failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const c10::DistError&) {
      return true;
    } catch (const LostGroupError&) {
      // Without this rank the others would only meet the same.
      internal::tell_agent_heals(false);
      return false;
    } catch (...) {
      return !default_group()->failed_peers().empty();
    }
  }

  // Makes the groups of the next generations until one is complete, and agrees
  // with its ranks on the state. `failure`: what is thrown if none comes; null
  // for a rank that joins.
  void meet(Clock::time_point began, std::exception_ptr failure) {
    std::string causes;
    for (bool is_next = false;; is_next = true) {
      const auto notice = generations_->await(failure, is_next);
      causes += (causes.empty() ? "" : "; ") + notice.cause;
      try {
        reconfigure({.uuid = "heal-" + std::to_string(generations_->number()),
                     .members = generations_->members(notice),
                     .look = [this] { generations_->look(joins_); }});
        const GenerationWatch::Collectives watched(watch_, next_generation());
        agree(began, causes);
        return;
      } catch (const Generations::Superseded&) {
      } catch (const LostGroupError&) {
        internal::tell_agent_heals(false);
        throw;
      } catch (const c10::DistError&) {
        failure = std::current_exception();
      }
    }
  }

  Status status() const {
    Status status = {
        {"joins", joins_},
        {"ranks", ranks_},
        {"whole", is_whole_ && !joins_},
        {"divided", states_.has_value() && !joins_},
        {"records", usable_records()},
        {"lost", joins_ && record_->is_empty()},
        {"lost_state", joins_ && states_ && states_->steps().empty()},
        {"objects", internal::objects_to_reconfigure()},
        {"kept", parameters_->kept()},
        {"updated_items", updated_items_},
        {"own_changed", own_changed_},
        {"keeps_unrecorded", parameters_->keeps_unrecorded()},
        {"healed_here", here_ == position_.calls() ? healed_here_ : 0}};
    position_.add_to(status);
    return status;
  }

  // Collective over the new generation: decides which state counts, and lets
  // each rank have it.
  void agree(Clock::time_point began, const std::string& cause) {
    auto all = all_gather_object(status());
    require_same_objects(all);
    require_healable(all, cause);
    const bool divided = std::ranges::any_of(
        all, [](const Status& one) { return one.at("divided").get<bool>(); });
    if (!divided) {
      state_copies_.reset();
      states_.reset();
    }
    if (give_back_copies(all)) all = all_gather_object(status());
    Healing healing{.cause = cause, .ranks = static_cast<int>(all.size())};
    bool shrinks = false;
    bool shares_anew = false;
    int64_t own_changed = 0;
    for (size_t r = 0; r < all.size(); ++r) {
      if (all[r].at("joins").get<bool>()) {
        healing.replaced.push_back(static_cast<int>(r));
      }
      shrinks = shrinks || all[r].at("ranks").get<int>() > healing.ranks;
      shares_anew = shares_anew || all[r].at("shares_anew").get<bool>();
      own_changed =
          std::max(own_changed, all[r].at("own_changed").get<int64_t>());
    }
    if (shrinks && record_copies_) {
      give_up(
          "the job cannot go on with fewer ranks, of which each keeps copies "
          "of another host (HealedTrainingOptions::buddy_copies)");
    }
    gives_up_batch_ = false;
    std::exception_ptr failure;
    std::optional<std::string> kept;
    std::optional<std::string> updated;
    if (divided) {
      return_to_record(all, healing, failure);
    } else {
      const Status& from = share_state(all, healing);
      if (shrinks || shares_anew) {
        gives_up_batch_ = position_.share_samples(from);
      }
      kept = shrinks ? "" : from.at("kept").get<std::string>();
      updated = updated_items_ = from.at("updated_items").get<std::string>();
    }
    is_whole_ = true;
    may_go_back_ = false;
    if (!failure) take_own_record(kept, updated, own_changed, failure);
    if (shrinks) {
      record_->take_first(position_.steps(), position_.calls(), failure);
    }
    require_same_state(failure);
    own_changed_ = 0;
    if (record_copies_) record_copies_->start_again();
    if (state_copies_) state_copies_->start_again();
    copy_to_buddy();
    internal::run_reconfigured();
    record_->restore_wrappers();
    parameters_->set_loaded_gradients();
    healed_here_ = std::exchange(here_, position_.calls()) == position_.calls()
                       ? healed_here_ + 1
                       : 1;
    healing.took = std::chrono::duration_cast<std::chrono::microseconds>(
        Clock::now() - began);
    tell(healing, std::exchange(ranks_, healing.ranks));
    healings_.push_back(std::move(healing));
  }

  // Returns whether ranks of a lost host have got the records of those before
  // them.
  bool give_back_copies(const std::vector<Status>& all) {
    if (!record_copies_) return false;
    const auto those = [&](const char* what) {
      std::vector<int> ranks;
      for (size_t r = 0; r < all.size(); ++r) {
        if (all[r].at(what).get<bool>()) ranks.push_back(static_cast<int>(r));
      }
      return ranks;
    };
    // If a healing was interrupted, they may differ.
    const auto lost = those("lost");
    const auto lost_state =
        state_copies_ ? those("lost_state") : std::vector<int>();
    record_copies_->give_back(lost);
    if (state_copies_) state_copies_->give_back(lost_state);
    return !lost.empty() || !lost_state.empty();
  }

  // Objects that make collectives would wait for ones that other ranks do not
  // have.
  void require_same_objects(const std::vector<Status>& all) const {
    for (size_t r = 1; r < all.size(); ++r) {
      const auto count = all[r].at("objects").get<int>();
      const auto first = all[0].at("objects").get<int>();
      if (count == first) continue;
      give_up("rank 0 has " + std::to_string(first) +
              " objects that make collectives (DistributedDataParallel, "
              "SnapshotSaver and others), and rank " +
              std::to_string(r) + " has " + std::to_string(count) +
              "; make all of them before HealedTraining, so that a process "
              "that takes a place makes them, too");
    }
  }

  void require_same_buddies() const {
    internal::Agreement agreement(default_group());
    agreement.hold("HealedTrainingOptions::buddy_copies",
                   record_copies_ ? "true" : "false");
    if (const auto difference = agreement.compare()) {
      throw std::invalid_argument("HealedTraining: " + difference->words() +
                                  "; give all ranks the same");
    }
  }

  // A process that takes a place finds the loop in which the others are, and
  // can have everything that they keep.
  void require_healable(const std::vector<Status>& all,
                        const std::string& cause) const {
    for (const Status& one : all) {
      if (one.at("keeps_unrecorded").get<bool>()) {
        give_up(
            "gradients that are sparse, or have another dtype than their "
            "parameter, were accumulated over several calls of run(), and no "
            "rank has a copy of them");
      }
      if (one.at("healed_here").get<int>() >= kHealedInOneCall) {
        give_up("the same call of run() was healed " +
                std::to_string(kHealedInOneCall) +
                " times and not completed (" + cause + ")");
      }
      if (one.at("second_loop").get<bool>()) {
        give_up(
            "the ranks are in the second loop over next() since "
            "TrainingState::epochs_run has changed, and a process that takes a "
            "place would begin in the first; set epochs_run after each loop, "
            "or let run() iterate over the other loader");
      }
    }
  }

  // The state of the rank that has come farthest becomes that of all. Returns
  // the status of that rank.
  const Status& share_state(const std::vector<Status>& all, Healing& healing) {
    std::optional<size_t> source;
    for (size_t r = 0; r < all.size(); ++r) {
      if (!all[r].at("whole").get<bool>()) continue;
      if (!source || LoopPosition::is_ahead(all[r], all[*source])) source = r;
    }
    if (!source && healing.replaced.size() == all.size()) {
      give_up("all ranks were lost at once (" + healing.cause + ")");
    }
    if (!source) {
      give_up("no rank has a whole state any more (" + healing.cause +
              " while the state was being updated)");
    }
    const Status& from = all[*source];
    healing.state_from = static_cast<int>(*source);
    const auto is_behind = [&](const Status& one) {
      return !one.at("whole").get<bool>() ||
             one.at("steps") != from.at("steps");
    };
    const int rank = get_rank();
    const bool takes = is_behind(all[static_cast<size_t>(rank)]);
    if (rank == healing.state_from) {
      std::optional<Snapshot> own;
      for (size_t r = 0; r < all.size(); ++r) {
        if (!is_behind(all[r])) continue;
        if (!own) own = internal::without_samplers(state_);
        internal::send_snapshot(*own, static_cast<int>(r));
      }
    } else if (takes) {
      take_state(internal::receive_snapshot(healing.state_from));
    }
    if (!joins_ && !takes) reload_objects();
    if (joins_) position_.take_top_of(from);
    position_.take_steps_of(from);
    healing.repeated = !joins_ && position_.is_repeated();
    return from;
  }

  // The steps to whose state this rank can go back: in the middle of the
  // program only as far as that is within the call of run() in which it is.
  std::vector<int64_t> usable_records() const {
    if (!states_) return {};
    auto steps = states_->steps();
    if (joins_) return steps;
    const int64_t last = position_.steps();
    std::erase_if(steps, [&](int64_t one) {
      return one > last || one < last - (may_go_back_ ? 1 : 0);
    });
    return steps;
  }

  // Each rank gets its own state again, after the last step of which all ranks
  // have a record. `failure`: why this rank did not.
  void return_to_record(const std::vector<Status>& all, Healing& healing,
                        std::exception_ptr& failure) {
    std::set<int64_t> common;
    for (size_t r = 0; r < all.size(); ++r) {
      const auto its = all[r].at("records").get<std::set<int64_t>>();
      if (r == 0) common = its;
      std::erase_if(common, [&](int64_t one) { return !its.contains(one); });
    }
    if (common.empty()) {
      give_up("the ranks have no copies of their states after the same step (" +
              healing.cause + ")");
    }
    const int64_t steps = *common.rbegin();
    const auto calls_then = [&](const Status& one) {
      return one.at("calls").get<int64_t>() -
             (one.at("steps").get<int64_t>() - steps);
    };
    const Status* farthest = nullptr;
    for (const Status& one : all) {
      if (one.at("joins").get<bool>()) continue;
      if (!farthest || calls_then(*farthest) < calls_then(one)) farthest = &one;
    }
    healing.state_from = -1;
    if (joins_) position_.take_top_of(*farthest);
    position_.return_to(steps);
    position_.pass_over(calls_then(*farthest));
    healing.repeated = !joins_ && position_.is_repeated();
    try {
      const Snapshot own = states_->load(steps);
      if (joins_) position_.set_numbers_after({own.epochs_run, own.step});
    } catch (...) {
      failure = std::current_exception();
    }
  }

  // Generators, buffers and kept gradients become those with which this rank's
  // step began. `own_changed`: the last call of run() that has changed them on
  // any rank, from 1.
  void take_own_record(const std::optional<std::string>& kept,
                       const std::optional<std::string>& updated,
                       int64_t own_changed, std::exception_ptr& failure) {
    try {
      const bool found = record_->read(position_.steps(), kept, updated);
      if (found && own_changed > record_->calls()) {
        throw std::runtime_error(
            "HealedTraining: this rank was lost in a function that draws "
            "random numbers or changes buffers of a module, and no rank has "
            "what it would have left; do both in compute");
      }
      if (found || !joins_ || states_) return;
      TORCH_WARN(
          "lockstep: the process before in the place of rank ", get_rank(),
          " left no state of its random generators after step ",
          position_.steps(),
          ", so this rank draws other random numbers than it would have");
    } catch (...) {
      failure = std::current_exception();
    }
  }

  void take_state(const Snapshot& snapshot) {
    internal::TrainingLoad load(snapshot, state_, /*own=*/true);
    load.apply();
    load.apply_items();
    state_.metadata = snapshot.metadata;
  }

  // Lets objects forget what they know of a computation that is begun again.
  void reload_objects() {
    for (const auto& [name, item] : state_.items) {
      if (item.is_object() && !item.is_sampler()) {
        item.prepare_load(item.state_dict())();
      }
    }
  }

  // Whether ranks may have different values of a parameter that is not divided.
  bool steps_alone() const {
    const auto alone = [](const torch::optim::Optimizer* optimizer) {
      return optimizer && internal::has_state_of_each_rank(*optimizer);
    };
    return alone(state_.optimizer) ||
           std::ranges::any_of(state_.items, [&](const auto& item) {
             return item.second.is_per_rank() || alone(item.second.optimizer());
           });
  }

  // Throws on all ranks unless all have taken as many steps, and have the same
  // values of the parameters that are not divided, and of the optimizer's state
  // if the training is not divided. `failure`: why this rank has no state; null
  // if it has one. Collective.
  void require_same_state(const std::exception_ptr& failure) {
    internal::Xxh3 sum;
    const auto add = [&](const at::Tensor& tensor) {
      const auto bytes = internal::file_form(tensor);
      sum.add(bytes.data_ptr(), bytes.nbytes());
    };
    const auto add_parameters = [&](const torch::nn::Module& module) {
      for (const auto& parameter : module.parameters()) {
        if (!parameter.defined() || internal::layout_of(parameter)) continue;
        add(parameter.detach());
      }
    };
    add_parameters(*state_.model);
    for (const auto& [name, item] : state_.items) {
      if (item.module() != nullptr) add_parameters(*item.module());
    }
    if (state_.optimizer && !states_) {
      const auto optimizer = state_dict(*state_.optimizer, *state_.model);
      for (const auto& [number, values] : optimizer.state) {
        for (const auto& [name, value] : values) {
          if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
            add(*tensor);
          }
        }
      }
    }
    internal::Agreement agreement(default_group());
    agreement.fail(failure);
    agreement.hold("the number of steps", std::to_string(position_.steps()));
    agreement.hold("the checksum of parameters and optimizer state",
                   steps_alone() ? "" : internal::hex_of(sum.value()));
    std::optional<internal::Agreement::Difference> difference;
    try {
      difference = agreement.compare();
    } catch (const c10::DistError&) {
      throw;  // another rank is lost
    } catch (const std::exception&) {
      internal::tell_agent_heals(false);
      throw;
    }
    if (difference) {
      give_up("after a rank was replaced, " + difference->words());
    }
  }

  // One rank says what has happened.
  void tell(const Healing& healing, int ranks_before) const {
    const bool own = healing.state_from < 0;
    // A process that is new does not know when the rank failed.
    int teller = std::max(healing.state_from, 0);
    while (own && teller + 1 < healing.ranks &&
           std::ranges::count(healing.replaced, teller) > 0) {
      ++teller;
    }
    if (get_rank() != teller) return;
    std::string got;
    if (healing.ranks < ranks_before) {
      got = "the job goes on with " + std::to_string(healing.ranks) +
            (healing.ranks == 1 ? " rank" : " ranks") +
            (healing.replaced.empty() ? " and" : "; ");
    }
    if (!healing.replaced.empty()) {
      got += internal::name_numbers("rank", healing.replaced) + " got";
    }
    auto cause = healing.cause;
    if (cause.size() > kToldBytes) {
      cause.resize(std::min(cause.rfind(' ', kToldBytes), kToldBytes));
      cause += " ...";
    }
    TORCH_WARN("lockstep: healed in ", healing.took.count() / 1000,
               " ms: ", cause, "; ", got,
               own ? " the state of the process before"
                   : " the state of rank " + std::to_string(teller),
               " after ", position_.steps(), " steps",
               gives_up_batch_ ? "; the next step has other samples" : "");
  }

  // The one of this process whose training has not ended.
  inline static Work* living_ = nullptr;

  TrainingState& state_;
  const int exceptions_ = std::uncaught_exceptions();
  LoopPosition position_{state_};
  // Nothing if this job does not heal; then only position_ is used.
  std::optional<Generations> generations_{};
  std::optional<GenerationWatch> watch_{};  // if there are several nodes
  FileDescriptor memory_{};
  std::optional<internal::TrainedParameters> parameters_{};
  std::optional<RankRecord> record_{};
  // Only if the training is divided; in a process that joins also until it is
  // known whether it is.
  std::optional<StateRecords> states_{};
  // Only with HealedTrainingOptions::buddy_copies, on several hosts.
  static constexpr size_t kSlots = RankRecord::kSlots + StateRecords::kSlots;
  std::optional<BuddyCopies> record_copies_{};
  std::optional<BuddyCopies> state_copies_{};
  int ranks_ = 1;
  bool joins_ = false;    // this process has no state yet
  bool is_whole_ = true;  // no update has been begun and not completed
  // Whether an update of a divided training has ended, of which another rank
  // may have no record.
  bool may_go_back_ = false;
  bool gives_up_batch_ = false;  // in the last healing
  bool is_inside_ = false;       // a function of run()
  // The last call of run(), from 1, whose update or function has changed what
  // only this rank has; 0 if there is none since the last healing.
  int64_t own_changed_ = 0;
  // RankRecord::changed_items() of the last update.
  std::string updated_items_{};
  // How often the training was healed in the call of run() with this number.
  int healed_here_ = 0;
  int64_t here_ = -1;
  std::vector<Healing> healings_{};
};

HealedTraining::HealedTraining(TrainingState& state,
                               HealedTrainingOptions options)
    : work_(std::make_unique<Work>(state, options)) {}

HealedTraining::~HealedTraining() { work_->end(); }

bool HealedTraining::tell_next(const void* loader,
                               const std::function<void()>& begin_pass) {
  return work_->next_begins(loader, begin_pass);
}

void HealedTraining::tell_end() { work_->pass_ends(); }

void HealedTraining::run(const std::function<void()>& compute,
                         const std::function<void()>& update) {
  work_->run_step(compute, update);
}

void HealedTraining::run(const std::function<void()>& function) {
  work_->run_block(function);
}

const std::vector<Healing>& HealedTraining::healings() const {
  return work_->healings();
}

}  // namespace lockstep
