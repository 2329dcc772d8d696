#include "tests/parallel/fuzz/draw_events.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::internal::fuzz {
namespace {

// Slots of losses; the numbers are in the order of the forwards.
constexpr int kFirst = 0;
constexpr int kSecond = 1;
constexpr int kAside = 8;    // forwards besides the step's own
constexpr int kDropped = 9;  // forwards that get no backward

class EventDraw {
 public:
  EventDraw(Case& fuzz_case, const std::set<Trait>& traits, Dice& dice)
      : case_(fuzz_case), traits_(traits), dice_(dice) {}

  void draw() {
    size_t trunk = 0;
    while (trunk < case_.ops.size() && case_.ops[trunk].part == Part::trunk) {
      ++trunk;
    }
    case_.throwing_op = dice_.below(trunk);
    if (has(Trait::freezing)) freezable_ = draw_freezable();
    // Long enough to use buckets again that were dropped.
    const bool is_long = freezable_.size() > 1 && dice_.percent(40);
    const int steps = static_cast<int>(3 + dice_.below(3)) + (is_long ? 5 : 0);
    own_pattern_ = dice_;
    for (step_ = 0; step_ < steps; ++step_) draw_step();
  }

 private:
  bool has(Trait trait) const { return traits_.contains(trait); }
  bool sometimes(Trait trait, size_t chance) {
    return has(trait) && dice_.percent(chance);
  }

  Event& add(EventKind kind) {
    return case_.events.emplace_back(
        Event{.kind = kind, .step = step_, .use_step = step_});
  }

  Event& forward(int slot, int wrapper = 0, bool synchronises = true) {
    auto& event = add(EventKind::forward);
    event.slot = slot;
    event.wrapper = wrapper;
    event.synchronises = synchronises;
    event.batch = batch_++;
    if (has(Trait::penalty)) {
      event.has_penalty = has(Trait::static_graph) || dice_.percent(70);
    }
    return event;
  }

  void backward(std::vector<int> slots) {
    if (sometimes(Trait::gradient, 60)) {
      auto& event = add(EventKind::gradient);
      event.slots = slots;
      event.is_on_rank_zero_only = dice_.percent(40);
    }
    if (sometimes(Trait::backward_twice, 60)) {
      auto& event = add(EventKind::backward);
      event.slots = slots;
      event.retains_graph = true;
    }
    std::vector<int> penalties;
    for (int slot : slots) {
      if (apart_.contains(slot)) penalties.push_back(slot + kPenalties);
    }
    if (!penalties.empty()) {
      if (dice_.percent(50)) std::swap(slots, penalties);
      auto& event = add(EventKind::backward);
      event.slots = penalties;
      event.retains_graph = true;
    }
    add(EventKind::backward).slots = std::move(slots);
  }

  // Adds a forward that trains.
  void own_forward(int slot, int wrapper = 0, bool synchronises = true) {
    auto& event = forward(slot, wrapper, synchronises);
    apart_.erase(slot);
    // The two backwards leave out different parameters.
    if (event.has_penalty && case_.options.find_unused_parameters &&
        !case_.options.skip_all_reduce_unused_params &&
        case_.options.stepping == Stepping::plain && dice_.percent(60)) {
      event.keeps_penalty_apart = true;
      apart_.insert(slot);
    }
    if (slot == kSecond && dice_.percent(50)) ++event.use_step;
  }

  // Skips the first operation: the wrapper must still train.
  std::vector<size_t> draw_freezable() {
    std::vector<size_t> possible;
    for (size_t i = 0; i < case_.parameters.size(); ++i) {
      const auto& first = case_.ops[0].parameters;
      if (std::ranges::find(first, i) == first.end() &&
          !case_.parameters[i].is_frozen) {
        possible.push_back(i);
      }
    }
    // Removes some in any order, and leaves up to three, so there are eight
    // sets.
    while (possible.size() > 3 || (possible.size() > 1 && dice_.percent(25))) {
      possible.erase(possible.begin() +
                     static_cast<std::ptrdiff_t>(dice_.below(possible.size())));
    }
    return possible;
  }

