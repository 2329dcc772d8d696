// 10 Mixed precision: autocast computes in 16 bits where that does no harm;
// parameters and gradients stay in 32. On a GPU the 16 bits are float16, and
// GradScaler keeps small gradients from vanishing. On the CPU they are
// bfloat16, which has the range of float32 and needs no scale: the same lines
// run with the scaler disabled. (The output below is from a machine without
// GPUs.)
//
//   $ build/bin/10_mixed_precision
//   cpu: outputs in BFloat16, gradients in Float, scale 1
//   loss 1.00 at first, 0.00 at the end
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/10_mixed_precision
//   cpu: outputs in BFloat16, gradients in Float, scale 1
//   loss 1.00 at first, 0.00 at the end

#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  auto group = lockstep::init_process_group();
  const auto device = lockstep::local_device();
  const auto dtype = device.is_cuda() ? torch::kHalf : torch::kBFloat16;

  torch::manual_seed(lockstep::get_rank());  // each rank has points of its own
  torch::nn::Linear last(32, 1);
  torch::nn::init::zeros_(last->weight);
  torch::nn::init::zeros_(last->bias);
  torch::nn::Sequential net(torch::nn::Linear(2, 32), torch::nn::ReLU(), last);
  net->to(device);
  lockstep::DistributedDataParallel<torch::nn::Sequential> model(net);
  lockstep::optim::AdamW optimizer(net->parameters(), {.lr = 0.01});
  lockstep::GradScaler scaler(
      {.device = device.type(), .enabled = dtype == torch::kHalf});

  torch::Tensor output;
  double first_loss = 0;
  double loss_now = 0;
  for (int step = 0; step < 300; ++step) {
    // x: corners of a square; y: 1 if both signs are the same, else -1.
    auto x = torch::randint(0, 2, {32, 2}, device) * 2.0 - 1.0;
    auto y = x.prod(1, /*keepdim=*/true);

    torch::Tensor loss;
    {
      lockstep::Autocast mixed(device.type(), dtype);  // a guard
      output = model(x);
      loss = torch::mse_loss(output, y);
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();  // averages the scaled gradients
    scaler.unscale_(optimizer);     // so that the norm is the true one
    lockstep::clip_grad_norm_(optimizer, /*max_norm=*/1.0);
    scaler.step(optimizer);  // on no rank if the gradients overflowed
    scaler.update();

    loss_now = loss.item<double>();
    if (step == 0) first_loss = loss_now;
  }

  if (lockstep::get_rank() == 0) {
    std::printf("%s: outputs in %s, gradients in %s, scale %.0f\n",
                device.str().c_str(), c10::toString(output.scalar_type()),
                c10::toString(last->weight.grad().scalar_type()),
                scaler.get_scale());
    std::printf("loss %.2f at first, %.2f at the end\n", first_loss, loss_now);
  }
}
