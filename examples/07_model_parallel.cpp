// 07 Model parts on two devices, for a model that is too large for one. The
// forward pass moves the activations to the second device, the backward pass
// moves the gradients back. Each rank takes two GPUs; if there are too few,
// both parts are on the CPU. (The output below is from a machine without GPUs.)
//
//   $ build/bin/07_model_parallel
//   part 1 on cpu, part 2 on cpu, output 6.00
//   gradients: part 1 3.00, part 2 2.00
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/07_model_parallel
//   part 1 on cpu, part 2 on cpu, output 6.00
//   gradients: part 1 4.50, part 2 3.00

#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl(torch::Device first, torch::Device second)
      : devices{first, second} {
    using Options = torch::nn::LinearOptions;
    part1 =
        register_module("part1", torch::nn::Linear(Options(1, 1).bias(false)));
    part2 =
        register_module("part2", torch::nn::Linear(Options(1, 1).bias(false)));
    torch::nn::init::constant_(part1->weight, 2);
    torch::nn::init::constant_(part2->weight, 3);
    part1->to(first);
    part2->to(second);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto activations = part1(x.to(devices[0]));
    return part2(activations.to(devices[1]));  // autograd moves it back
  }
  torch::Device devices[2];
  torch::nn::Linear part1{nullptr};
  torch::nn::Linear part2{nullptr};
};
TORCH_MODULE(TwoParts);

int main() {
  auto group = lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  const int first = 2 * lockstep::get_local_rank();
  const bool gpus = first + 1 < static_cast<int>(torch::cuda::device_count());
  auto device = [&](int number) {
    const auto index = static_cast<c10::DeviceIndex>(first + number);
    return gpus ? torch::Device(torch::kCUDA, index) : torch::kCPU;
  };

  // Gradients are averaged as for any other model, each part on its device.
  lockstep::DistributedDataParallel<TwoParts> model(
      TwoParts(device(0), device(1)));
  auto output = model(torch::full({1, 1}, 1.0 + rank));  // 2 * 3 * x
  output.sum().backward();

  if (rank == 0) {
    auto& parts = *model.module();
    std::printf("part 1 on %s, part 2 on %s, output %.2f\n",
                parts.devices[0].str().c_str(), parts.devices[1].str().c_str(),
                output.item<double>());
    std::printf("gradients: part 1 %.2f, part 2 %.2f\n",  // 3 x, 2 x
                parts.part1->weight.grad().item<double>(),
                parts.part2->weight.grad().item<double>());
  }
}
