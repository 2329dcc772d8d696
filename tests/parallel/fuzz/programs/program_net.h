#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/fsdp/fully_shard_options.h"
#include "tests/parallel/fuzz/programs/program.h"

namespace lockstep::internal::fuzz {

// The variables that a program gives to forward by reference. Forward writes
// those of the program's Argument.
struct Variables {
  torch::Tensor state{};
  std::vector<torch::Tensor> losses{};
  std::optional<torch::Tensor> cache{};
  std::pair<torch::Tensor, torch::Tensor> both{};
};

// Which batch a forward is for.
struct Batch {
  int number{0};
};

// One layer: of one of the three forms of forward, by its kind.
class LayerModule : public torch::nn::Module {
 public:
  LayerModule(const Layer& layer, int64_t width);

  torch::Tensor forward(const torch::Tensor& x, const Batch& batch);
  torch::Tensor forward(const torch::Tensor& x, torch::Tensor& state);
  torch::Tensor forward(const torch::Tensor& x,
                        std::vector<torch::Tensor>& losses);

 private:
  LayerKind kind_;
  torch::Tensor weight_, bias_;
};

// The layers [begin, end) of a program, which have the names "layer0", ... With
// `units` those that are units are FullyShard.
class ProgramNet : public torch::nn::Module {
 public:
  // `values`: the seed of the parameters.
  ProgramNet(const Program& program, size_t begin, size_t end, uint64_t values,
             at::ScalarType dtype,
             const std::optional<FullyShardOptions>& units = {});

  // This form is for a stage of a pipeline.
  torch::Tensor forward(const torch::Tensor& x);
  torch::Tensor forward(const torch::Tensor& x, const Batch& batch);
  torch::Tensor forward(const torch::Tensor& x, const Batch& batch,
                        torch::Tensor& state);
  torch::Tensor forward(const torch::Tensor& x, const Batch& batch,
                        std::vector<torch::Tensor>& losses);
  torch::Tensor forward(const torch::Tensor& x, const Batch& batch,
                        std::optional<torch::Tensor>& cache);
  torch::Tensor forward(const torch::Tensor& x, const Batch& batch,
                        std::pair<torch::Tensor, torch::Tensor>& both);

 private:
  torch::Tensor run(torch::Tensor x, const Batch& batch, torch::Tensor& state,
                    std::vector<torch::Tensor>& losses);

  struct Step {
    bool is_skipped;
    bool hooks_result;
    std::function<torch::Tensor(const torch::Tensor& x, const Batch& batch,
                                torch::Tensor& state,
                                std::vector<torch::Tensor>& losses)>
        forward;
  };
  std::vector<Step> steps_;
  bool returns_view_;
};

// Calls a model as the program says: DistributedDataParallel, FullyShard, or a
// std::shared_ptr of the plain net.
template <class Model>
torch::Tensor call_model(Model& model, Idiom idiom, Argument argument,
                         torch::Tensor& x, const Batch& batch,
                         Variables& variables) {
  const auto call = [&](auto&... written) -> torch::Tensor {
    if constexpr (requires { model(x, batch, written...); }) {
      if (idiom == Idiom::call) return model(x, batch, written...);
    }
    return model->forward(x, batch, written...);
  };
  switch (argument) {
    case Argument::none:
      return call();
    case Argument::tensor:
      return call(variables.state);
    case Argument::list:
      return call(variables.losses);
    case Argument::optional:
      return call(variables.cache);
    case Argument::pair:
      return call(variables.both);
  }
  return {};
}

// Returns this rank's loss: of the output, and of the losses among the
// variables.
torch::Tensor loss_of_program(const Program& program, int batch, int rank,
                              const torch::Tensor& output,
                              const Variables& variables);
torch::Tensor input_of_program(const Program& program, int batch, int rank);
torch::Tensor target_of_program(const Program& program, int batch, int rank);

// Makes variables ready for the next forward: without graphs and losses.
void begin_forward(Variables& variables);

}  // namespace lockstep::internal::fuzz
