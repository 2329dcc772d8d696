#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace lockstep {

enum class ReplicaMemory {
  // A parameter of a replica on the module's own device is the module's memory.
  kShared,
  // Every replica has memory of its own, as one on another device must.
  kOwn,
};

// Copies of a module that stay from one forward to the next. The first replica
// is the module itself; the others are made once, with Module::clone(), and
// then follow it: see refresh().
//
// LibTorch modules hold their parameters as typed members, which nothing can
// replace from outside. But the tensor object behind a member stays the same,
// and both its memory and its place in autograd's graph can be set. So a
// replica's parameter is not a leaf: its gradient goes to a node that adds the
// replicas' gradients in their order and hands the sum to the module's
// parameter, whose .grad, hooks and accumulation are those of any other use.
// That node keeps nothing of a forward, so that several forwards may come
// before their backward passes, and higher derivatives go through it.
//
// The node runs behind all others that are ready: on CPU devices, where one
// thread runs backward, gradients are added in one order whatever the timing of
// forward was. On several accelerators each has a thread for backward, and what
// the first device added comes before or after the sum of the others.
//
// Use from one thread.
class Replicas {
 public:
  // `devices`: not empty, the first is where the module lies.
  //
  // Makes the replicas; the default generator's state is what it was. Throws
  // std::invalid_argument if the module has no clone() that gives a module of
  // the same type with parameters of its own.
  Replicas(const torch::nn::Module& module, std::vector<at::Device> devices,
           ReplicaMemory memory = ReplicaMemory::kShared);

  // Before a forward over the first `count` devices. These replicas then have
  // the module's parameters (the same memory, or a copy), a copy of its
  // buffers, its requires_grad and its training mode. Copies are made on the
  // current streams. What else is in a module (the members of its class) stays
  // what it was when the replicas were made; they are made again if the module
  // has other children, parameters or buffers than then.
  //
  // A backward pass throws where it would with the module itself: parameters
  // that its forward saved were written to, in a way that version counters see
  // (Adam's step; not SGD's, which LibTorch makes on .data()).
  //
  // Throws std::invalid_argument if a parameter or buffer is not on the first
  // device.
  void refresh(const torch::nn::Module& module, size_t count);

  // Replica `number`, from 1.
  torch::nn::Module& operator[](size_t number) const {
    return *replicas_[number - 1];
  }
  const std::vector<at::Device>& devices() const { return devices_; }

 private:
  // One parameter or buffer, and what it is in replicas 1, 2, ...
  struct Copied {
    at::Tensor original;
    bool is_buffer;
    std::vector<at::Tensor> copies;
    // original._version() when each copy was last taken.
    std::vector<int64_t> versions;
    // Where the sum of the copies' gradients goes.
    torch::autograd::Edge gradient;
  };

  void make(const torch::nn::Module& module);
  void add(const std::string& name, const at::Tensor& original, bool is_buffer);
  bool still_fit(const torch::nn::Module& module) const;
  // Whether the tensor object had to be set to other memory.
  bool refresh_copy(Copied& tensor, size_t copy);
  static void set_gradient(Copied& tensor);

  std::vector<at::Device> devices_;
  ReplicaMemory memory_;
  std::vector<std::shared_ptr<torch::nn::Module>> replicas_;
  std::vector<Copied> tensors_;
  std::vector<torch::nn::Module*> children_;  // the module's, all levels
  std::vector<std::vector<torch::nn::Module*>> replica_children_;
};

// Throws std::invalid_argument if a parameter or buffer of the module is not on
// `device`.
void require_on_device(const torch::nn::Module& module,
                       const at::Device& device);

}  // namespace lockstep
