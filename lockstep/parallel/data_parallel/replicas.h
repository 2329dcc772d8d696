#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::internal {

enum class ReplicaMemory {
  // A replica on the module's own device uses the memory of the module's
  // parameters.
  kShared,
  // Every replica has memory of its own, as a replica on another device must
  // have.
  kOwn,
};

// Copies of a module that are kept from one forward to the next. The first
// replica is the module itself; the others are made once, with Module::clone(),
// and then follow the module: see refresh().
//
// LibTorch modules hold their parameters as typed members, which code outside
// cannot replace. But the tensor object in a member stays the same, and both
// its memory and its place in autograd's graph can be set. So a replica's
// parameter is not a leaf: its gradient goes to a node that adds up the
// replicas' gradients in their order and passes the sum to the module's
// parameter, for which .grad, hooks and accumulation work as for any other use.
// The node keeps nothing of a forward, so several forwards may come before
// their backward passes, and higher derivatives go through it.
//
// The node runs after all others that are ready. On CPU devices, where one
// thread runs backward, gradients are therefore added in the same order
// whatever the timing of forward was. Several accelerators have one backward
// thread each, so the first device's own gradient may be added before or after
// the sum of the others.
//
// Use from one thread.
class Replicas {
 public:
  // `devices`: not empty; the module is on the first.
  //
  // Makes the replicas and leaves the default generator's state unchanged.
  // Throws std::invalid_argument if the module has no clone() that returns a
  // module of the same type with parameters of its own.
  Replicas(const torch::nn::Module& module, std::vector<at::Device> devices,
           ReplicaMemory memory = ReplicaMemory::kShared);

  // Prepares a forward over the first `count` devices. Afterwards these
  // replicas have the module's parameters (the same memory, or a copy), a copy
  // of its buffers, its requires_grad and its training mode. Copies are made on
  // the current streams. Other members of the module's class stay as they were
  // when the replicas were made. If the module has other children, parameters
  // or buffers than it had then, the replicas are made again.
  //
  // A backward pass throws when it would throw with the module itself: if
  // parameters that its forward saved were written to, in a way that version
  // counters see (Adam's step is seen; SGD's is not, because LibTorch makes it
  // on .data()).
  //
  // Throws std::invalid_argument if a parameter or buffer is not on the first
  // device.
  void refresh(const torch::nn::Module& module, size_t count);

  // Called after that forward. Throws std::logic_error, which names it, if a
  // replica has written a parameter.
  void require_unwritten() const;

  // Returns replica `number`, from 1.
  torch::nn::Module& operator[](size_t number) const {
    return *replicas_[number - 1];
  }
  const std::vector<at::Device>& devices() const { return devices_; }

 private:
  // One parameter or buffer, and its copies in replicas 1, 2, ...
  struct Copied {
    std::string name;
    at::Tensor original;
    bool is_buffer;
    std::vector<at::Tensor> copies;
    // original._version() when each copy was last taken.
    std::vector<int64_t> versions;
    // The place to which the sum of the copies' gradients goes.
    torch::autograd::Edge gradient;
    // writes() after refresh().
    int64_t writes = 0;
  };

  void make(const torch::nn::Module& module);
  void add(const std::string& name, const at::Tensor& original, bool is_buffer);
  bool still_fit(const torch::nn::Module& module) const;
  // Returns whether the tensor object had to be set to other memory.
  bool refresh_copy(Copied& tensor, size_t copy);
  static void set_gradient(Copied& tensor);
  // Returns how often the tensor and its copies have been written.
  static int64_t writes(const Copied& tensor);

  std::vector<at::Device> devices_;
  ReplicaMemory memory_;
  std::vector<std::shared_ptr<torch::nn::Module>> replicas_;
  std::vector<Copied> tensors_;
  std::vector<torch::nn::Module*> children_;  // of the module, all levels
  std::vector<std::vector<torch::nn::Module*>> replica_children_;
};

// Throws std::invalid_argument if a parameter or buffer of the module is not on
// `device`.
void require_on_device(const torch::nn::Module& module,
                       const at::Device& device);

}  // namespace lockstep::internal
