#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

// One training program of the fuzzer over wrappers, as plain data: a model, the
// wrapper and optimizer that train it, and what the program does, in order. All
// ranks do the same.
namespace lockstep::internal::fuzz {

enum class Wrapping { ddp, zero, zero_shared, fully_shard, pipeline };
enum class Precision { float64, float32, bfloat16 };  // the last is mixed
enum class Idiom { call, arrow };  // model(x), or LibTorch's model->forward(x)

enum class Stages { plain, replicated, divided };  // of a pipeline

// The arguments that forward takes besides its input, by reference, and writes.
enum class Argument { none, tensor, list, optional, pair };

// How a layer computes its result from the activation x, [rows, width];
// program_net.cpp has the formulas.
enum class LayerKind {
  linear,
  residual,  // with an operation in place
  norm,
  twice,  // uses one weight at two places
  embedding,
  in_place,   // changes its input
  recurrent,  // reads and writes the state
  penalty,    // appends to the losses
};

struct Layer {
  LayerKind kind{LayerKind::linear};
  bool is_unit{false};     // is a FullyShard of its own
  bool is_skipped{false};  // in batches of odd number
  bool is_frozen{false};
  bool has_hook{false};      // that doubles the gradients of its parameters
  bool hooks_result{false};  // to change the gradient of its result
  int group{0};              // of the optimizer's parameter groups, kGroups
};
inline constexpr int kGroups = 3;

enum class Stepper { sgd, momentum, adamw };

enum class ActionKind {
  zero_grad,
  train,  // forward and backward
  step,
  clip,
  set_rate,
  evaluate,
  set_frozen,
  keep_gradients,  // the tensors themselves, not copies
  use_kept,        // adds them to the gradients
  rebind,          // gives each .grad other memory
  reload,          // saves a snapshot and loads it into everything made anew
  joined,          // some steps with uneven inputs
};

enum class Quiet { no_grad, inference };

struct Action {
  ActionKind kind{ActionKind::step};
  Idiom idiom{Idiom::call};  // arrow in zero_grad: that of the model
  int batch{0};              // which data; for train, evaluate and joined

  // For `train`.
  bool synchronises{true};  // false: under no_sync()
  bool has_two_forwards{false};
  bool modifies_result{false};  // the caller changes the output in place

  bool sets_to_none{true};      // for zero_grad
  Quiet quiet{Quiet::no_grad};  // for evaluate
  size_t layer{0};              // for set_frozen
  bool is_frozen{false};
  bool resizes{false};        // for rebind: by set_data()
  bool is_file{false};        // for reload: not a folder
  std::vector<int> inputs{};  // for joined: of each rank
};

struct Program {
  uint64_t seed{0};
  int world_size{2};
  int64_t rows{2};
  int64_t width{3};
  Wrapping wrapping{Wrapping::ddp};
  Precision precision{Precision::float64};
  Argument argument{Argument::none};
  bool returns_view{false};
  Stepper stepper{Stepper::sgd};
  bool finds_unused{false};  // of DistributedDataParallel
  bool gradient_as_bucket_view{true};
  bool shares_memory{true};  // of FullyShard
  bool reshards{true};
  int micro_batches{2};  // of the pipeline
  Stages stages{Stages::plain};
  std::vector<Layer> layers{};
  std::vector<Action> actions{};
};

inline bool is_zero(Wrapping wrapping) {
  return wrapping == Wrapping::zero || wrapping == Wrapping::zero_shared;
}
inline bool divides(const Program& program) {
  return program.wrapping == Wrapping::fully_shard ||
         program.stages == Stages::divided;
}
// The ranks that have data of their own. Plain stages are one on each rank;
// each rank has all stages that are wrapped.
inline int data_ranks(const Program& program) {
  return program.wrapping == Wrapping::pipeline &&
                 program.stages == Stages::plain
             ? 1
             : program.world_size;
}
inline size_t stage_count(const Program& program) {
  return program.stages == Stages::plain
             ? static_cast<size_t>(program.world_size)
             : 2;
}

// Returns the program of a seed, which depends only on the seed and the world
// size.
Program draw_program(uint64_t seed, int world_size);

// The other functions of CaseKind (fuzz/subject.h).
std::vector<Program> smaller_programs(const Program& program);
std::set<std::string> features_of_program(const Program& program);
std::string text_of_program(const Program& program, const std::string& reason);

}  // namespace lockstep::internal::fuzz
