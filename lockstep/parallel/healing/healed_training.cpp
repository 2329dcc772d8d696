#include "lockstep/parallel/healing/healed_training.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/number_list.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/checkpoint/state_transfer.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/launcher_store.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/healing/place_record.h"
#include "lockstep/parallel/healing/state_records.h"
#include "lockstep/parallel/healing/trained_parameters.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep {
namespace {

using internal::Deadline;
using internal::FileDescriptor;
using internal::PlaceRecord;
using internal::StateRecords;
using Clock = std::chrono::steady_clock;

// How long a rank whose group failed waits for the launcher to say that a rank
// is replaced: if it knows that one is gone, and if it does not. The launcher
// waits for a standby process for 30 s, and then ends the attempt.
constexpr std::chrono::seconds kReplacedWithin{60};
constexpr std::chrono::seconds kLearnedWithin{10};
// How long the launcher's store may take for an answer.
constexpr std::chrono::milliseconds kStoreTimeout{5000};

// One slot of the place's memory is being written while the other two are
// whole. StateRecords has the next.
constexpr size_t kRecords = 3;

// How often a rank that waits looks whether another's training has ended.
constexpr std::chrono::seconds kLookEvery{1};
// After so many healings the ranks begin again from the snapshot.
constexpr int kHealedInOneCall = 8;
// The line about a healing has so much of what has failed.
constexpr size_t kToldBytes = 200;

// Returns the causes without what peers have said of them.
std::string own_words(std::string causes) {
  for (size_t at; (at = causes.find(": rank ")) != causes.npos;) {
    causes.erase(at, causes.find("; rank ", at) - at);
  }
  return causes;
}

// A newer generation was announced while this rank made its groups for another.
struct Superseded {};

}  // namespace

class HealedTraining::Work {
 public:
  explicit Work(TrainingState& state) : state_(state) {
    if (!internal::job_heals() || !is_the_first()) return;
    if (state_.model) parameters_.emplace(state_);
    require_healable();
    const auto socket = internal::get_env("LOCKSTEP_STORE");
    if (!socket) {
      throw std::invalid_argument(
          "HealedTraining: the ranks of this job do not meet at the launcher's "
          "store, which healing needs; leave out --worker-store and "
          "LOCKSTEP_WORKER_STORE");
    }
    store_ =
        c10::make_intrusive<internal::LauncherStore>(*socket, kStoreTimeout);
    memory_ = internal::take_place_memory();
    record_.emplace(memory_, 0, kRecords);
    take_top();
    after_ = numbers();
    ranks_ = get_world_size();
    if (internal::generation_joined() > 0) {
      places_ = notice_of(internal::generation_joined()).places;
    }
    if (places_.empty()) {
      places_.resize(static_cast<size_t>(ranks_));
      std::iota(places_.begin(), places_.end(), 0);
    }
    if (internal::groups_are_apart()) {
      states_.emplace(memory_, kRecords, state_);
      generation_ = internal::generation_joined() - 1;
      joins_ = true;
      meet(Clock::now(), nullptr);
      joins_ = false;
    } else if (is_divided_anywhere()) {
      states_.emplace(memory_, kRecords, state_);
      states_->write(steps_);
    }
    if (!record_->read(steps_)) write_record(steps_, Moment::begun);
    internal::tell_agent_heals(
        true, states_ ? "its state is divided over the ranks" : "");
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
    if (!store_ || std::uncaught_exceptions() > exceptions_) return;
    try {
      store_->set(internal::training_ended_key(), std::vector<uint8_t>{1});
    } catch (const c10::Error&) {
      // The launcher has gone.
    }
    internal::tell_agent_heals(false);
  }

  // All ranks have done what they were to do in a loop over the loader.
  void pass_ends() {
    loader_ = nullptr;
    if (store_) run_unit([this] { require_same_place(); });
  }