  void draw_step() {
    batch_ = 0;
    const bool changes = step_ > 0 && sometimes(Trait::held_gradients, 60);
    if (changes) {
      add(EventKind::change_gradients).change =
          dice_.percent(50) ? Change::rebound
                            : static_cast<Change>(1 + dice_.below(3));
    }
    if (!sometimes(Trait::no_zero_grad, 60) &&
        !(changes && dice_.percent(60))) {
      add(EventKind::zero_grad).sets_to_none =
          !sometimes(Trait::zero_grad_false, 70);
    }
    for (size_t parameter : freezable_) {
      auto& event = add(EventKind::set_frozen);
      event.parameter = parameter;
      event.is_frozen =
          freezable_.size() == 1 ? step_ % 2 == 1 : dice_.percent(50);
    }
    if (step_ > 0 && sometimes(Trait::wrap_again, 60)) {
      add(EventKind::wrap_again).wrapper = other_wrapper_sometimes();
    }
    if (step_ == 0 && sometimes(Trait::forward_on_rank_zero, 50)) {
      forward(kDropped).is_on_rank_zero_only = true;
    }
    if (step_ > 0 && sometimes(Trait::round_trip, 60)) {
      add(EventKind::round_trip);
    }
    draw_forwards_beside();
    draw_exception();
    const bool is_plain = has(Trait::plain_module) ||
                          has(Trait::plain_on_rank_zero) ||
                          has(Trait::plain_put_back);
    const auto place = is_plain && dice_.percent(70)
                           ? static_cast<Place>(1 + dice_.below(3))
                           : Place::nowhere;
    if (place == Place::before) plain_backward();
    for (size_t i = 0; has(Trait::no_sync) && i < dice_.below(3); ++i) {
      forward(kAside, other_wrapper_sometimes(), false);
      add(EventKind::backward).slots = {kAside};
    }
    if (has(Trait::static_graph)) {
      const auto now = std::exchange(dice_, own_pattern_);
      draw_own(place);
      dice_ = now;
    } else {
      draw_own(place);
    }
    // Such a forward is collective until the second backward, so step 0 has
    // none.
    if (step_ > 0 && sometimes(Trait::forward_on_rank_zero, 70)) {
      forward(kDropped).is_on_rank_zero_only = true;
    }
    if (place == Place::after) plain_backward();
    if (sometimes(Trait::held_gradients, 80)) {
      add(EventKind::hold_gradients).hold = static_cast<Hold>(dice_.below(4));
    }
    const bool must_step = case_.options.stepping != Stepping::plain;
    if (must_step || dice_.percent(85)) add(EventKind::step);
  }

  enum class Place { nowhere, before, between, after };

  int other_wrapper_sometimes() {
    return static_cast<int>(dice_.below(case_.wrappers));
  }

  void draw_forwards_beside() {
    if (sometimes(Trait::unused_forward, 60)) {
      forward(kDropped, other_wrapper_sometimes());
    }
    if (sometimes(Trait::evaluation, 60)) evaluate();
    if (sometimes(Trait::evaluation_on_rank_zero, 80)) {
      auto& event = evaluate();
      event.is_on_rank_zero_only = true;
    }
  }

  Event& evaluate() {
    auto& event = forward(kDropped, other_wrapper_sometimes());
    event.has_no_grad = true;
    event.has_penalty = false;
    return event;
  }

