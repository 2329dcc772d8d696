#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "tests/harness/process_world.h"

// A model of blocks, with and without units, and its training by one process
// and by several.
namespace lockstep::internal::testing {

// Stands in the place of FullyShard in the model of one process.
template <typename Module>
class PlainUnit {
 public:
  template <typename Make>
  explicit PlainUnit(const Make& make, const FullyShardOptions& = {})
      : module_(make()) {}
  template <typename... Args>
  auto operator()(Args&&... args) {
    return module_(std::forward<Args>(args)...);
  }
  auto* operator->() const { return module_.get(); }
  auto& ptr() const { return module_.ptr(); }

 private:
  mutable Module module_;
};

// Sizes that two to four ranks cannot divide evenly.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(std::vector{width}));
    up = register_module("up", torch::nn::Linear(width, 3 * width - 1));
    down = register_module("down", torch::nn::Linear(3 * width - 1, width));
    gain = register_parameter("gain", torch::full({1}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + gain * down(up(norm(x)).tanh());
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor gain;
};
TORCH_MODULE(Block);

inline constexpr int64_t kWidth = 11;
inline constexpr int64_t kTokens = 13;

template <template <typename> class Unit>
struct BlockNetImpl : torch::nn::Module {
  explicit BlockNetImpl(const FullyShardOptions& options, int count = 3,
                        at::ScalarType dtype = at::kDouble,
                        at::Device device = at::kCPU) {
    embedding =
        register_module("embedding", torch::nn::Embedding(kTokens, kWidth));
    embedding->to(device, dtype);
    for (int i = 0; i < count; ++i) {
      blocks.emplace_back(
          [&] {
            Block block(kWidth);
            block->to(device, dtype);
            return block;
          },
          options);
      register_module("block" + std::to_string(i), blocks.back().ptr());
    }
    head = register_module("head", torch::nn::Linear(kWidth, kTokens));
    head->to(device, dtype);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  torch::nn::Embedding embedding{nullptr};
  std::vector<Unit<Block>> blocks;
  torch::nn::Linear head{nullptr};
};

template <template <typename> class Unit>
struct BlockNet : torch::nn::ModuleHolder<BlockNetImpl<Unit>> {
  using torch::nn::ModuleHolder<BlockNetImpl<Unit>>::ModuleHolder;
};
using PlainNet = BlockNet<PlainUnit>;
using ShardedNet = BlockNet<FullyShard>;

// Returns the batch of one rank in one step, and the loss for it.
inline at::Tensor tokens_of(int step, int rank) {
  torch::manual_seed(static_cast<uint64_t>(1000 + step * 10 + rank));
  return torch::randint(0, kTokens, {5, 4});
}
inline at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& tokens) {
  return torch::nn::functional::cross_entropy(
      logits.reshape({-1, kTokens}).to(at::kDouble), tokens.reshape({-1}));
}

inline constexpr int kFsdpSteps = 6;

// The ways in which full parameters come into being.
struct FsdpPath {
  const char* name;
  const char* backend;
  bool shared_memory;
  bool two_hosts;
};
inline constexpr FsdpPath kFsdpPaths[] = {
    {"one copy in shared memory", "lockstep", true, false},
    {"gathered in shared memory", "lockstep", false, false},
    {"gathered by Gloo", "gloo", true, false},
    {"gathered between hosts", "lockstep", true, true},
};

// Lets each half of the ranks divide the parameters: two replicas.
inline void take_replicas(const World& world, FullyShardOptions& options) {
  const int half = world.size / 2;
  std::vector<std::vector<int>> rows(2), columns(half);
  for (int rank = 0; rank < world.size; ++rank) {
    rows[rank / half].push_back(rank);
    columns[rank % half].push_back(rank);
  }
  options.group = new_subgroups_by_enumeration(rows);
  options.replicate_group = new_subgroups_by_enumeration(columns);
}

inline void on_fsdp_paths(const World& world,
                          const std::function<void(FullyShardOptions)>& body) {
  for (const auto& path : kFsdpPaths) {
    if (path.two_hosts && world.size == 1) continue;
    SCOPED_TRACE(path.name);
    if (path.two_hosts) {
      ::setenv("LOCKSTEP_HOST_ID", 2 * world.rank < world.size ? "a" : "b", 1);
    }
    auto group = init_process_group(path.backend);
    ::unsetenv("LOCKSTEP_HOST_ID");
    torch::manual_seed(7);
    body({.shared_memory = path.shared_memory});
  }
}

// Returns the full values of a model's shards, by name, on every rank.
inline torch::OrderedDict<std::string, at::Tensor> full_values(
    const torch::nn::Module& module,
    const std::function<at::Tensor(const at::Tensor&)>& part = {}) {
  torch::OrderedDict<std::string, at::Tensor> full;
  for (const auto& item : module.named_parameters()) {
    const auto& shard = item.value();
    const auto* layout = layout_of(shard);
    if (layout == nullptr) {
      full.insert(item.key(), part ? part(shard) : shard);
      continue;
    }
    auto whole = torch::zeros({layout->box.numel()},
                              shard.options().requires_grad(false));
    const auto own = part ? part(shard) : shard.detach();
    if (own.numel() > 0) {
      whole.slice(0, layout->range->begin, layout->range->end)
          .copy_(own.view({-1}));
    }
    all_reduce(whole, {.group = layout->groups.back()});
    full.insert(item.key(), whole.view(layout->shape));
  }
  return full;
}

inline void expect_equal(const torch::nn::Module& sharded,
                         const torch::nn::Module& plain, double bound) {
  const auto full = full_values(sharded);
  const auto want = plain.named_parameters();
  ASSERT_EQ(full.keys(), want.keys());
  for (const auto& item : want) {
    ASSERT_EQ(sharded.named_parameters()[item.key()].dim(),
              std::max<int64_t>(item.value().dim(), 1));
    const double difference =
        (full[item.key()] - item.value()).abs().max().item<double>();
    EXPECT_LE(difference, bound) << item.key();
  }
}

// One step of one process over the batches of all ranks.
inline double plain_step(PlainNet& net, torch::optim::Optimizer& optimizer,
                         int step, int world_size, int micro_batches = 1) {
  optimizer.zero_grad();
  double sum = 0;
  for (int micro = 0; micro < micro_batches; ++micro) {
    for (int rank = 0; rank < world_size; ++rank) {
      const auto tokens = tokens_of(step * micro_batches + micro, rank);
      auto loss = loss_of(net(tokens), tokens) / world_size;
      loss.backward();
      sum += loss.item<double>();
    }
  }
  optimizer.step();
  return sum;
}

inline torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.01).weight_decay(0.1);
}