  // Calls `begin_pass` and returns true if another loop begins.
  bool next_begins(const void* loader,
                   const std::function<void()>& begin_pass) {
    require_outside("next()");
    if (loader_ != nullptr && loader_ != loader) {
      throw std::logic_error(
          "HealedTraining: next() was called with another loader before the "
          "loop over the first had ended; let run() iterate over the other");
    }
    if (resume_ && resume_->iteration == iteration_) {
      if (resume_->numbers) set_numbers(*resume_->numbers);
      load_samplers(resume_->samplers);
      resume_.reset();
      loader_ = nullptr;
    }
    const bool begins = loader_ == nullptr || epoch_ != sampler_epoch();
    ++iteration_;
    waits_for_next_ = false;
    // A batch that comes before the one before it was used belongs to it.
    if (begins || units_ != top_units_) {
      top_iteration_ = iteration_;
      top_units_ = units_;
      // A rank that takes a place, in an iteration whose step was made, has
      // this number from the others.
      if (units_ >= passed_over_) top_steps_ = steps_;
      take_top();
    }
    if (!begins) return false;
    loader_ = nullptr;
    begin_pass();
    loader_ = loader;
    epoch_ = sampler_epoch();
    if (first_loader_ == nullptr || first_loader_after_ != top_.epochs_run) {
      first_loader_ = loader;
      first_loader_after_ = top_.epochs_run;
      second_loop_ = false;
    }
    second_loop_ = second_loop_ || first_loader_ != loader;
    return true;
  }

  void run_step(const std::function<void()>& compute,
                const std::function<void()>& update) {
    const Inside inside(*this);
    if (!store_) {
      compute();
      update();
      return;
    }
    const LoopNumbers before = numbers();
    // The update of a step that is passed over has counted.
    if (!waits_for_next_ && units_ < passed_over_) set_numbers(after_);
    run_unit([&] {
      // If the update was interrupted, the numbers were perhaps counted.
      set_numbers(before);
      write_record(steps_, Moment::begun);
      const auto marks = parameters_->marks();
      compute();
      if (!states_) {
        parameters_->require_unchanged(marks);
        write_record(steps_ + 1, Moment::computed);
      }
      require_same_place();
      is_whole_ = false;
      parameters_->update_begins();
      update();
      parameters_->update_has_ended();
      if (!parameters_->kept().empty()) {
        write_record(steps_ + 1, Moment::begun);
      }
      if (states_) states_->write(steps_ + 1);
      is_whole_ = true;
      ++steps_;
      before_ = std::exchange(after_, numbers());
      may_go_back_ = states_.has_value();
    });
  }

  void run_block(const std::function<void()>& function) {
    const Inside inside(*this);
    if (!store_) return function();
    run_unit([&] {
      // FullyShard gathers parameters in an evaluation, too, and they may stay.
      if (states_) return function();
      parameters_->function_begins();
      function();
      parameters_->require_same_state();
    });
  }

  const std::vector<Healing>& healings() const { return healings_; }

 private:
  // The numbers of the loop, which a program counts by itself.
  struct LoopNumbers {
    int64_t epochs_run = -1;
    int64_t step = 0;
  };
  // The text that a rank sends to the others after one was lost.
  using Status = nlohmann::json;
  // How next() goes on with fewer ranks, once it was called so often.
  struct Resume {
    int64_t iteration = 0;
    nlohmann::json samplers = nlohmann::json::object();  // as item_json()
    std::optional<LoopNumbers> numbers{};                // nothing if they stay
  };

