// Python's DistributedDataParallel and ours train one model in one group: they
// run the same operations and have the same parameters on every rank, bit by
// bit. The parameters equal those of an all-Python world, and those of a world
// of our ranks only.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;

constexpr int64_t kSteps = 20;
constexpr int64_t kRows = 4;
constexpr int64_t kInputs = 6;
// How far all-Python and all-C++ runs may differ (see ddp_parity_test.cpp).
constexpr double kBound = 1e-6;

struct Job {
  std::string model;
  std::optional<double> bucket_cap_mb;
  int64_t accumulate;
  // The options that both wrappers have, under names of python_rank.py.
  std::string option = "none";
  DistributedDataParallelOptions options = {};

  std::string name() const {
    std::ostringstream text;
    text << model << ':';
    if (bucket_cap_mb) {
      text << *bucket_cap_mb;
    } else {
      text << "default";
    }
    text << ':' << accumulate << ':' << option;
    return text.str();
  }
};

// Buckets of 300 bytes and of 1 KiB have a few parameters each.
const std::vector<Job>& jobs() {
  static const std::vector<Job> all{
      {"mlp", std::nullopt, 1},
      {"mlp", 0.0003, 2},
      {"batchnorm", std::nullopt, 2},
      {"batchnorm", 0.001, 1},
      {"batchnorm", 0.0003, 3},
      // Python's static_graph does not work with no_sync().
      {"mlp", 0.0003, 1, "static_graph", {.static_graph = true}},
      {"spare", 0.0003, 1, "static_graph", {.static_graph = true}},
      {"spare", 0.0003, 2, "find_unused", {.find_unused_parameters = true}},
      {"spare",
       0.0003,
       1,
       "skip_static",
       {.static_graph = true, .skip_all_reduce_unused_params = true}},
      {"spare",
       0.0003,
       1,
       "skip_found",
       {.find_unused_parameters = true, .skip_all_reduce_unused_params = true}},
      {"mlp", 0.0003, 1, "views", {.gradient_as_bucket_view = true}},
      {"mlp", 0.0003, 1, "no_views", {.gradient_as_bucket_view = false}},
      {"batchnorm",
       std::nullopt,
       1,
       "local_buffers",
       {.broadcast_buffers = false}},
      {"batchnorm",
       std::nullopt,
       1,
       "buffers_once",
       {.forward_sync_buffers = false}},
      {"batchnorm", std::nullopt, 1, "no_init_sync", {.init_sync = false}},
      {"mlp", 0.0003, 1, "batched_grad_copy"},
  };
  return all;
}

// These are the same as ramp(), batch() and make_net() of python_rank.py.
torch::Tensor ramp(int64_t size, int64_t start) {
  auto numbers = (torch::arange(size, torch::kLong) * 37 + start) % 1009;
  return (numbers - 504).to(torch::kFloat) / 504;
}

// Has a parameter that no rank uses.
struct Spare : torch::nn::Module {
  Spare() { register_parameter("spare", torch::zeros({100})); }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};

torch::nn::Sequential make_net(const std::string& model, int rank) {
  using namespace torch::nn;
  Sequential net;
  if (model == "mlp") {
    net = Sequential(Linear(kInputs, 16), Tanh(), Linear(16, 16), Tanh(),
                     Linear(16, 1));
  } else if (model == "spare") {
    net = Sequential(Linear(kInputs, 16), std::make_shared<Spare>(), Tanh(),
                     Linear(16, 1));
  } else {
    net = Sequential(Linear(kInputs, 16), BatchNorm1d(16), Tanh(),
                     Linear(16, 8), BatchNorm1d(8), Tanh(), Linear(8, 1));
  }
  torch::NoGradGuard no_grad;
  int64_t number = 0;
  for (auto& parameter : net->parameters()) {
    auto numbers = ramp(parameter.numel(), 100 * number++ + rank);
    parameter.copy_(numbers.view_as(parameter) / 2);
  }
  for (auto& buffer : net->buffers()) buffer.add_(rank);
  return net;
}

