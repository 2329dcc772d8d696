#include "tests/parallel/fuzz/traits.h"

#include <algorithm>
#include <vector>

namespace lockstep::internal::fuzz {
namespace {

using Traits = std::set<Trait>;

// No case may have a trait of `some` together with one of `others`.
struct Conflict {
  Traits some;
  Traits others;
};

const Traits kSteppings{Trait::in_backward, Trait::zero_private,
                        Trait::zero_shared, Trait::zero_in_backward,
                        Trait::zero_of_list};
const Traits kCheckpoints{Trait::checkpointed_part, Trait::checkpointed_whole};
const Traits kPlain{Trait::plain_module, Trait::plain_on_rank_zero,
                    Trait::plain_put_back};
const Traits kThrows{Trait::throw_in_forward, Trait::throw_in_backward};

// Each conflict states why the documentation, or the reference, excludes it.
const std::vector<Conflict>& conflicts() {
  static const std::vector<Conflict> kConflicts{
      // A case has only one way of stepping.
      {kSteppings, kSteppings},
      // Gradients exist only in shards, or are gone after backward.
      {kSteppings,
       {Trait::comm_hook, Trait::backward_twice, Trait::several_forwards,
        Trait::no_sync_between, Trait::plain_module, Trait::plain_on_rank_zero,
        Trait::plain_put_back, Trait::no_zero_grad, Trait::round_trip,
        Trait::freezing, Trait::two_wrappers, Trait::sparse, Trait::gapped}},
      // Parameters are written while the graph is still in use.
      {{Trait::in_backward, Trait::zero_in_backward},
       {Trait::penalty, Trait::gradient}},
      // The reference implements SGD without state.
      {{Trait::in_backward}, {Trait::adamw}},
      // LibTorch's AdamW takes no sparse gradients.
      {{Trait::sparse}, {Trait::adamw, Trait::tied, Trait::transposed}},
      // The recomputed forward would update buffers, and the auxiliary loss,
      // twice.
      {kCheckpoints, {Trait::buffers, Trait::auxiliary_loss}},
      {{Trait::checkpointed_whole},
       {Trait::checkpointed_part, Trait::several_outputs, Trait::two_wrappers}},
      // Each iteration must use the same parameters in the same way.
      {{Trait::static_graph}, {Trait::find_unused, Trait::freezing}},
      // Parameters that the first backward left out may not be used later.
      {{Trait::skip_unused}, {Trait::freezing, Trait::two_wrappers}},
      // A forward that sends buffers is collective.
      {{Trait::buffers}, {Trait::evaluation_on_rank_zero}},
      // A rank that throws may have stepped some parameters already.
      {kThrows, {Trait::in_backward, Trait::zero_in_backward}},
      // The first forward in grad mode after buckets were rebuilt is
      // collective, too.
      {{Trait::forward_on_rank_zero},
       {Trait::buffers, Trait::round_trip, Trait::freezing, Trait::wrap_again,
        Trait::zero_shared, Trait::two_wrappers, Trait::throw_in_forward,
        Trait::throw_in_backward}},
      // Such a forward waits until peers have stepped.
      {{Trait::evaluation_on_rank_zero}, {Trait::zero_shared}},
      // The optimizers keep a reference to the wrapper.
      {{Trait::wrap_again}, kSteppings},
      // LibTorch's AdamW takes no complex parameters, and a round trip to float
      // drops the imaginary part.
      {{Trait::complex}, {Trait::adamw, Trait::round_trip}},
      // LibTorch's to_dense() misreads a gradient of one element that is the
      // real part of a complex tensor.
      {{Trait::complex}, {Trait::sparse}},
      // These parameters stay local to the rank, and may be in one wrapper
      // only.
      {{Trait::ignored}, {Trait::two_wrappers}},
      {{Trait::complex, Trait::ignored}, kSteppings},
      // Replicas must be equal, and forward is collective.
      {{Trait::check_replicas}, kPlain},
      {{Trait::check_replicas},
       {Trait::two_wrappers, Trait::no_sync_between,
        Trait::forward_on_rank_zero}},
      {{Trait::modified_result}, {Trait::checkpointed_whole}},
      {{Trait::two_wrappers}, {Trait::several_outputs}},
      // Gradients exist only in shards, or are gone after backward.
      {{Trait::held_gradients}, kSteppings},
      // A gradient that no rank uses keeps the values that each rank wrote
      // there.
      {{Trait::held_gradients}, {Trait::check_replicas}},
  };
  return kConflicts;
}

bool fits(Trait trait, const Traits& chosen) {
  auto excludes = [&](const Traits& some, const Traits& others) {
    return some.contains(trait) && std::ranges::any_of(chosen, [&](Trait one) {
             return others.contains(one);
           });
  };
  return std::ranges::none_of(conflicts(), [&](const Conflict& conflict) {
    return excludes(conflict.some, conflict.others) ||
           excludes(conflict.others, conflict.some);
  });
}

}  // namespace

std::set<Trait> draw_traits(Dice& dice) {
  static const std::vector<size_t> kCounts{0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 6};
  // These interact with the others in several ways.
  static const std::vector<Trait> kOften{
      Trait::big,           Trait::big,
      Trait::find_unused,   Trait::static_graph,
      Trait::two_wrappers,  Trait::no_sync,
      Trait::no_zero_grad,  Trait::checkpointed_whole,
      Trait::tied,          Trait::zero_private,
      Trait::skip_unused,   Trait::several_outputs,
      Trait::buffers,       Trait::throw_in_backward,
      Trait::plain_module,  Trait::several_forwards,
      Trait::held_gradients};
  const size_t all = static_cast<size_t>(Trait::kCount);
  Traits chosen;
  const size_t count = dice.one_of(kCounts);
  for (size_t tries = 0; chosen.size() < count && tries < 20; ++tries) {
    const size_t number = dice.below(all + kOften.size());
    const auto trait =
        number < all ? static_cast<Trait>(number) : kOften[number - all];
    if (fits(trait, chosen)) chosen.insert(trait);
  }
  if (chosen.contains(Trait::skip_unused) &&
      !chosen.contains(Trait::static_graph)) {
    if (fits(Trait::find_unused, chosen)) {
      chosen.insert(Trait::find_unused);
    } else {
      chosen.erase(Trait::skip_unused);
    }
  }
  // A penalty may have its own backward if that backward may leave out
  // parameters.
  if (chosen.contains(Trait::penalty) && dice.percent(60) &&
      fits(Trait::find_unused, chosen)) {
    chosen.insert(Trait::find_unused);
  }
  // The loss leaves out outputs on some ranks.
  if (chosen.contains(Trait::find_unused) && dice.percent(60) &&
      fits(Trait::several_outputs, chosen)) {
    chosen.insert(Trait::several_outputs);
  }
  return chosen;
}

}  // namespace lockstep::internal::fuzz
