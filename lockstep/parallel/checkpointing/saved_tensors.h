#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace lockstep::internal {

// Decides what autograd keeps instead of a tensor that an operation saves for
// its backward.
//
// LibTorch asks its engine for these hooks whenever it saves a tensor
// (SavedVariable, Engine::get_default_saved_variable_hooks()), and Python's
// saved_tensors_hooks() are an engine that overrides this function. So the
// first Scope puts an engine of ours before the one that the process has. Ours
// has hooks of its own in the threads and at the times in which a Scope lives;
// everything else it passes on, so that backward passes that are under way,
// threads of devices and hooks of Python stay with the engine before. If
// another engine takes the place of ours (Python's, when it is imported later),
// the next Scope puts ours before that one.
class SavedTensors {
 public:
  virtual ~SavedTensors() = default;

  // Returns the hooks for one tensor, which LibTorch may drop without using
  // them. Called in the thread of the Scope.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;

  // While it lives, `saved` makes the hooks for all tensors that are saved in
  // this thread. Scopes nest; only the innermost is asked. They must end in
  // reverse order; an exception ends them, too.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(SavedTensors& saved);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    SavedTensors* const before_;
  };
};

}  // namespace lockstep::internal