void train(DistributedDataParallel<torch::nn::Sequential>& model,
           int64_t accumulate, int rank) {
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < accumulate; ++micro) {
      int64_t start = 104729 * rank + 7919 * (step * accumulate + micro);
      auto x = ramp(kRows * kInputs, start).view({kRows, kInputs});
      auto y = ramp(kRows, start + 1).view({kRows, 1});
      auto backward = [&] {
        (torch::mse_loss(model(x), y) / static_cast<double>(accumulate))
            .backward();
      };
      if (micro < accumulate - 1) {
        auto on_this_rank_only = model.no_sync();
        backward();
      } else {
        backward();
      }
    }
    optimizer.step();
  }
}

// Passes the operations of DistributedDataParallel on to another backend, and
// records them as python_rank.py does.
class RecordingBackend final : public c10d::Backend {
 public:
  explicit RecordingBackend(c10::intrusive_ptr<c10d::Backend> backend)
      : Backend(backend->getRank(), backend->getSize()),
        backend_(std::move(backend)) {}

  const std::string getBackendName() const override { return "recording"; }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override {
    note("broadcast", tensors[0]);
    return backend_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override {
    note("allreduce", tensors[0]);
    return backend_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    note("allgather", inputs[0]);
    return backend_->allgather(outputs, inputs, options);
  }

  // Returns the record, one line per operation.
  const std::string& noted() const { return noted_; }

 private:
  void note(const char* operation, const at::Tensor& tensor) {
    std::string dtype = c10::toString(tensor.scalar_type());
    if (dtype == "Long") dtype = "int64";
    if (dtype == "Int") dtype = "int32";
    if (dtype == "Float") dtype = "float32";
    noted_ += c10::str(operation, " ", tensor.sizes(), " ", dtype, "\n");
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string noted_;
};

std::string flat_state(const torch::nn::Sequential& net, bool buffers) {
  std::vector<torch::Tensor> parts;
  for (const auto& p : net->parameters()) parts.push_back(p.detach());
  if (buffers) {
    for (const auto& b : net->buffers()) parts.push_back(b);
  }
  for (auto& part : parts) part = part.flatten().to(torch::kDouble);
  auto flat = torch::cat(parts);
  return {static_cast<const char*>(flat.data_ptr()), flat.nbytes()};
}

torch::Tensor numbers(std::string bytes) {
  return torch::from_blob(bytes.data(),
                          {static_cast<int64_t>(bytes.size() / 8)},
                          torch::kDouble)
      .clone();
}

std::string rendezvous_of(const fs::path& folder) {
  return "file://" + (folder / "rendezvous").string();
}

// Replaces this rank with a process of `python`.
void be_python(const World& world, const fs::path& folder,
               std::vector<std::string> arguments,
               const char* python = LOCKSTEP_TORCH_PYTHON) {
  // `timeout` ends the process even if this rank is killed.
  std::vector<std::string> command{"/usr/bin/timeout",
                                   "--kill-after=5",
                                   "45",
                                   python,
                                   LOCKSTEP_SOURCE_DIR
                                   "/tests/parallel/python_rank.py",
                                   "--init-method=" + rendezvous_of(folder),
                                   "--rank=" + std::to_string(world.rank),
                                   "--world-size=" + std::to_string(world.size),
                                   "--output=" + folder.string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  testing::RunningProgram program(
      command, {.environment = {std::string("PATH=") + std::getenv("PATH"),
                                "TMPDIR=" + world.folder.string(),
                                // Our ranks on one host use it, too.
                                "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"}});
  auto result = program.finish(std::chrono::seconds(52));
  EXPECT_EQ(result.exit_code, 0) << testing::words_of_peer(result);
}

void train_all_in_python(const World& world, const fs::path& folder) {
  std::vector<std::string> names;
  for (const Job& job : jobs()) names.push_back(job.name());
  be_python(world, folder, names);
}

ProcessGroupGuard join(const World& world, const fs::path& folder,
                       const char* backend = "cpu:gloo") {
  return init_process_group(backend, {.init_method = rendezvous_of(folder),
                                      .timeout = std::chrono::seconds(40),
                                      .world_size = world.size,
                                      .rank = world.rank});
}

fs::path file_of(const fs::path& folder, const Job& job, int rank,
                 const char* kind) {
  return folder / (job.name() + ":" + std::to_string(rank) + kind);
}

void train_all_here(const World& world, const fs::path& folder) {
  auto group = join(world, folder);
  for (const Job& job : jobs()) {
    auto recording = c10::make_intrusive<RecordingBackend>(
        c10::intrusive_ptr<c10d::Backend>::reclaim_copy(
            &inside(group).backend(c10::kCPU)));
    const ProcessGroupPtr recorded(std::make_shared<GroupInside>(
        group->name(), group->rank(), group->global_ranks(), group->timeout(),
        GroupInside::Generation{.store = inside(group).store(),
                                .backends = {{c10::kCPU, recording}}},
        group->backend_config(),
        /*checks_calls=*/false));
    // Without init_sync all ranks must begin alike.
    auto net = make_net(job.model, job.options.init_sync ? world.rank : 0);
    auto options = job.options;
    options.process_group = recorded;
    options.bucket_cap_mb = job.bucket_cap_mb;
    DistributedDataParallel<torch::nn::Sequential> model(net, options);
    train(model, job.accumulate, world.rank);
    std::ofstream(file_of(folder, job, world.rank, ".ops"))
        << recording->noted();
    std::ofstream(file_of(folder, job, world.rank, ".state"), std::ios::binary)
        << flat_state(net, /*buffers=*/true);
  }
}

void expect_same(const World& world, const fs::path& mixed,
                 const fs::path& other, const Job& job) {
  auto state = [&](const fs::path& folder, int rank) {
    return numbers(testing::read_file(file_of(folder, job, rank, ".state")));
  };
  auto operations = [&](const fs::path& folder, int rank) {
    return testing::read_file(file_of(folder, job, rank, ".ops"));
  };
  SCOPED_TRACE(job.name() + ", " + other.filename().string());
  auto parameters = static_cast<int64_t>(
      flat_state(make_net(job.model, 0), /*buffers=*/false).size() / 8);
  auto of_rank_zero = state(mixed, 0).narrow(0, 0, parameters);
  EXPECT_THAT(operations(mixed, 0), HasSubstr("allreduce ["));
  for (int rank = 0; rank < world.size; ++rank) {
    auto here = state(mixed, rank);
    EXPECT_TRUE(here.narrow(0, 0, parameters).equal(of_rank_zero))
        << "rank " << rank << " differs from rank 0";
    auto there = state(other, rank);
    ASSERT_EQ(here.numel(), there.numel());
    EXPECT_LE((here - there).abs().max().item<double>(), kBound);
    // Beside Python, static graphs and skipped buckets follow its order, which
    // is a slower one.
    const bool follows =
        job.options.static_graph || job.options.skip_all_reduce_unused_params;
    if (follows && other.filename() == "all ours") continue;
    EXPECT_EQ(operations(mixed, rank), operations(other, rank));
  }
}

void train_together(const World& world, int python_rank) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  auto root = world.folder / ("python" + std::to_string(python_rank));
  auto mixed = root / "mixed";
  auto ours = root / "all ours";
  auto theirs = world.folder / "all Python";  // shared by both cases
  for (const auto& folder : {mixed, ours}) fs::create_directories(folder);
  if (!fs::exists(file_of(theirs, jobs().back(), world.rank, ".state"))) {
    fs::create_directories(theirs);
    train_all_in_python(world, theirs);
  }
  if (world.rank == python_rank) {
    train_all_in_python(world, mixed);
  } else {
    train_all_here(world, mixed);
  }
  train_all_here(world, ours);
  // All ranks have ended the earlier runs, because rank 0 could not be here
  // otherwise.
  if (world.rank != 0) return;
  for (const Job& job : jobs()) {
    expect_same(world, mixed, theirs, job);
    expect_same(world, mixed, ours, job);
  }
}

WORLD_TEST(DdpWithPythonRank, TrainsWherePythonIsRankZero, 2) {
  train_together(world, 0);
}

WORLD_TEST(DdpWithPythonRank, TrainsWherePythonIsTheLastRank, 3) {
  train_together(world, world.size - 1);
}

// With lockstep-torch Python's ranks share memory with ours, but reduce by
// all_reduce() there, too.
WORLD_TEST(DdpWithPythonRank, TrainsInSharedMemory, 2) {
  if (!fs::exists(LOCKSTEP_WHEEL_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_WHEEL_PYTHON;
  }
  const std::vector<Job> trained{
      {"mlp", std::nullopt, 1},
      {"batchnorm", 0.0003, 3},
      {"spare", 0.0003, 2, "find_unused", {.find_unused_parameters = true}}};
  constexpr const char* kBackend = "cpu:lockstep";
  const auto mixed = world.folder / "shared memory";
  const auto ours = world.folder / "shared memory, all ours";
  const auto train_here = [&](const fs::path& folder) {
    auto group = join(world, folder, kBackend);
    for (const Job& job : trained) {
      auto net = make_net(job.model, world.rank);
      auto options = job.options;
      options.bucket_cap_mb = job.bucket_cap_mb;
      DistributedDataParallel<torch::nn::Sequential> model(net, options);
      train(model, job.accumulate, world.rank);
      std::ofstream(file_of(folder, job, world.rank, ".state"),
                    std::ios::binary)
          << flat_state(net, /*buffers=*/false);
    }
  };
  for (const auto& folder : {mixed, ours}) fs::create_directories(folder);
  if (world.rank == 1) {
    std::vector<std::string> arguments{std::string("--backend=") + kBackend};
    for (const Job& job : trained) arguments.push_back(job.name());
    be_python(world, mixed, arguments, LOCKSTEP_WHEEL_PYTHON);
  } else {
    train_here(mixed);
  }
  train_here(ours);  // so Python's process has ended
  if (world.rank != 0) return;
  for (const Job& job : trained) {
    SCOPED_TRACE(job.name());
    const auto parameters = [&](const fs::path& folder, int rank) {
      return numbers(testing::read_file(file_of(folder, job, rank, ".state")));
    };
    const auto expected = parameters(mixed, 0);
    EXPECT_TRUE(
        parameters(mixed, 1).narrow(0, 0, expected.numel()).equal(expected));
    EXPECT_LE((parameters(ours, 0) - expected).abs().max().item<double>(),
              kBound);
  }
}

// Python ranks compare only sizes, and write nothing to the store.
WORLD_TEST(DdpWithPythonRank, ADifferentModelIsNamed, 2) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  auto folder = world.folder / "mismatch";
  fs::create_directories(folder);
  if (world.rank == 0) {
    be_python(world, folder, {"--mismatch"});
    return;
  }
  auto group = join(world, folder);
  auto wrap = [] {
    DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 4));
  };
  EXPECT_THAT(wrap, ThrowsMessage<std::invalid_argument>(
                        AllOf(HasSubstr("rank 0 has 4 parameters"),
                              HasSubstr("rank 1 has 2 parameters"))));
  EXPECT_THAT(wrap, ThrowsMessage<std::invalid_argument>(AllOf(
                        HasSubstr("rank 1 has parameter 'weight' of [4, 3]"),
                        HasSubstr("rank 0 has [2, 3]"))));
}

}  // namespace
}  // namespace lockstep::internal
