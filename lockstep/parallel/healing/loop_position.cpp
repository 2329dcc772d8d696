#include "lockstep/parallel/healing/loop_position.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/state_items.h"

namespace lockstep::internal {

LoopPosition::LoopPosition(TrainingState& state) : state_(state) {
  take_top();
  after_ = numbers();
}

void LoopPosition::set_numbers(const Numbers& numbers) {
  state_.epochs_run = numbers.epochs_run;
  state_.step = numbers.step;
}

bool LoopPosition::next_begins(const void* loader,
                               const std::function<void()>& begin_pass) {
  if (loader_ != nullptr && loader_ != loader) {
    throw std::logic_error(
        "HealedTraining: next() was called with another loader before the "
        "loop over the first had ended; let run() iterate over the other");
  }
  const bool resumes = resume_ && resume_->iteration == iteration_;
  if (resumes) {
    // Unless the program has left the loop and has selected another epoch.
    if (resume_->epoch == sampler_epoch()) {
      if (resume_->numbers) set_numbers(*resume_->numbers);
      load_samplers(resume_->samplers);
    }
    resume_.reset();
    loader_ = nullptr;
  }
  const bool begins = loader_ == nullptr || epoch_ != sampler_epoch();
  ++iteration_;
  waits_for_next_ = false;
  // A batch that comes before the one before it was used belongs to it.
  if (begins || calls_ != top_calls_) {
    top_iteration_ = iteration_;
    top_calls_ = calls_;
    // A rank that takes a place, in an iteration whose step was made, has this
    // number from the others.
    if (calls_ >= passed_over_) top_steps_ = steps_;
    take_top();
  }
  if (!begins) return false;
  loader_ = nullptr;
  begin(begin_pass);
  loader_ = loader;
  epoch_ = sampler_epoch();
  if (first_loader_ == nullptr || first_loader_after_ != top_.epochs_run) {
    first_loader_ = loader;
    first_loader_after_ = top_.epochs_run;
    second_loop_ = false;
  } else if (first_loader_ != loader || (last_epoch_ == epoch_ && !resumes)) {
    second_loop_ = true;
  }
  last_epoch_ = epoch_;
  return true;
}

// The first batch is taken at once, and the state of a sampler that has ended
// its pass means that nothing is left.
void LoopPosition::begin(const std::function<void()>& begin_pass) {
  std::map<std::string, ItemState> next;
  for (const auto& [name, item] : state_.items) {
    if (item.is_sampler()) next[name] = item.next_pass_state();
  }
  begin_pass();
  const auto now = states_of_samplers();
  for (auto& [name, state] : next) {
    // Another loop's sampler stays where it is.
    const bool is_of_loop =
        next.size() == 1 || item_json(name, now.at(name).values) !=
                                item_json(name, top_samplers_.at(name).values);
    if (is_of_loop) top_samplers_[name] = std::move(state);
  }
}

bool LoopPosition::must_run() {
  if (waits_for_next_ || calls_ >= call_ends_) return false;
  if (calls_ >= passed_over_) return true;
  ++calls_;
  was_passed_over_ = true;
  return false;
}

void LoopPosition::step_has_ended() {
  ++steps_;
  before_ = std::exchange(after_, numbers());
}

// Returns the epoch that the sampler has selected; nothing if it has none, or
// if there are several samplers.
std::optional<int64_t> LoopPosition::sampler_epoch() const {
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

void LoopPosition::take_top() {
  top_ = numbers();
  top_sampler_state_ = state_.sampler_state;
  top_samplers_ = states_of_samplers();
}

std::map<std::string, ItemState> LoopPosition::states_of_samplers() const {
  std::map<std::string, ItemState> states;
  for (const auto& [name, item] : state_.items) {
    if (item.is_sampler()) states[name] = item.state_dict();
  }
  return states;
}

void LoopPosition::load_samplers(const nlohmann::json& samplers) {
  for (const auto& [name, values] : samplers.items()) {
    const auto item = state_.items.find(name);
    if (item == state_.items.end()) continue;
    item->second.prepare_load({.values = item_values_of(values)})();
  }
}

// ---- Where the others are ----

void LoopPosition::add_to(Status& status) const {
  Status samplers = Status::object();
  Status samplers_now = Status::object();
  for (const auto& [name, state] : top_samplers_) {
    samplers[name] = item_json(name, state.values);
  }
  for (const auto& [name, state] : states_of_samplers()) {
    samplers_now[name] = item_json(name, state.values);
  }
  const bool is_inside = calls_ < call_ends_;  // a call of run()
  status.update({{"in_loop", loader_ != nullptr},
                 {"epoch", epoch_ ? Status(*epoch_) : Status()},
                 {"second_loop", second_loop_},
                 {"shares_anew", resume_.has_value()},
                 {"steps", steps_},
                 {"calls", is_inside ? std::max(calls_, passed_over_) : calls_},
                 {"iteration", iteration_},
                 {"after", {after_.epochs_run, after_.step}},
                 {"samplers_now", std::move(samplers_now)},
                 {"top_steps", top_steps_},
                 {"top_calls", top_calls_},
                 {"top_iteration", top_iteration_},
                 {"top", {top_.epochs_run, top_.step}},
                 {"sampler_state", top_sampler_state_},
                 {"samplers", std::move(samplers)}});
}

bool LoopPosition::is_ahead(const Status& one, const Status& other) {
  const auto place = [](const Status& of) {
    return std::tuple(of.at("steps").get<int64_t>(),
                      of.at("calls").get<int64_t>(),
                      of.at("iteration").get<int64_t>());
  };
  return place(other) < place(one);
}

void LoopPosition::take_top_of(const Status& from) {
  from.at("top").at(0).get_to(state_.epochs_run);
  from.at("top").at(1).get_to(state_.step);
  from.at("sampler_state").get_to(state_.sampler_state);
  load_samplers(from.at("samplers"));
  from.at("top_steps").get_to(top_steps_);
  // The next call of next() adds one. If the others have not called next()
  // yet, this rank begins at the top of the program.
  iteration_ =
      std::max<int64_t>(0, from.at("top_iteration").get<int64_t>() - 1);
  from.at("top_calls").get_to(calls_);
  // Calls of run() that come before next() were completed.
  waits_for_next_ = from.at("top_iteration").get<int64_t>() > 0;
}

void LoopPosition::take_steps_of(const Status& from) {
  from.at("steps").get_to(steps_);
  from.at("after").at(0).get_to(after_.epochs_run);
  from.at("after").at(1).get_to(after_.step);
  pass_over(from.at("calls").get<int64_t>());
}

void LoopPosition::return_to(int64_t steps) {
  if (steps < steps_) {
    --calls_;
    after_ = before_;
  }
  steps_ = steps;
}

void LoopPosition::pass_over(int64_t calls) {
  passed_over_ = std::max(passed_over_, calls);
}

bool LoopPosition::share_samples(const Status& from) {
  if (!from.at("in_loop").get<bool>()) return false;
  const bool has_stepped = from.at("steps") != from.at("top_steps");
  const auto top = from.at("top_iteration").get<int64_t>();
  resume_ = Resume{
      .iteration = has_stepped ? from.at("iteration").get<int64_t>() : top - 1};
  if (!from.at("epoch").is_null()) {
    resume_->epoch = from.at("epoch").get<int64_t>();
  }
  const Status& samplers = from.at("samplers_now");
  for (const auto& [name, now] : samplers.items()) {
    // Another sampler than that of the loop stays where it is.
    const Status& before = from.at("samplers").at(name);
    if (samplers.size() > 1 && now == before) continue;
    resume_->samplers[name] = has_stepped ? now : before;
  }
  if (has_stepped) return false;
  from.at("top").at(0).get_to(resume_->numbers.emplace().epochs_run);
  from.at("top").at(1).get_to(resume_->numbers->step);
  from.at("top_calls").get_to(passed_over_);
  if (iteration_ < top) return false;
  // In this iteration; a rank in the one before goes on with that, and one
  // that joins is at the top already.
  iteration_ = top - 1;
  calls_ = passed_over_;
  waits_for_next_ = true;
  return true;
}

}  // namespace lockstep::internal
