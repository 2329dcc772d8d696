#include "lockstep/parallel/swa/averaged_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/tensor_layout.h"

namespace lockstep {
namespace {

// Throws unless both lists have tensors of the same sizes, divided alike.
void require_same_sizes(const std::vector<at::Tensor>& averaged,
                        const std::vector<at::Tensor>& current,
                        const char* what) {
  if (averaged.size() != current.size()) {
    throw std::invalid_argument(
        "AveragedModel: the model has " + std::to_string(current.size()) + " " +
        what + ", its average " + std::to_string(averaged.size()) +
        "; give the model that was averaged from the beginning");
  }
  const auto is_shard = [](const at::Tensor& tensor) {
    const auto* layout = internal::layout_of(tensor);
    return layout != nullptr && layout->range.has_value();
  };
  for (size_t i = 0; i < averaged.size(); ++i) {
    if (is_shard(averaged[i]) != is_shard(current[i])) {
      throw std::invalid_argument(
          "AveragedModel: FullyShard has divided only one of the model and its "
          "average; for a divided model give the module() of a second "
          "FullyShard as the copy");
    }
    if (averaged[i].sizes() == current[i].sizes()) continue;
    std::ostringstream text;
    text << "AveragedModel: number " << i << " of the model's " << what
         << " has the sizes " << current[i].sizes() << ", its average "
         << averaged[i].sizes()
         << "; give the model that was averaged from the beginning";
    throw std::invalid_argument(text.str());
  }
}

void copy_all(const std::vector<at::Tensor>& to,
              const std::vector<at::Tensor>& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i].detach().copy_(from[i].detach());
}

}  // namespace

WeightAverage::WeightAverage(std::shared_ptr<torch::nn::Module> module,
                             const torch::nn::Module& model,
                             AveragedModelOptions options)
    : averaged_(register_module("module", std::move(module))),
      options_(std::move(options)) {
  const at::NoGradGuard no_grad;
  if (options_.device) averaged_->to(*options_.device);
  if (!options_.avg_fn) options_.avg_fn = get_swa_avg_fn();
  auto count = at::zeros({}, at::kLong);
  if (options_.device) count = count.to(*options_.device);
  n_averaged_ = register_buffer("n_averaged", count);
  require_same_sizes(averaged_->parameters(), model.parameters(), "parameters");
  require_same_sizes(averaged_->buffers(), model.buffers(), "buffers");
  copy_all(averaged_->parameters(), model.parameters());
  copy_all(averaged_->buffers(), model.buffers());
}

void WeightAverage::update(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  auto averaged = averaged_->parameters();
  auto current = model.parameters();
  const auto buffers = averaged_->buffers();
  const auto current_buffers = model.buffers();
  require_same_sizes(averaged, current, "parameters");
  require_same_sizes(buffers, current_buffers, "buffers");
  if (options_.use_buffers) {
    averaged.insert(averaged.end(), buffers.begin(), buffers.end());
    current.insert(current.end(), current_buffers.begin(),
                   current_buffers.end());
  } else {
    copy_all(buffers, current_buffers);
  }
  const bool first = n_averaged() == 0;
  // LibTorch lists tied weights several times; they are averaged once.
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < averaged.size(); ++i) {
    if (!seen.insert(averaged[i].unsafeGetTensorImpl()).second) continue;
    const at::Tensor average = averaged[i].detach();
    const at::Tensor value = current[i].detach().to(average.device());
    average.copy_(first ? value
                        : options_.avg_fn(average, value,
                                          n_averaged_.to(average.device())));
  }
  n_averaged_ += 1;
}

AveragingFunction get_ema_avg_fn(double decay) {
  if (!(decay >= 0 && decay <= 1)) {
    throw std::invalid_argument("get_ema_avg_fn: decay is " +
                                std::to_string(decay) +
                                "; give a number from 0 to 1");
  }
  return [decay](const at::Tensor& averaged, const at::Tensor& current,
                 const at::Tensor&) {
    return decay * averaged + (1 - decay) * current;
  };
}

AveragingFunction get_swa_avg_fn() {
  return [](const at::Tensor& averaged, const at::Tensor& current,
            const at::Tensor& n_averaged) {
    return averaged + (current - averaged) / (n_averaged + 1);
  };
}

}  // namespace lockstep
