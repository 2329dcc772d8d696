#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/parallel/fuzz/programs/program.h"
#include "tests/parallel/fuzz/programs/program_net.h"

namespace lockstep::internal::fuzz {

inline constexpr double kProgramRate = 0.05;
inline constexpr double kProgramDecay = 0.1;
inline constexpr double kProgramMomentum = 0.9;
inline constexpr double kProgramEpsilon = 1e-2;  // limits AdamW's first steps
inline constexpr double kProgramMaxNorm = 0.5;

// Returns the number of the parameter group of "layer3.weight".
int group_of_parameter(const Program& program, const std::string& name);

// Runs a program in one process and in float64, with LibTorch alone: one model,
// through which the data of all ranks go. If the program computes in bfloat16,
// so do forward and backward here, with a rounded copy of the model: then
// activations, and gradients of each rank, are rounded at the same places.
class ProgramReference {
 public:
  explicit ProgramReference(const Program& program);

  void run(const Action& action);

  // The values that the program must have after the last action.
  at::Tensor parameter(const std::string& name) const;
  at::Tensor gradient(const std::string& name) const;  // may be undefined
  double norm() const { return norm_; }                // before clipping
  // The norm of the gradients if those of all ranks and backward passes had one
  // direction: rounding is relative to these, also where their average is
  // small. And how far the last step moves parameters for an error of 1 in
  // them.
  double magnitude() const { return averaged_.magnitude; }
  double reach() const { return reach_; }
  // A rank's last forward.
  struct Seen {
    at::Tensor input{};  // afterwards
    at::Tensor output{};
    double loss{0};
  };
  const Seen& seen(int rank) const {
    return seen_.at(static_cast<size_t>(rank));
  }
  const Variables& variables(int rank) const {
    return variables_.at(static_cast<size_t>(rank));
  }

 private:
  struct Gradients : std::map<std::string, at::Tensor> {
    double magnitude{0};
  };

  std::shared_ptr<ProgramNet>& computing_net();
  at::Tensor forward(const Action& action, int batch, int rank);
  void add_gradients(const at::Tensor& loss, Gradients& gradients);
  void train(const Action& action);
  void join(const Action& action);
  void average();
  void step();
  void clip();

  const Program program_;
  std::shared_ptr<ProgramNet> net_;
  std::shared_ptr<ProgramNet> rounded_;  // null if float64 is the only dtype
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Variables> variables_;
  // Those that the next action starts from, if they are not those above.
  std::optional<std::vector<Variables>> variables_before_;
  std::vector<Seen> seen_;
  // The gradients that each rank has not given to an average yet, the averages,
  // and a copy.
  std::vector<Gradients> pending_;
  Gradients averaged_, kept_;
  double norm_{0};
  double reach_{0};
};

}  // namespace lockstep::internal::fuzz