  // Lives as long as run() is called.
  class Inside {
   public:
    explicit Inside(Work& work) : work_(work) {
      work.require_outside("run()");
      work.is_inside_ = true;
      internal::refuses_new_groups() = work.store_ != nullptr;
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
    call_ends_ = units_ + 1;
    while (!waits_for_next_ && units_ < call_ends_) {
      if (units_ < passed_over_) {
        ++units_;
        return;
      }
      try {
        unit();
        ++units_;
        // No rank goes on before all have a record of the new state. If one is
        // lost here, the ranks agree by healing.
        if (may_go_back_) require_same_place();
        may_go_back_ = false;
      } catch (...) {
        heal(std::current_exception());
      }
    }
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
    at[0] = iteration_;
    at[1] = -iteration_;
    at[2] = units_;
    at[3] = -units_;
    all_reduce(places, {.op = ReduceOp::MAX});
    if (at[0] == -at[1] && at[2] == -at[3]) return;
    throw std::logic_error(
        "HealedTraining: the ranks are at different places of the program: "
        "this one in call " +
        std::to_string(units_) + " of run() and " + std::to_string(iteration_) +
        " of next(), others in calls " + std::to_string(-at[3]) + " to " +
        std::to_string(at[2]) + " and " + std::to_string(-at[1]) + " to " +
        std::to_string(at[0]) +
        "; what is done between these calls must follow from TrainingState, "
        "the loader and constants");
  }

  // ---- What this rank alone has ----

