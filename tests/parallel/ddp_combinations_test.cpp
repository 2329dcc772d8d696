// The options of DistributedDataParallel as a table: trains every possible
// combination for some steps, on shared memory and (only some combinations) on
// Gloo, and compares with one process on the batches of all ranks.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;
using torch::Tensor;

enum class Graph { plain, find_unused, static_graph };
enum class Step {
  optimizer,
  hook,
  in_backward,
  sharded,
  sharded_shared,
  sharded_in_backward
};
enum class Zeroing { to_none, to_zero };

struct Cell {
  bool views;
  Graph graph;
  double bucket_cap_mb;
  bool checks_nan;
  bool skips_unused;
  Step step;
  int micro_batches;
  Zeroing zeroing;

  bool possible() const {
    if (skips_unused && graph == Graph::plain) return false;
    // An optimizer that steps in backward leaves no gradient to zero.
    const bool in_backward =
        step == Step::in_backward || step == Step::sharded_in_backward;
    return !in_backward || zeroing == Zeroing::to_none;
  }
  std::string name() const {
    std::ostringstream text;
    text << "views " << views << ", graph " << static_cast<int>(graph)
         << ", bucket_cap_mb " << bucket_cap_mb << ", checks_nan " << checks_nan
         << ", skips_unused " << skips_unused << ", step "
         << static_cast<int>(step) << ", micro_batches " << micro_batches
         << ", zeroing " << static_cast<int>(zeroing);
    return text.str();
  }
};

std::vector<Cell> table() {
  std::vector<Cell> cells;
  const bool both[] = {false, true};
  for (const auto graph :
       {Graph::plain, Graph::find_unused, Graph::static_graph})
    for (const auto step :
         {Step::optimizer, Step::hook, Step::in_backward, Step::sharded,
          Step::sharded_shared, Step::sharded_in_backward})
      for (const double cap : {1e-6, 1e-4, 25.0})
        for (const bool views : both)
          for (const bool checks_nan : both)
            for (const bool skips_unused : both)
              for (const int micro_batches : {1, 2})
                for (const auto zeroing : {Zeroing::to_none, Zeroing::to_zero})
                  cells.push_back({views, graph, cap, checks_nan, skips_unused,
                                   step, micro_batches, zeroing});
  std::erase_if(cells, [](const Cell& cell) { return !cell.possible(); });
  return cells;
}

// Has a weight that is used twice, two weights of equal size that meet in one
// node, a branch that some iterations leave out, and a layer that all leave
// out.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool has_idle) {
    torch::manual_seed(11);
    auto make = [&](const char* name, at::IntArrayRef sizes) {
      return register_parameter(name, torch::randn(sizes, torch::kDouble) / 2);
    };
    twice = make("twice", {3, 3});
    bias = make("bias", {3});
    left = make("left", {3, 4});
    right = make("right", {3, 4});
    branch = make("branch", {4});
    if (has_idle) idle = make("idle", {5});
  }
  Tensor forward(const Tensor& x, bool takes_branch) {
    auto h = torch::tanh(torch::tanh(x.mm(twice) + bias).mm(twice));
    h = h.mm(left * right);
    return takes_branch ? h * branch : h;
  }
  Tensor twice, bias, left, right, branch, idle;
};

Tensor batch(int rank, int step, int micro_batch) {
  torch::manual_seed(1000 * rank + 10 * step + micro_batch);
  return torch::randn({2, 3}, torch::kDouble);
}

// Returns whether the rank's graph has the branch; of two ranks, neither has it
// in step 1.
bool takes_branch(const Cell& cell, int rank, int step) {
  return cell.graph != Graph::find_unused || (rank + step) % 3 == 0;
}

Tensor loss_of(NetImpl& net, const Cell& cell, int rank, int step, int micro) {
  return net.forward(batch(rank, step, micro), takes_branch(cell, rank, step))
      .square()
      .sum();
}

torch::optim::SGDOptions sgd() {
  return torch::optim::SGDOptions(0.05).momentum(0.9);
}

CommHook averaging_hook(int size) {
  return [size](GradBucket& bucket) {
    auto buffer = bucket.buffer();
    all_reduce(buffer);
    buffer.div_(size);
    return completed_future(buffer);
  };
}

constexpr int kSteps = 4;