// Trains `Net` with units and without, on equal batches and from equal values:
// the parameters agree. `loss(net, x)` returns a loss.
template <template <template <typename> class> class Net, typename Loss>
void expect_trains_alike(const World& world, const FullyShardOptions& options,
                         const Loss& loss, int steps = 3) {
  torch::manual_seed(3);
  Net<PlainUnit> plain(options);
  torch::manual_seed(3);
  FullyShard<Net<FullyShard>> model([&] { return Net<FullyShard>(options); },
                                    options);
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto batch = [](int step, int rank) {
    torch::manual_seed(static_cast<uint64_t>(1000 + step * 10 + rank));
    return torch::randn({4, kWidth}, torch::kDouble);
  };
  for (int step = 0; step < steps; ++step) {
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
    for (int rank = 0; rank < world.size; ++rank) {
      (loss(plain, batch(step, rank)) / world.size).backward();
    }
    loss(model, batch(step, world.rank)).backward();
    plain_optimizer.step();
    optimizer.step();
  }
  expect_equal(*model.ptr(), *plain, 1e-12);
}

// One model with units, and the same model without, from the same values.
struct BothNets {
  explicit BothNets(const FullyShardOptions& options)
      : plain(seeded<PlainNet>(options)),
        model([&] { return seeded<ShardedNet>(options); }, options),
        plain_optimizer(plain->parameters(), adamw()),
        optimizer(model->parameters(), adamw()) {}

  template <typename Net>
  static Net seeded(const FullyShardOptions& options) {
    torch::manual_seed(3);
    return Net(options);
  }
  double plain_step(int step, int world_size, int micro_batches = 1) {
    return testing::plain_step(plain, plain_optimizer, step, world_size,
                               micro_batches);
  }
  // Returns this rank's loss.
  at::Tensor backward(int step, int rank) {
    const auto tokens = tokens_of(step, rank);
    auto loss = loss_of(model(tokens), tokens);
    loss.backward();
    return loss.detach();
  }
  void step(int step, int rank) {
    optimizer.zero_grad();
    backward(step, rank);
    optimizer.step();
  }
  void expect_equal(double bound) const {
    testing::expect_equal(*model.ptr(), *plain, bound);
  }

  PlainNet plain;
  FullyShard<ShardedNet> model;
  torch::optim::AdamW plain_optimizer;
  torch::optim::AdamW optimizer;
};

}  // namespace lockstep::internal::testing
