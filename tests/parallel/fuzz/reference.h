#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tests/parallel/fuzz/case.h"
#include "tests/parallel/fuzz/module.h"

namespace lockstep::internal::fuzz {

// Computes the results that a case must have on every rank, in one process and
// with LibTorch alone. It has a replica of the module for each rank, and
// averages the gradients itself after each backward pass that the wrapper would
// average.
class Reference {
 public:
  explicit Reference(const Case& fuzz_case);
  ~Reference();

  void run(const Event& event);

  // Returns false from an exception in backward until the next zero_grad().
  bool gradients_are_known() const { return gradients_are_known_; }
  const std::vector<torch::Tensor>& parameters(int rank) const;

 private:
  struct Loss;
  struct Replica;

  void forward(const Event& event);
  void backward(const Event& event);
  void wrap_again(int wrapper);
  void average(size_t parameter, const std::vector<torch::Tensor>& before,
               const std::vector<torch::Tensor>& added);
  void step_in_backward(size_t parameter);
  bool is_local(const Event& event, int rank) const;

  const Case case_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  // For each wrapper: parameters, and the ranks that have used them in a
  // backward of the wrapper since the last average.
  std::vector<std::set<std::pair<size_t, int>>> used_;
  std::vector<bool> sends_buffers_;  // whether the next forward sends buffers
  bool gradients_are_known_{true};
};

// Returns LibTorch's optimizer for `fuzz_case`.
std::unique_ptr<torch::optim::Optimizer> make_plain_optimizer(
    const Case& fuzz_case, std::vector<torch::Tensor> parameters);

// Returns what Change::rebound makes of a gradient.
torch::Tensor rebound(const torch::Tensor& gradient, int rank);

inline constexpr double kLearningRate = 0.05;
inline constexpr double kEpsilon = 1e-2;  // limits AdamW's first steps

}  // namespace lockstep::internal::fuzz
