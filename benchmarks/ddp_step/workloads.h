#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

// The models that the training steps of `./dev bench` train; peers/ddp_peer.py
// has the same models, sizes and losses in Python, but for the digits.
namespace benchmarks {

// A rank's batches, without end.
class Batches {
 public:
  virtual ~Batches() = default;
  // Returns the next batch, which is valid until the next call.
  virtual torch::data::Example<>& next() = 0;
};

struct Workload {
  int64_t batch_size;  // samples on each rank, if none is asked for
  std::function<torch::nn::Sequential()> model;
  // Needs the default group, whose rank says which samples these are.
  std::function<std::unique_ptr<Batches>(int64_t batch_size)> batches;
  at::Tensor (*loss)(const at::Tensor& output, const at::Tensor& target);
};

// Returns the workloads by name: "tutorial", "mlp", "narrow", "transformer",
// "digits".
const std::map<std::string, Workload>& workloads();

}  // namespace benchmarks
