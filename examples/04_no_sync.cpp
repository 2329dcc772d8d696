// 04 Gradient accumulation: four small batches, one step. Under no_sync() a
// backward adds to this rank's own gradients and sends nothing; the first
// backward outside of it averages the sum.
//
//   $ build/bin/04_no_sync
//   cpu: after 3 of 4 batches: gradient 3.00
//   cpu: after 4 of 4 batches: gradient 4.00
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/04_no_sync
//   cpu: after 3 of 4 batches: gradient 3.00
//   cpu: after 4 of 4 batches: gradient 6.00

#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  auto group = lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  const auto device = lockstep::local_device();

  torch::nn::Linear net(1, 1);
  net->to(device);
  lockstep::DistributedDataParallel<torch::nn::Linear> model(net);
  // The gradient of w * x is x: each batch adds 1 on rank 0 and 2 on rank 1.
  auto x = torch::full({1, 1}, 1.0 + rank, device);
  auto print = [&](int batches) {
    if (rank != 0) return;
    std::printf("%s: after %d of 4 batches: gradient %.2f\n",
                device.str().c_str(), batches,
                net->weight.grad().item<double>());
  };

  {
    auto no_sync = model.no_sync();  // a guard: in effect while it lives
    for (int batch = 0; batch < 3; ++batch) model(x).sum().backward();
  }
  print(3);  // rank 0's own: 3 * 1
  model(x).sum().backward();
  print(4);  // the ranks' mean of 4 * x; optimizer.step() would follow here
}