std::vector<Tensor> trained_by_one_process(const Cell& cell, int size) {
  NetImpl net(cell.graph != Graph::plain);
  torch::optim::SGD optimizer(net.parameters(), sgd());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad(cell.zeroing == Zeroing::to_none);
    for (int micro = 0; micro < cell.micro_batches; ++micro) {
      for (int rank = 0; rank < size; ++rank) {
        (loss_of(net, cell, rank, step, micro) / size).backward();
      }
    }
    optimizer.step();
  }
  return net.parameters();
}

std::vector<Tensor> trained(const Cell& cell, const World& world) {
  auto net = std::make_shared<NetImpl>(cell.graph != Graph::plain);
  DistributedDataParallel<std::shared_ptr<NetImpl>> model(
      net, {.bucket_cap_mb = cell.bucket_cap_mb,
            .gradient_as_bucket_view = cell.views,
            .find_unused_parameters = cell.graph == Graph::find_unused,
            .static_graph = cell.graph == Graph::static_graph,
            .skip_all_reduce_unused_params = cell.skips_unused,
            .check_for_nan_in_grad = cell.checks_nan});
  using Sharded = ZeroRedundancyOptimizer<torch::optim::SGD>;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  Sharded* sharded = nullptr;
  switch (cell.step) {
    case Step::hook:
      model.register_comm_hook(averaging_hook(world.size));
      [[fallthrough]];
    case Step::optimizer:
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), sgd());
      break;
    case Step::in_backward:
      model.apply_optimizer_in_backward([](std::vector<Tensor> one) {
        return std::make_unique<torch::optim::SGD>(std::move(one), sgd());
      });
      break;
    default: {
      auto made = std::make_unique<Sharded>(
          model, sgd(),
          ZeroRedundancyOptions{
              .shared_parameters = cell.step == Step::sharded_shared,
              .step_in_backward = cell.step == Step::sharded_in_backward});
      sharded = made.get();
      optimizer = std::move(made);
    }
  }
  for (int step = 0; step < kSteps; ++step) {
    if (optimizer) optimizer->zero_grad(cell.zeroing == Zeroing::to_none);
    const auto forward = [&](int micro) {
      return model(batch(world.rank, step, micro),
                   takes_branch(cell, world.rank, step))
          .square()
          .sum();
    };
    for (int micro = 0; micro + 1 < cell.micro_batches; ++micro) {
      const auto guard = model.no_sync();
      forward(micro).backward();
    }
    forward(cell.micro_batches - 1).backward();
    if (optimizer) optimizer->step();
  }
  if (sharded != nullptr) sharded->synchronize();
  std::vector<Tensor> copies;
  for (const auto& parameter : net->parameters()) {
    copies.push_back(parameter.detach().clone());
  }
  if (sharded != nullptr) barrier();  // peers may still copy this rank's memory
  return copies;
}

// Trains one cell in `every`.
void train_cells(const World& world, std::vector<Cell> cells, size_t every) {
  int different = 0;
  for (size_t i = world.size % every; i < cells.size(); i += every) {
    const auto& cell = cells[i];
    SCOPED_TRACE(cell.name());
    const auto expected = trained_by_one_process(cell, world.size);
    const auto got = trained(cell, world);
    for (size_t k = 0; k < expected.size(); ++k) {
      const bool equal = torch::allclose(got[k], expected[k], 1e-10, 1e-12);
      EXPECT_TRUE(equal) << "parameter " << k;
      if (!equal) ++different;
    }
    ASSERT_LT(different, 10) << "and so on";
  }
}

WORLD_TEST(DdpCombinations, OnSharedMemory, 2, 3) {
  auto group = init_process_group("lockstep");
  train_cells(world, table(), world.size == 2 ? 3 : 9);
}

WORLD_TEST(DdpCombinations, EachOnSharedMemory, 2, 3) {
  auto group = init_process_group("lockstep");
  train_cells(world, table(), world.size == 2 ? 1 : 3);
}

WORLD_TEST(DdpCombinations, OnGloo, 2, 3) {
  auto group = init_process_group("gloo");
  auto cells = table();
  std::erase_if(cells, [](const Cell& cell) {
    return cell.step == Step::sharded_shared;  // Gloo has no shared memory
  });
  train_cells(world, std::move(cells), 29);
}

}  // namespace
}  // namespace lockstep::internal