  void draw_exception() {
    if (sometimes(Trait::throw_in_forward, 60)) {
      auto& event = forward(kAside, other_wrapper_sometimes());
      // Throws on all ranks: a rank that throws alone gives up an iteration,
      // which the others do not have here (ddp_exceptions_test.cpp tests that).
      event.exception = Deliberate::in_forward;
    }
    // With a hook the ranks' collectives before the exception must be the same,
    // which they are not if the ranks use different parameters.
    const bool differs =
        case_.options.has_comm_hook && case_.options.find_unused_parameters;
    if (sometimes(Trait::throw_in_backward, 60) && !differs) {
      auto& event = forward(kAside, other_wrapper_sometimes());
      event.exception = Deliberate::in_backward;
      // Rank 0 does not throw alone after the last gradient: the peers would
      // finish the iteration, and rank 0 would be told to load a snapshot. Nor
      // does it throw alone with a hook: the collectives of the peers would
      // fail with other words than kGivenUp (ddp_exceptions_test.cpp tests
      // that). Nor with a static graph whose first backward used checkpoints of
      // two forwards: the peers' backward would use one of them.
      const bool is_checkpointed =
          has(Trait::checkpointed_part) || has(Trait::checkpointed_whole);
      event.throws_on_rank_zero_only =
          case_.throwing_op > 0 && !case_.options.has_comm_hook &&
          !(has(Trait::static_graph) && is_checkpointed) && dice_.percent(70);
      event.has_penalty = false;
      add(EventKind::backward).slots = {kAside};
      add(EventKind::zero_grad);
    }
  }

  void plain_backward() {
    const bool puts_back = has(Trait::plain_put_back);
    const bool is_on_rank_zero_only =
        has(Trait::plain_on_rank_zero) || (puts_back && dice_.percent(50));
    const size_t begin = case_.events.size();
    if (puts_back) add(EventKind::keep_gradients);
    auto& plain = forward(kAside, other_wrapper_sometimes());
    plain.is_plain = true;
    plain.use_step += dice_.percent(50) ? 1 : 0;
    add(EventKind::backward).slots = {kAside};
    if (puts_back) add(EventKind::restore_gradients);
    for (size_t i = begin; i < case_.events.size(); ++i) {
      case_.events[i].is_on_rank_zero_only = is_on_rank_zero_only;
    }
  }

  // Draws the forwards and backwards that train.
  void draw_own(Place place) {
    auto between = [&] {
      if (place != Place::between) return;
      const auto now = dice_;
      plain_backward();
      // Not every step has it, and what follows must not depend on it.
      if (has(Trait::static_graph)) dice_ = now;
    };
    const bool has_two = case_.wrappers > 1 || has(Trait::several_forwards) ||
                         has(Trait::no_sync_between) ||
                         has(Trait::sum_of_losses);
    if (!has_two || dice_.percent(15)) {
      own_forward(kFirst);
      between();
      return backward({kFirst});
    }
    // Draws any two of the wrappers.
    const int first = case_.wrappers > 2 ? other_wrapper_sometimes() : 0;
    const int second =
        case_.wrappers > 1
            ? static_cast<int>(first + 1 + dice_.below(case_.wrappers - 1)) %
                  case_.wrappers
            : 0;
    const bool second_synchronises = !has(Trait::no_sync_between);
    const bool first_synchronises = second_synchronises || dice_.percent(70);
    const bool in_turn = case_.wrappers > 1 && dice_.percent(30);
    own_forward(kFirst, first, first_synchronises);
    if (in_turn) backward({kFirst});
    own_forward(kSecond, second, second_synchronises || !first_synchronises);
    between();
    if (in_turn) return backward({kSecond});
    const bool may_sum = has(Trait::sum_of_losses) || case_.wrappers > 1 ||
                         has(Trait::no_sync_between);
    const bool must_sum =
        has(Trait::sum_of_losses) && !has(Trait::several_forwards);
    const bool is_sharded = case_.options.stepping != Stepping::plain;
    if (is_sharded || (may_sum && (must_sum || dice_.percent(40)))) {
      return backward({kFirst, kSecond});
    }
    if (dice_.percent(50)) {
      backward({kFirst});
      backward({kSecond});
    } else {
      backward({kSecond});
      backward({kFirst});
    }
  }

  Case& case_;
  const std::set<Trait>& traits_;
  Dice& dice_;
  std::vector<size_t> freezable_;
  std::set<int> apart_;  // slots whose penalty has its own backward
  Dice own_pattern_{0};  // the same in every step of a static graph
  int step_ = 0;
  int batch_ = 0;
};

}  // namespace

void draw_events(Case& fuzz_case, const std::set<Trait>& traits, Dice& dice) {
  EventDraw(fuzz_case, traits, dice).draw();
}

}  // namespace lockstep::internal::fuzz
