#include "lockstep/parallel/checkpointing/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "lockstep/base/no_destructor.h"

namespace lockstep::internal {
namespace {

using torch::autograd::Engine;

// LibTorch's own handle; its type differs between releases.
using EngineNodePtr =
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

// The object that makes hooks in this thread now.
thread_local SavedTensors* innermost_saved = nullptr;
// Set while this thread looks whether LibTorch asks our engine.
thread_local bool is_looking = false;

class SavedTensorsEngine final : public Engine {
 public:
  // The engine whose place ours takes.
  void set_next(Engine& next) { next_ = &next; }

  torch::autograd::variable_list execute(
      const torch::autograd::edge_list& roots,
      const torch::autograd::variable_list& inputs, bool keep_graph,
      bool create_graph, bool accumulate_grad,
      const torch::autograd::edge_list& outputs) override {
    return next().execute(roots, inputs, keep_graph, create_graph,
                          accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      EngineNodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return next().execute_with_graph_task(graph_task, std::move(graph_root),
                                          std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata()
      override {
    return next().make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks>
  get_default_saved_variable_hooks() override {
    if (is_looking) {
      is_looking = false;
      return nullptr;
    }
    if (innermost_saved != nullptr) return innermost_saved->make_hooks();
    return next().get_default_saved_variable_hooks();
  }

 private:
  Engine& next() const { return *next_.load(); }

  std::atomic<Engine*> next_{nullptr};
};

SavedTensorsEngine& our_engine() {
  // Never destroyed: a thread may run a backward while the process exits. It
  // has no threads of its own, as it executes nothing itself.
  static NoDestructor<SavedTensorsEngine> engine;
  return *engine;
}

// Whether LibTorch asks our engine, directly or through one that was put before
// it and that passes on what it does not know.
bool is_asked() {
  is_looking = true;
  const auto hooks =
      Engine::get_default_engine().get_default_saved_variable_hooks();
  return !std::exchange(is_looking, false);
}

void require_asked() {
  if (is_asked()) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (is_asked()) return;  // another thread was faster
  our_engine().set_next(Engine::get_default_engine());
  torch::autograd::set_default_engine_stub(
      []() -> Engine& { return our_engine(); });
}

}  // namespace

SavedTensors::Scope::Scope(SavedTensors& saved) : before_(innermost_saved) {
  require_asked();
  innermost_saved = &saved;
}

SavedTensors::Scope::~Scope() { innermost_saved = before_; }

}  // namespace lockstep::internal
