#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/parallel/fuzz/options_table.h"

// One training run of the fuzzer, as plain data: a module, the options of
// DistributedDataParallel and the events of each step. All that the run needs
// is here, so the reducer can edit it. All numbers are float64.
namespace lockstep::internal::fuzz {

// The ranks and steps in which something is used.
enum class Use { always, never, even_steps, rank_zero, one_rank_in_turn };

inline bool is_used(Use use, int rank, int step, int world_size) {
  switch (use) {
    case Use::always:
      return true;
    case Use::never:
      return false;
    case Use::even_steps:
      return step % 2 == 0;
    case Use::rank_zero:
      return rank == 0;
    case Use::one_rank_in_turn:
      return rank == step % world_size;
  }
  return true;
}

enum class Layout { contiguous, transposed, gapped };

struct Parameter {
  std::vector<int64_t> sizes{};
  Layout layout{Layout::contiguous};
  bool is_frozen{false};
  bool is_registered_twice{false};
  // The parameter is the weight of a torch::nn::Embedding with sparse(true).
  bool is_sparse{false};
  // A hook doubles the gradient (Tensor::register_hook).
  bool has_hook{false};
  bool is_complex{false};
  // The parameter is in params_and_buffers_to_ignore.
  bool is_ignored{false};
};

// How an operation computes its result from the activation x ([rows, width])
// and its parameters; operations.h has the formulas.
enum class OpKind {
  linear,
  linear_in_place,
  product,
  masked,
  outer,
  batched,
  where,
  addmm,
  lora,
  merged_lora,
  custom,
  transposed,
  reshaped,
  chunked,
  scale,
  bias,
  scalar,   // has a parameter without dimensions
  rotated,  // has a complex parameter
  empty,    // has a parameter without elements
  embedding,
  running_mean,  // has a buffer
  auxiliary_loss,
  returned_parameter,
};

enum class Activation { none, tanh, relu };

// Which operations a wrapped module runs; all modules run the trunk.
enum class Part { trunk, first_head, second_head, third_head };

struct Op {
  OpKind kind{OpKind::linear};
  std::vector<size_t> parameters{};
  Part part{Part::trunk};
  Use use{Use::always};
  Activation activation{Activation::none};
  // Adjacent operations with this flag run in one checkpoint().
  bool is_checkpointed{false};
  // The result is an output of the module, in addition to the last activation;
  // with is_branch it is only an output.
  bool is_output{false};
  bool is_branch{false};
  Use loss_use{Use::always};  // when the loss uses that output
};

enum class Outputs { tensor, vector, tuple, map, record };

enum class Optimizer { sgd, adamw };
// The optimizer that steps the parameters, and where its state is.
enum class Stepping {
  plain,
  in_backward,  // apply_optimizer_in_backward()
  zero_private,
  zero_shared,
  zero_in_backward,
  zero_of_list,  // over parameters, without the wrapper
};

struct Options {
#define LOCKSTEP_FUZZ_OPTION(type, option, plain) type option = plain;
#define LOCKSTEP_FUZZ_FLAG(option, plain, trait) bool option = plain;
  LOCKSTEP_FUZZ_OPTIONS(LOCKSTEP_FUZZ_OPTION)
  LOCKSTEP_FUZZ_FLAGS(LOCKSTEP_FUZZ_FLAG)
#undef LOCKSTEP_FUZZ_OPTION
#undef LOCKSTEP_FUZZ_FLAG
  // These are not options of DistributedDataParallel.
  bool has_comm_hook{false};
  Optimizer optimizer{Optimizer::sgd};
  Stepping stepping{Stepping::plain};
};

// Calls visit(name, of) for each row of the table; of(options) is the option's
// value in Options or DistributedDataParallelOptions.
template <class Visit>
void for_each_ddp_option(const Visit& visit) {
#define LOCKSTEP_FUZZ_VISIT(option) \
  visit(#option, [](auto& options) -> auto& { return options.option; });
#define LOCKSTEP_FUZZ_OPTION(type, option, plain) LOCKSTEP_FUZZ_VISIT(option)
#define LOCKSTEP_FUZZ_FLAG(option, plain, trait) LOCKSTEP_FUZZ_VISIT(option)
  LOCKSTEP_FUZZ_OPTIONS(LOCKSTEP_FUZZ_OPTION)
  LOCKSTEP_FUZZ_FLAGS(LOCKSTEP_FUZZ_FLAG)
#undef LOCKSTEP_FUZZ_OPTION
#undef LOCKSTEP_FUZZ_FLAG
#undef LOCKSTEP_FUZZ_VISIT
}

enum class EventKind {
  forward,   // keeps a loss in `slot`
  backward,  // on the sum of the losses in `slots`
  gradient,  // autograd::grad() of the loss in slots[0], discarded
  zero_grad,
  keep_gradients,     // copies all .grad
  restore_gradients,  // puts the copies back
  hold_gradients,     // holds all dense .grad themselves, or aliases of them
  change_gradients,   // rebinds or resizes all dense .grad in place
  round_trip,         // converts the module to float and back
  set_frozen,
  wrap_again,  // destroys a wrapper with its module, then makes both
  step,        // calls the optimizer's step()
};

// A reference to a .grad that a program holds.
enum class Hold { itself, detached, data, flattened };
// How a program changes a .grad; after all but `rebound` it drops the gradient.
enum class Change { rebound, larger, smaller, transposed };

enum class Deliberate { none, in_forward, in_backward };

// A forward that keeps its penalty apart puts it into slot s + kPenalties,
// where s is the slot of its loss.
inline constexpr int kPenalties = 4;

struct Event {
  EventKind kind{EventKind::forward};
  int step{0};
  bool is_on_rank_zero_only{false};
  // The step that Use counts with; it differs for forwards that use other
  // parameters than the forwards before and after them.
  int use_step{0};

  // For `forward`.
  int slot{0};
  int batch{0};
  int wrapper{0};
  bool is_plain{false};     // calls the module itself, not the wrapper
  bool synchronises{true};  // if it is false, it runs under no_sync()
  bool has_no_grad{false};  // runs under NoGradGuard; the loss is dropped
  bool has_penalty{false};  // adds the squared gradient of the input
  // The penalty has a backward of its own.
  bool keeps_penalty_apart{false};
  // If the ranks share memory, the peers give up the iteration, too.
  bool throws_on_rank_zero_only{false};
  Deliberate exception{Deliberate::none};  // thrown in Case::throwing_op

  // For `backward` and `gradient`.
  std::vector<int> slots{};
  bool retains_graph{false};

  bool sets_to_none{true};  // for zero_grad
  Hold hold{Hold::itself};
  Change change{Change::rebound};
  size_t parameter{0};  // for set_frozen
  bool is_frozen{false};
};

// Returns what `rank` throws in a forward.
inline Deliberate exception_on(const Event& event, int rank) {
  return event.throws_on_rank_zero_only && rank != 0 ? Deliberate::none
                                                     : event.exception;
}

struct Case {
  uint64_t seed{0};
  int world_size{2};
  int64_t rows{2};
  int64_t width{3};
  std::vector<Parameter> parameters;
  std::vector<Op> ops;
  size_t throwing_op{0};
  int wrappers{1};
  // The loss modifies the first output in place.
  bool modifies_result{false};
  Outputs outputs{Outputs::tensor};
  Options options;
  std::vector<Event> events;
};

// Returns whether the set of used parameters may differ between ranks or
// between steps.
bool has_conditions(const Case& fuzz_case);

// Returns the indices of the operations of wrapper `wrapper`.
std::vector<size_t> ops_of(const Case& fuzz_case, int wrapper);
// Returns the indices of the parameters that wrapper `wrapper` registers: those
// of its operations, and in the first wrapper also those that no operation
// uses.
std::vector<size_t> parameters_of(const Case& fuzz_case, int wrapper);

const char* name_of(OpKind kind);
const char* name_of(EventKind kind);

}  // namespace lockstep::internal::fuzz
