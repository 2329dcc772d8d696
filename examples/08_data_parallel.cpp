// 08 DataParallel: one process, one module, several devices. Each forward
// divides the batch over replicas of the module, each in a thread of its own;
// the gradients are those of the module itself. Here two replicas are on the
// CPU; without device_ids, every GPU has one. Under a launcher each rank trains
// by itself: to train one model in several processes, use
// DistributedDataParallel.
//
//   $ build/bin/08_data_parallel
//   a batch of 8 over 2 replicas: 4 points on cpu, 4 points on cpu
//   y = 2.00 x + 1.00
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/08_data_parallel
//   a batch of 8 over 2 replicas: 4 points on cpu, 4 points on cpu
//   y = 2.00 x + 1.00

#include <cstdio>
#include <map>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

// Replicas are made by clone(). So a module of your own must be Cloneable and
// register its parts in reset().
struct LineImpl : torch::nn::Cloneable<LineImpl> {
  LineImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(1, 1));
  }
  // Results may be tensors or containers of tensors; the parts are joined.
  std::map<std::string, torch::Tensor> forward(const torch::Tensor& x) {
    return {{"y", linear(x)}, {"points", torch::tensor(x.size(0))}};
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Line);

int main() {
  auto group = lockstep::init_process_group();

  auto x = torch::linspace(-1, 1, 8).unsqueeze(1);
  auto y = 2 * x + 1;

  Line line;
  lockstep::DataParallel<Line> model(
      line, {.device_ids = {torch::kCPU, torch::kCPU}});
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.5);
  torch::Tensor points;  // one element for each replica
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    auto result = model(x);
    points = result["points"];
    torch::mse_loss(result["y"], y).backward();
    optimizer.step();
  }

  if (lockstep::get_rank() == 0) {
    std::printf(
        "a batch of %ld over %ld replicas:", static_cast<long>(x.size(0)),
        static_cast<long>(points.size(0)));
    for (int64_t replica = 0; replica < points.size(0); ++replica) {
      std::printf("%s %ld points on %s", replica == 0 ? "" : ",",
                  static_cast<long>(points[replica].item<int64_t>()),
                  model.device_ids()[replica].str().c_str());
    }
    std::printf("\ny = %.2f x + %.2f\n", line->linear->weight.item<double>(),
                line->linear->bias.item<double>());
  }
}
