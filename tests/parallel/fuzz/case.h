#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// One training run of the fuzzer, as plain data: a module, the options of
// DistributedDataParallel and the events of each step. Everything that the run
// needs is here, so that the reducer can edit it. All numbers are float64.
namespace lockstep::fuzz {

// On which ranks and in which steps something is used.
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
  // The weight of a torch::nn::Embedding with sparse(true).
  bool is_sparse{false};
  // Doubles its gradient (Tensor::register_hook).
  bool has_hook{false};
  bool is_complex{false};
  // In params_and_buffers_to_ignore.
  bool is_ignored{false};
  // In delay_all_reduce_named_params; the first of the first operation is the
  // one that they wait for.
  bool is_delayed{false};
};

// What an operation computes from the activation x ([rows, width]) and its
// parameters; operations.h has the formulas.
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
  scalar,   // a parameter without dimensions
  rotated,  // a complex one
  empty,    // one without elements
  embedding,
  running_mean,  // a buffer
  auxiliary_loss,
  returned_parameter,
};

enum class Activation { none, tanh, relu };

// Which operations a wrapped module runs: the trunk belongs to all of them.
enum class Part { trunk, first_head, second_head, third_head };

struct Op {
  OpKind kind{OpKind::linear};
  std::vector<size_t> parameters{};
  Part part{Part::trunk};
  Use use{Use::always};
  Activation activation{Activation::none};
  // Neighbours with this flag run in one re-entrant checkpoint.
  bool is_checkpointed{false};
  // The result is an output of the module, beside the last activation; with
  // is_branch it is nothing else.
  bool is_output{false};
  bool is_branch{false};
  Use loss_use{Use::always};  // of that output
};

enum class Outputs { tensor, vector, tuple, map, record };

enum class Optimizer { sgd, adamw };
// Which optimizer steps the parameters, and where its state is.
enum class Stepping {
  plain,
  in_backward,  // apply_optimizer_in_backward()
  zero_private,
  zero_shared,
  zero_in_backward,
  zero_of_list,  // of parameters, without the wrapper
};

struct Options {
  std::optional<double> bucket_cap_mb;
  std::optional<double> first_bucket_mb;
  std::vector<double> bucket_cap_mb_list;
  bool find_unused_parameters{false};
  bool static_graph{false};
  bool gradient_as_bucket_view{true};
  bool skip_all_reduce_unused_params{false};
  bool check_for_nan_in_grad{false};
  bool broadcast_buffers{true};
  bool has_comm_hook{false};
  int64_t check_replicas_every{0};
  Optimizer optimizer{Optimizer::sgd};
  Stepping stepping{Stepping::plain};
};

enum class EventKind {
  forward,   // keeps a loss in `slot`
  backward,  // of the sum of the losses in `slots`
  gradient,  // autograd::grad() of the loss in slots[0], thrown away
  zero_grad,
  keep_gradients,     // copies of all .grad
  restore_gradients,  // puts the copies back
  round_trip,         // the module to float and back
  set_frozen,
  wrap_again,  // destroys a wrapper with its module, makes both anew
  step,        // of the optimizer
};

enum class Deliberate { none, in_forward, in_backward };

// A forward that keeps its penalty apart leaves it in slot s + kPenalties;
// s is the slot of its loss.
inline constexpr int kPenalties = 4;

struct Event {
  EventKind kind{EventKind::forward};
  int step{0};
  bool is_on_rank_zero_only{false};
  // What Use counts as the step; another one for forwards that use other
  // parameters than their neighbours.
  int use_step{0};

  // forward
  int slot{0};
  int batch{0};
  int wrapper{0};
  bool is_plain{false};     // the module itself, not the wrapper
  bool synchronises{true};  // false: under no_sync()
  bool has_no_grad{false};  // under NoGradGuard; the loss is dropped
  bool has_penalty{false};  // adds the squared gradient of the input
  // Its backward comes by itself.
  bool keeps_penalty_apart{false};
  // Peers give the iteration up, too, where they share memory.
  bool throws_on_rank_zero_only{false};
  Deliberate exception{Deliberate::none};  // thrown in Case::throwing_op

  // backward, gradient
  std::vector<int> slots{};
  bool retains_graph{false};

  bool sets_to_none{true};  // zero_grad
  size_t parameter{0};      // set_frozen
  bool is_frozen{false};
};

// What `rank` throws in a forward.
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
  // The loss changes the first output in place.
  bool modifies_result{false};
  Outputs outputs{Outputs::tensor};
  Options options;
  std::vector<Event> events;
};

// Whether some rank may use another set of parameters than another, or in
// another step.
bool has_conditions(const Case& fuzz_case);

// The operations of wrapper `wrapper`, as indices.
std::vector<size_t> ops_of(const Case& fuzz_case, int wrapper);
// The parameters that wrapper `wrapper` registers, as indices: those of its
// operations, and in the first wrapper those of no operation.
std::vector<size_t> parameters_of(const Case& fuzz_case, int wrapper);

const char* name_of(OpKind kind);
const char* name_of(EventKind kind);

}  // namespace lockstep::fuzz