  static std::vector<at::Tensor> buffers_of(const torch::nn::Module& module) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& buffer : module.buffers()) {
      if (buffer.defined()) all.push_back(buffer.detach());
    }
    return all;
  }
  // The buffers of the modules beside TrainingState::model.
  std::vector<at::Tensor> buffers_of_items() const {
    std::vector<at::Tensor> all;
    for (const auto& [name, item] : state_.items) {
      if (!item.module()) continue;
      const auto more = buffers_of(*item.module());
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }

  // A record holds, in this order: whether the step was only begun, or
  // also computed; which gradients are kept and which were recorded
  // (trained_parameters.h); what wrappers know from one step to the next
  // (reconfigure.h); generators; buffers; gradients. If the training is
  // divided, there are only those of steps that were begun; states_ has all
  // else.
  enum class Moment : int64_t { begun, computed };

  std::vector<at::Tensor> recorded() const {
    std::vector<at::Tensor> all = {
        internal::generator_state(state_.model.get())};
    for (const auto& buffers :
         {buffers_of(*state_.model), buffers_of_items()}) {
      all.insert(all.end(), buffers.begin(), buffers.end());
    }
    return all;
  }

  void write_record(int64_t steps, Moment moment) {
    std::vector<at::Tensor> tensors = recorded();
    std::string marks;
    for (auto& gradient : parameters_->gradients_to_record(marks)) {
      tensors.push_back(std::move(gradient));
    }
    std::string kept = parameters_->kept();
    kept.resize(marks.size(), '0');
    const std::string memory = internal::memory_to_reconfigure();
    std::vector<PlaceRecord::Bytes> parts = {
        std::as_bytes(std::span(&moment, 1)), std::as_bytes(std::span(kept)),
        std::as_bytes(std::span(marks)), std::as_bytes(std::span(memory))};
    for (auto& tensor : tensors) {
      tensor = internal::file_form(tensor);
      parts.push_back(
          {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    }
    record_->write(steps, parts);
  }

  // Returns whether there is a record of the state that this rank needs now.
  // `kept`: the gradients that the rank keeps from which the state came; if
  // each rank has its own, its record knows.
  bool read_record(std::string kept) {
    const auto record = record_->read(steps_);
    if (!record) {
      load_gradients(kept, "", {});
      return false;
    }
    std::string marks(parameters_->count(), '0');
    std::string recorded_kept = marks;
    memory_of_wrappers_ = internal::memory_to_reconfigure();
    const auto all = recorded();
    size_t bytes =
        sizeof(Moment) + 2 * marks.size() + memory_of_wrappers_.size();
    for (const auto& tensor : all) bytes += tensor.nbytes();
    const std::byte* from = record->data();
    const auto read = [&](void* to, size_t count) {
      if (count != 0) std::memcpy(to, from, count);
      from += count;
    };
    Moment moment{};
    if (record->size() >= bytes) {
      read(&moment, sizeof moment);
      read(recorded_kept.data(), marks.size());
      read(marks.data(), marks.size());
      read(memory_of_wrappers_.data(), memory_of_wrappers_.size());
      bytes += parameters_->bytes_of(marks);
    }
    if (record->size() != bytes) {
      throw std::runtime_error(
          "HealedTraining: the process before in this rank's place had other "
          "buffers in its module: " +
          std::to_string(record->size()) + " bytes with the generators, not " +
          std::to_string(bytes) + "; all processes must make the same module");
    }
    const auto take = [&](const at::Tensor& like) {
      auto saved = at::empty(like.sizes(), like.options().device(at::kCPU));
      read(saved.data_ptr(), saved.nbytes());
      return saved;
    };
    const at::NoGradGuard no_grad;
    internal::set_generator_state(take(all[0]), state_.model.get());
    for (auto& buffer : buffers_of(*state_.model)) buffer.copy_(take(buffer));
    // Averages of weights change theirs when they are updated: then the record
    // is too old, and the rank that has updated has given its own.
    for (auto& buffer : buffers_of_items()) {
      const at::Tensor saved = take(buffer);
      if (moment == Moment::begun) buffer.copy_(saved);
    }
    load_gradients(states_ ? recorded_kept : kept, marks, take);
    internal::set_memory_to_reconfigure(memory_of_wrappers_);
    return true;
  }

  // Throws std::runtime_error if this rank lacks gradients that are kept.
  void load_gradients(
      const std::string& kept, const std::string& marks,
      const std::function<at::Tensor(const at::Tensor& like)>& take) {
    if (parameters_->load_gradients(kept, marks, take)) return;
    throw std::runtime_error(
        "HealedTraining: this rank has no copy of the gradients that were "
        "accumulated before step " +
        std::to_string(steps_));
  }

  LoopNumbers numbers() const { return {state_.epochs_run, state_.step}; }
  void set_numbers(const LoopNumbers& numbers) {
    state_.epochs_run = numbers.epochs_run;
    state_.step = numbers.step;
  }

  // Returns the epoch that the sampler has selected; nothing if it has none, or
  // if there are several samplers.
  std::optional<int64_t> sampler_epoch() const {
    const StateItem* sampler = nullptr;
    for (const auto& [name, item] : state_.items) {
      if (!item.is_sampler()) continue;
      if (sampler != nullptr) return std::nullopt;
      sampler = &item;
    }
    if (sampler == nullptr) return std::nullopt;
    const ItemState state = sampler->state_dict();
    const auto* values = state.values.as<StateTree::Dict>();
    const auto* epoch = values != nullptr ? values->find("epoch") : nullptr;
    const auto* number = epoch != nullptr ? epoch->as<int64_t>() : nullptr;
    return number != nullptr ? std::optional(*number) : std::nullopt;
  }

  void take_top() {
    top_ = numbers();
    top_sampler_state_ = state_.sampler_state;
    top_samplers_.clear();
    for (const auto& [name, item] : state_.items) {
      if (item.is_sampler()) top_samplers_[name] = item.state_dict();
    }
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
      without_samplers();
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
    while (true) {
      const auto notice = await_generation(failure);
      try {
        reconfigure({.uuid = "heal-" + std::to_string(generation_),
                     .members = members_of(notice),
                     .look = [this] { look(); }});
        agree(began, notice.cause);
        return;
      } catch (const Superseded&) {
      } catch (const LostGroupError&) {
        internal::tell_agent_heals(false);
        throw;
      } catch (const c10::DistError&) {
        failure = std::current_exception();
      }
    }
  }

  internal::GenerationNotice notice_of(int generation) {
    return internal::generation_notice_of(
        store_->get_to_str(internal::generation_key(generation)));
  }

  // Returns the ranks with the places that are left, as this process has
  // numbered them; none if all are.
  std::vector<int> members_of(const internal::GenerationNotice& notice) const {
    std::vector<int> members;
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      if (std::ranges::count(notice.places, places_[rank]) > 0) {
        members.push_back(static_cast<int>(rank));
      }
    }
    return members;
  }

  // Ends a wait for a generation that will never be complete.
  void look() {
    if (is_superseded()) throw Superseded();
    if (joins_ && store_->check({internal::training_ended_key()})) {
      throw std::runtime_error(
          "HealedTraining: this process takes the place of a rank that died, "
          "and another rank has ended its training meanwhile; all ranks begin "
          "again from the last snapshot");
    }
  }

  bool comes_within(const std::string& key, std::chrono::milliseconds time) {
    try {
      store_->wait({key}, time);
      return true;
    } catch (const c10::DistError&) {
      return false;
    }
  }

  // Whether the training of a rank has ended, or the launcher has gone.
  bool has_ended() {
    try {
      return store_->check({internal::training_ended_key()});
    } catch (const c10::DistError&) {
      return true;
    }
  }

  bool is_superseded() {
    return store_->check({internal::generation_key(generation_ + 1)});
  }

  // Waits for the next generation, and takes the newest.
  internal::GenerationNotice await_generation(
      const std::exception_ptr& failure) {
    const bool knows = !failure || internal::groups_are_apart() ||
                       !default_group()->failed_peers().empty();
    const auto deadline =
        Deadline::after(knows ? kReplacedWithin : kLearnedWithin);
    const std::string next = internal::generation_key(generation_ + 1);
    while (!comes_within(next, std::min<std::chrono::milliseconds>(
                                   deadline.remaining(), kLookEvery))) {
      if (!deadline.expired() && !has_ended()) continue;
      if (failure) std::rethrow_exception(failure);
      throw std::runtime_error(
          "HealedTraining: this process takes the place of a rank that died, "
          "and the launcher has not announced it");
    }
    do {
      ++generation_;
    } while (is_superseded());
    return notice_of(generation_);
  }

  Status status() const {
    Status samplers = Status::object();
    Status samplers_now = Status::object();
    for (const auto& [name, state] : top_samplers_) {
      samplers[name] = internal::item_json(name, state.values);
      samplers_now[name] =
          internal::item_json(name, state_.items.at(name).state_dict().values);
    }
    return {{"joins", joins_},
            {"ranks", ranks_},
            {"in_loop", loader_ != nullptr},
            {"top_steps", top_steps_},
            {"samplers_now", std::move(samplers_now)},
            {"shares_anew", resume_.has_value()},
            {"whole", is_whole_ && !joins_},
            {"steps", steps_},
            {"units", units_},
            {"divided", states_.has_value() && !joins_},
            {"records", usable_records()},
            {"objects", internal::objects_to_reconfigure()},
            {"kept", parameters_->kept()},
            {"keeps_unrecorded", parameters_->keeps_unrecorded()},
            {"second_loop", second_loop_},
            {"healed_here", here_ == units_ ? healed_here_ : 0},
            {"iteration", iteration_},
            {"top_iteration", top_iteration_},
            {"top_units", top_units_},
            {"top", {top_.epochs_run, top_.step}},
            {"after", {after_.epochs_run, after_.step}},
            {"sampler_state", top_sampler_state_},
            {"samplers", std::move(samplers)}};
  }

  // Collective over the new generation: decides which state counts, and lets
  // each rank have it.
  void agree(Clock::time_point began, const std::string& cause) {
    const auto all = all_gather_object(status());
    require_same_objects(all);
    require_healable(all, cause);
    Healing healing{.cause = own_words(cause),
                    .ranks = static_cast<int>(all.size())};
    bool shrinks = false;
    bool shares_anew = false;
    for (size_t r = 0; r < all.size(); ++r) {
      if (all[r].at("joins").get<bool>()) {
        healing.replaced.push_back(static_cast<int>(r));
      }
      shrinks = shrinks || all[r].at("ranks").get<int>() > healing.ranks;
      shares_anew = shares_anew || all[r].at("shares_anew").get<bool>();
    }
    const bool divided = std::ranges::any_of(
        all, [](const Status& one) { return one.at("divided").get<bool>(); });
    if (!divided) states_.reset();
    gives_up_batch_ = false;
    std::exception_ptr failure;
    std::string kept;
    if (divided) {
      return_to_record(all, healing, failure);
    } else {
      const Status& from = share_state(all, healing);
      if (shrinks || shares_anew) share_samples(from);
      if (!shrinks) from.at("kept").get_to(kept);
    }
    is_whole_ = true;
    may_go_back_ = false;
    if (!failure) take_own_record(kept, failure);
    if (shrinks) take_first_record(failure);
    require_same_state(failure);
    internal::run_reconfigured();
    internal::set_memory_to_reconfigure(memory_of_wrappers_);
    parameters_->set_loaded_gradients();
    healed_here_ =
        std::exchange(here_, units_) == units_ ? healed_here_ + 1 : 1;
    healing.took = std::chrono::duration_cast<std::chrono::microseconds>(
        Clock::now() - began);
    tell(healing, std::exchange(ranks_, healing.ranks));
    healings_.push_back(std::move(healing));
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
            "TrainingState::epochs_run has changed, with another loader than "
            "in the first, and a process that takes a place would begin in the "
            "first; let run() iterate over the other loader");
      }
    }
  }

  // The state of the rank that has come farthest becomes that of all. Returns
  // the status of that rank.
  const Status& share_state(const std::vector<Status>& all, Healing& healing) {
    const auto place = [](const Status& one) {
      return std::pair(one.at("steps").get<int64_t>(),
                       one.at("units").get<int64_t>());
    };
    std::optional<size_t> source;
    for (size_t r = 0; r < all.size(); ++r) {
      if (!all[r].at("whole").get<bool>()) continue;
      if (!source || place(all[*source]) < place(all[r])) source = r;
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
    healing.repeated = !joins_ && !takes;
    if (rank == healing.state_from) {
      for (size_t r = 0; r < all.size(); ++r) {
        if (is_behind(all[r])) {
          internal::send_snapshot(without_samplers(), static_cast<int>(r));
        }
      }
    } else if (takes) {
      take_state(internal::receive_snapshot(healing.state_from));
    }
    if (healing.repeated) reload_objects();
    if (joins_) take_top_of(from);
    steps_ = from.at("steps").get<int64_t>();
    passed_over_ = std::max(passed_over_, from.at("units").get<int64_t>());
    from.at("after").at(0).get_to(after_.epochs_run);
    from.at("after").at(1).get_to(after_.step);
    return from;
  }

  // The job goes on with fewer ranks, as one that has loaded a snapshot of the
  // rank `from`: these ranks share the samples that are left when next() is
  // called the next time. If no step was made with the batch that `from` has
  // got last, that is at once: the batch is given up, with the calls of run()
  // that were made with it.
  void share_samples(const Status& from) {
    if (!from.at("in_loop").get<bool>()) return;
    const bool has_stepped = from.at("steps") != from.at("top_steps");
    const auto top = from.at("top_iteration").get<int64_t>();
    resume_ =
        Resume{.iteration =
                   has_stepped ? from.at("iteration").get<int64_t>() : top - 1};
    const Status& samplers = from.at("samplers_now");
    for (const auto& [name, now] : samplers.items()) {
      // Another sampler than that of the loop stays where it is.
      const Status& before = from.at("samplers").at(name);
      if (samplers.size() > 1 && now == before) continue;
      resume_->samplers[name] = has_stepped ? now : before;
    }
    if (has_stepped) return;
    from.at("top").at(0).get_to(resume_->numbers.emplace().epochs_run);
    from.at("top").at(1).get_to(resume_->numbers->step);
    from.at("top_units").get_to(passed_over_);
    if (iteration_ < top) return;
    // In this iteration; a rank in the one before goes on with that, and one
    // that joins is at the top already.
    iteration_ = top - 1;
    units_ = passed_over_;
    waits_for_next_ = true;
    gives_up_batch_ = true;
  }

  void load_samplers(const nlohmann::json& samplers) {
    for (const auto& [name, values] : samplers.items()) {
      const auto item = state_.items.find(name);
      if (item == state_.items.end()) continue;
      item->second.prepare_load({.values = internal::item_values_of(values)})();
    }
  }

  // Gives the ranks the buffers and generators that load_snapshot() gives to
  // another number of ranks than has saved: the buffers of the first rank, and
  // generators that are seeded from that rank's. Collective.
  void take_first_record(std::exception_ptr& failure) {
    for (const auto& buffers :
         {buffers_of(*state_.model), buffers_of_items()}) {
      for (const at::Tensor& buffer : buffers) broadcast(buffer, 0);
    }
    auto first = internal::generator_state(state_.model.get());
    broadcast(first, 0);
    if (failure) return;
    try {
      const auto ranks = static_cast<size_t>(get_world_size());
      const auto own = internal::generator_state_for(
          "the memory of rank 0", /*saved=*/ranks + 1,
          [&](size_t) { return first; }, static_cast<size_t>(get_rank()), ranks,
          state_.model.get());
      internal::set_generator_state(*own, state_.model.get());
      write_record(steps_, Moment::begun);
    } catch (...) {
      failure = std::current_exception();
    }
  }

  // The steps to whose state this rank can go back: in the middle of the
  // program only as far as that is within the call of run() in which it is.
  std::vector<int64_t> usable_records() const {
    if (!states_) return {};
    auto steps = states_->steps();
    if (joins_) return steps;
    std::erase_if(steps, [this](int64_t one) {
      return one > steps_ || one < steps_ - (may_go_back_ ? 1 : 0);
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
    const auto units_then = [&](const Status& one) {
      return one.at("units").get<int64_t>() -
             (one.at("steps").get<int64_t>() - steps);
    };
    const Status* farthest = nullptr;
    for (const Status& one : all) {
      if (one.at("joins").get<bool>()) continue;
      if (!farthest || units_then(*farthest) < units_then(one)) farthest = &one;
    }
    healing.state_from = -1;
    if (joins_) {
      take_top_of(*farthest);
    } else if (steps < steps_) {
      --units_;
      after_ = before_;
    }
    steps_ = steps;
    passed_over_ = std::max(passed_over_, units_then(*farthest));
    healing.repeated = !joins_ && units_ < call_ends_ && units_ >= passed_over_;
    try {
      const Snapshot own = states_->load(steps);
      if (joins_) after_ = {own.epochs_run, own.step};
    } catch (...) {
      failure = std::current_exception();
    }
  }

  // Generators, buffers and kept gradients become those with which this rank's
  // step began.
  void take_own_record(const std::string& kept, std::exception_ptr& failure) {
    try {
      if (read_record(kept) || !joins_ || states_) return;
      TORCH_WARN(
          "lockstep: the process before in the place of rank ", get_rank(),
          " left no state of its random generators after step ", steps_,
          ", so this rank draws other random numbers than it would have");
    } catch (...) {
      failure = std::current_exception();
    }
  }

  Snapshot without_samplers() const {
    Snapshot snapshot =
        internal::snapshot_of_training(state_, /*objects=*/true);
    for (const auto& [name, item] : state_.items) {
      if (item.is_sampler()) snapshot.items.erase(name);
    }
    return snapshot;
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

  // This rank goes to the top of the loop in which `from` is.
  void take_top_of(const Status& from) {
    from.at("top").at(0).get_to(state_.epochs_run);
    from.at("top").at(1).get_to(state_.step);
    from.at("sampler_state").get_to(state_.sampler_state);
    load_samplers(from.at("samplers"));
    from.at("top_steps").get_to(top_steps_);
    // The next call of next() adds one. If the others have not called next()
    // yet, this rank begins at the top of the program.
    iteration_ =
        std::max<int64_t>(0, from.at("top_iteration").get<int64_t>() - 1);
    units_ = from.at("top_units").get<int64_t>();
    // Calls of run() that come before next() were completed.
    waits_for_next_ = from.at("iteration").get<int64_t>() > 0;
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
    for (const auto& parameter : state_.model->parameters()) {
      if (!parameter.defined() || internal::layout_of(parameter)) continue;
      add(parameter.detach());
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
    agreement.hold("the number of steps", std::to_string(steps_));
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
    const int teller = healing.state_from;
    const bool own = teller < 0;
    if (get_rank() != std::max(teller, 0)) return;
    std::string got;
    if (!healing.replaced.empty()) {
      got = internal::name_numbers("rank", healing.replaced) + " got";
    }
    if (healing.ranks < ranks_before) {
      got = (got.empty() ? "the job goes on with "
                         : got + ", and the job goes on with ") +
            std::to_string(healing.ranks) +
            (healing.ranks == 1 ? " rank and" : " ranks and");
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
               " after ", steps_, " steps",
               gives_up_batch_ ? "; the next step has other samples" : "");
  }

  // The one of this process whose training has not ended.
  inline static Work* living_ = nullptr;

  TrainingState& state_;
  const int exceptions_ = std::uncaught_exceptions();
  // Null if this job does not heal; then nothing else here is used.
  c10::intrusive_ptr<internal::LauncherStore> store_{};
  FileDescriptor memory_{};
  std::optional<PlaceRecord> record_{};
  std::optional<internal::TrainedParameters> parameters_{};
  std::string memory_of_wrappers_{};  // as it was recorded
  // Only if the training is divided; in a process that joins also until it is
  // known whether it is.
  std::optional<StateRecords> states_{};
  int generation_ = 0;
  // The places (worker/healing_place.h) of the ranks, by the numbers that they
  // had when this process made its groups; and how many ranks there are now.
  std::vector<int> places_{};
  int ranks_ = 1;
  bool joins_ = false;     // this process has no state yet
  bool is_whole_ = true;   // no update has been begun and not completed
  int64_t steps_ = 0;      // calls of run(compute, update), completed
  int64_t units_ = 0;      // calls of run(), completed
  int64_t iteration_ = 0;  // calls of next()
  int64_t call_ends_ = 0;  // units_ after the call of run() in progress
  // Whether an update of a divided training has ended, of which another rank
  // may have no record.
  bool may_go_back_ = false;
  // Until units_ is this, calls of run() are passed over.
  int64_t passed_over_ = 0;
  std::optional<Resume> resume_{};
  // Whether calls of run() return at once, until next() is called; and whether
  // that is because the batch was given up.
  bool waits_for_next_ = false;
  bool gives_up_batch_ = false;
  // Over which a loop runs: next() was called and has not returned null.
  const void* loader_ = nullptr;
  // The sampler's epoch in that loop. If the program leaves the loop and
  // selects another one, the next call begins another loop.
  std::optional<int64_t> epoch_{};
  // Over which the first loop ran since epochs_run has changed, and whether
  // this one runs over another.
  const void* first_loader_ = nullptr;
  int64_t first_loader_after_ = 0;
  bool second_loop_ = false;
  // As of the last call of next() before which run() was called, before it took
  // a batch.
  int64_t top_iteration_ = 0;
  int64_t top_units_ = 0;
  int64_t top_steps_ = 0;
  LoopNumbers top_{};
  SamplerState top_sampler_state_{};
  std::map<std::string, ItemState> top_samplers_{};
  LoopNumbers after_{};     // the last step
  LoopNumbers before_{};    // the step before it
  bool is_inside_ = false;  // a function of run()
  // How often the training was healed in the call of run() with this number.
  int healed_here_ = 0;
  int64_t here_ = -1;
  std::vector<Healing> healings_{};
};

HealedTraining::HealedTraining(TrainingState& state)
    : work_(std::make_unique<Work>(state)) {}

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
