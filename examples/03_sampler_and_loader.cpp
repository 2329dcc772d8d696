// 03 Sampler and loader: in each epoch one rank visits each sample. set_epoch()
// shuffles the samples anew, in the same order as in Python.
//
//   $ build/bin/03_sampler_and_loader
//   epoch 0, rank 0: [4 1 7] [5 3 9] [0 8 6] [2]
//   epoch 1, rank 0: [5 6 1] [2 0 8] [9 3 7] [4]
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/03_sampler_and_loader
//   epoch 0, rank 0: [4 7 3] [0 6]
//   epoch 0, rank 1: [1 5 9] [8 2]
//   epoch 1, rank 0: [5 1 0] [9 7]
//   epoch 1, rank 1: [6 2 8] [3 4]

#include <cstdio>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

std::string text_of(const torch::Tensor& samples, int64_t batch_size) {
  std::string text;
  for (const auto& batch : samples.split(batch_size)) {
    std::string numbers;
    for (int64_t i = 0; i < batch.size(0); ++i) {
      numbers += " " + std::to_string(batch[i].item<int64_t>());
    }
    text += " [" + numbers.substr(1) + "]";
  }
  return text;
}

}  // namespace

int main() {
  auto group = lockstep::init_process_group();
  const int world_size = lockstep::get_world_size();

  auto numbers = torch::arange(10);
  lockstep::TensorDataset dataset(/*data=*/numbers, /*target=*/numbers);
  lockstep::DistributedSampler sampler(dataset,
                                       {.seed = 0});  // this rank's part
  lockstep::DataLoader loader(dataset, sampler, {.batch_size = 3});

  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);  // the loader's next pass has a new order
    std::vector<torch::Tensor> batches;
    for (auto& batch : loader) batches.push_back(batch.data);

    // Only for printing: every rank gets the samples of all ranks.
    auto mine = torch::cat(batches);
    std::vector<torch::Tensor> seen(world_size);
    for (auto& samples : seen) samples = torch::empty_like(mine);
    lockstep::all_gather(seen, mine);
    if (lockstep::get_rank() != 0) continue;
    for (int rank = 0; rank < world_size; ++rank) {
      std::printf("epoch %ld, rank %d:%s\n", static_cast<long>(epoch), rank,
                  text_of(seen[rank], loader.options().batch_size).c_str());
    }
  }
}
