// One rank of a training: `healing_mistakes NAME`. It makes the mistake with
// this name; "none", "sharded" and "mixed" are trainings without a mistake that
// evaluate in run().

#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <map>
#include <optional>
#include <string>

#include "lockstep/lockstep.h"

namespace lockstep::internal::testing {
namespace {

int train(const std::string& mistake) {
  const auto group = init_process_group("lockstep");
  const auto data = torch::randn({8, 4});
  TensorDataset dataset(data, data.sum(1, true));
  DistributedSampler sampler(dataset);
  DataLoader loader(dataset, sampler, {.batch_size = 2});
  DataLoader other(dataset, sampler, {.batch_size = 4});
  torch::nn::Linear net(4, 1);
  torch::nn::Linear beside(4, 1);
  std::optional<FullyShard<torch::nn::Linear>> sharded;
  if (mistake == "sharded") sharded.emplace(net);
  DistributedDataParallelOptions options;
  if (mistake == "mixed") {
    options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16};
  }
  std::optional<DistributedDataParallel<torch::nn::Linear>> ddp;
  if (!sharded) ddp.emplace(net, options);
  const auto model = [&](const at::Tensor& input) {
    return sharded ? (*sharded)(input) : (*ddp)(input);
  };
  optim::AdamW optimizer(net->parameters());
  optim::SGD second(beside->parameters());
  torch::optim::LBFGS lbfgs(net->parameters());
  // Neither changes a version that LibTorch counts.
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::SGD second_sgd(beside->parameters(), 0.1);
  TrainingState state{
      .model = net.ptr(), .optimizer = &optimizer, .items = {{"s", sampler}}};
  std::optional<DistributedDataParallel<torch::nn::Linear>> wrapped;
  if (mistake == "wrapped") wrapped.emplace(beside);
  if (mistake == "lbfgs") state.optimizer = &lbfgs;
  if (mistake.starts_with("forgotten")) state.items.emplace("beside", beside);
  std::optional<HealedTraining> training(state);
  if (mistake == "another") HealedTraining another(state);
  const auto backward = [&](const auto& batch) {
    const auto output = model(batch.data) + beside(batch.data);
    torch::mse_loss(output, batch.target).backward();
  };
  while (const auto* batch = training->next(loader)) {
    if (mistake == "none" || mistake == "sharded" || mistake == "mixed") {
      training->run([&] { model(batch->data); });
      training->run([&] {
        const at::NoGradGuard no_grad;
        model(batch->data);
      });
    }
    if (mistake == "turn") training->next(other);
    if (mistake == "alone") training->run([&] { backward(*batch); });
    if (mistake == "steps alone") training->run([&] { sgd.step(); });
    if (mistake == "nested") training->run([&] { training->run([] {}); });
    if (mistake == "next") training->run([&] { training->next(loader); });
    if (mistake == "group") training->run([] { new_group(); });
    training->run(
        [&] {
          optimizer.zero_grad();
          second.zero_grad();
          backward(*batch);
          if (mistake == "step") optimizer.step();
          if (mistake == "sgd") sgd.step();
        },
        [&] {
          optimizer.step();
          if (mistake == "forgotten") second.step();
          if (mistake == "forgotten sgd") second_sgd.step();
        });
  }
  training.reset();
  if (mistake == "later") HealedTraining later(state);
  return 0;
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int, char** argv) {
  return lockstep::record(
      [&] { return lockstep::internal::testing::train(argv[1]); });
}
