#pragma once

#include <set>

#include "tests/parallel/fuzz/dice.h"
#include "tests/parallel/fuzz/options_table.h"

namespace lockstep::internal::fuzz {

// The features that a draw may add to an ordinary training run.
enum class Trait {
  bucket_cap,
#define LOCKSTEP_FUZZ_TRAIT(option, plain, trait) trait,
  LOCKSTEP_FUZZ_FLAGS(LOCKSTEP_FUZZ_TRAIT)
#undef LOCKSTEP_FUZZ_TRAIT
      buffers,
  comm_hook,
  adamw,
  in_backward,
  zero_private,
  zero_shared,
  zero_in_backward,
  big,
  tied,
  registered_twice,
  frozen,
  transposed,
  gapped,
  sparse,
  checkpointed_part,
  checkpointed_whole,
  several_outputs,
  auxiliary_loss,
  two_wrappers,
  no_sync,
  no_sync_between,
  backward_twice,
  several_forwards,
  sum_of_losses,
  penalty,
  gradient,
  plain_module,
  plain_on_rank_zero,
  plain_put_back,
  unused_forward,
  evaluation,
  evaluation_on_rank_zero,
  zero_grad_false,
  no_zero_grad,
  throw_in_forward,
  throw_in_backward,
  round_trip,
  freezing,
  hooks,
  complex,
  ignored,
  check_replicas,
  zero_of_list,
  modified_result,
  wrap_again,
  forward_on_rank_zero,
  held_gradients,
  kCount
};

// Returns a few traits that the documentation allows together.
std::set<Trait> draw_traits(Dice& dice);

}  // namespace lockstep::internal::fuzz
