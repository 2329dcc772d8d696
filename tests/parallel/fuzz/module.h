#pragma once

#include <torch/torch.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// Returns the tensors of Case::parameters, made from its seed. `rank` changes
// the values, to distinguish rank 0's broadcast from the values of the others.
std::vector<torch::Tensor> make_parameters(const Case& fuzz_case, int rank,
                                           torch::Device device = torch::kCPU);

// The values that one forward needs besides its input.
struct Call {
  int rank{0};
  int step{0};
  Deliberate exception{Deliberate::none};
};

// One output of the module; `op` is the operation that made it.
struct Output {
  static constexpr size_t kLast = ~size_t{0};  // the last activation
  size_t op{kLast};
  torch::Tensor value;
};

// A result type that only its ForwardResult knows.
struct OutputRecord {
  torch::Tensor last;
  std::optional<std::vector<torch::Tensor>> others;
};

// Runs a case's operations for one wrapper, over tensors that another module
// may also register. Uses plain LibTorch only.
class Net : public torch::nn::Module {
 public:
  Net(const Case& fuzz_case, int wrapper, std::vector<torch::Tensor> tensors);

  std::vector<Output> run(const torch::Tensor& x, const Call& call);

  // A loss of the last forward in addition to its outputs; may be undefined.
  torch::Tensor auxiliary;
  // The operations that made the outputs of the last forward.
  std::vector<size_t> emitted;

 private:
  torch::Tensor run_range(size_t begin, size_t end, torch::Tensor x,
                          const Call& call, std::vector<Output>* outputs);
  torch::Tensor run_op(const Op& op, const torch::Tensor& x);

  const Case case_;
  const std::vector<size_t> ops_;
  const std::vector<torch::Tensor> tensors_;
  torch::Tensor running_mean_;
  std::map<size_t, torch::nn::Embedding> embeddings_;
};

// The module that is wrapped: its forward returns the outputs in one of the
// types of fuzz::Outputs.
template <class Result>
class ModuleOf : public Net {
 public:
  using Net::Net;

  Result forward(const torch::Tensor& x, const Call& call) {
    auto outputs = run(x, call);
    if constexpr (std::is_same_v<Result, torch::Tensor>) {
      return outputs[0].value;
    } else if constexpr (std::is_same_v<Result, std::vector<torch::Tensor>>) {
      std::vector<torch::Tensor> all;
      for (auto& output : outputs) all.push_back(output.value);
      return all;
    } else if constexpr (std::is_same_v<Result, OutputTuple> ||
                         std::is_same_v<Result, OutputRecord>) {
      std::vector<torch::Tensor> others;
      for (size_t i = 1; i < outputs.size(); ++i) {
        others.push_back(outputs[i].value);
      }
      return {outputs[0].value, others};
    } else {
      OutputMap all;
      for (size_t i = 0; i < outputs.size(); ++i) {
        all.emplace(std::to_string(i), outputs[i].value);
      }
      return all;
    }
  }

  // Returns the outputs in `result` in the form in which run() returned them.
  std::vector<Output> take_apart(const Result& result) const {
    std::vector<Output> outputs;
    auto add = [&](const torch::Tensor& value) {
      outputs.push_back({emitted[outputs.size()], value});
    };
    if constexpr (std::is_same_v<Result, torch::Tensor>) {
      add(result);
    } else if constexpr (std::is_same_v<Result, std::vector<torch::Tensor>>) {
      for (const auto& value : result) add(value);
    } else if constexpr (std::is_same_v<Result, OutputRecord>) {
      add(result.last);
      for (const auto& value : *result.others) add(value);
    } else if constexpr (std::is_same_v<Result, OutputTuple>) {
      add(std::get<0>(result));
      for (const auto& value : std::get<1>(result)) add(value);
    } else {
      for (size_t i = 0; i < result.size(); ++i) {
        add(result.at(std::to_string(i)));
      }
    }
    return outputs;
  }

  using OutputTuple = std::tuple<torch::Tensor, std::vector<torch::Tensor>>;
  using OutputMap = std::map<std::string, torch::Tensor>;
};

// Returns the input of `event` on `rank`.
torch::Tensor input_of(const Case& fuzz_case, const Event& event, int rank,
                       torch::Device device = torch::kCPU);

// Returns the loss of `event` on `rank`, from the outputs for the input `x`.
torch::Tensor loss_of(const Case& fuzz_case, const Event& event, int rank,
                      const torch::Tensor& x,
                      const std::vector<Output>& outputs,
                      const torch::Tensor& auxiliary);

// Returns the squared gradient of the input.
torch::Tensor penalty_of(const torch::Tensor& x,
                         const std::vector<Output>& outputs);

// Converts all tensors of `parameters`, and the buffers of `nets`, to float and
// back.
void round_trip(const std::vector<std::shared_ptr<Net>>& nets);

}  // namespace lockstep::internal::fuzz
