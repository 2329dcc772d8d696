// Snapshots of trainings on GPUs: they hold the values after the step that was
// last enqueued, whatever the stream does, and go on on any device.

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

constexpr int64_t kFeatures = 6;

torch::nn::Sequential net_on(const at::Device& device) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, 9),
                            torch::nn::BatchNorm1d(9), torch::nn::Tanh(),
                            torch::nn::Dropout(0.4), torch::nn::Linear(9, 1));
  net->to(device);
  return net;
}

// One rank's training with a state in every tensor that a snapshot has.
struct Run {
  explicit Run(const at::Device& where, int64_t seed = 20)
      : device(where),
        model(net_on(where)),
        optimizer(model->parameters(), 0.05),
        state{.model = model.ptr(), .optimizer = &optimizer} {
    torch::manual_seed(static_cast<uint64_t>(seed));
  }

  // Every rank makes the same steps.
  void step() {
    const auto x = torch::linspace(-1, 1, 4 * kFeatures).view({4, -1}) +
                   static_cast<double>(state.step);
    optimizer.zero_grad();
    model->forward(x.to(device)).square().mean().backward();
    optimizer.step();
    ++state.step;
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
  // Parameters, buffers, and the optimizer's state.
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& one : model->buffers()) all.push_back(one);
    for (const auto& one : model->parameters()) {
      all.push_back(one.detach());
      const auto found = optimizer.state().find(one.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& adam =
          static_cast<const torch::optim::AdamParamState&>(*found->second);
      all.push_back(adam.exp_avg());
      all.push_back(adam.exp_avg_sq());
    }
    for (at::Tensor& one : all) one = one.cpu();
    return all;
  }
  double sum() const {
    double sum = 0;
    for (const auto& one : values()) sum += one.sum().item<double>();
    return sum;
  }

  at::Device device;
  torch::nn::Sequential model;
  torch::optim::Adam optimizer;
  TrainingState state;
};

const char* const kPaths[] = {"a.pt", "b.safetensors", "c/"};

std::string path_of(const World& world, const std::string& name) {
  const auto path = world.folder / name;
  if (world.rank == 0) std::filesystem::remove_all(path);
  barrier();
  return path.string();
}

WORLD_TEST(SimgpuSnapshots, GoOnAsIfTheyHadNotBeenSaved, 1, 2) {
  with_delays([&](const at::Device& device) {
    Run whole(device);
    whole.steps(7);
    for (const char* name : kPaths) {
      SCOPED_TRACE(name);
      const auto path = path_of(world, name);
      {
        Run first(device);
        first.steps(3);
        save_snapshot(path, first.state);
      }
      Run second(device, /*seed=*/99);
      ASSERT_TRUE(load_snapshot(path, second.state));
      EXPECT_EQ(second.state.step, 3);
      second.steps(4);
      EXPECT_EQ(second.sum(), whole.sum());
    }
  });
}

// Before, a device was left out: dropout drew other numbers after a load.
WORLD_TEST(SimgpuSnapshots, GeneratorsOfGpusAreRestored, 1, 2) {
  with_delays([&](const at::Device& device) {
    for (const char* name : kPaths) {
      const auto path = path_of(world, name);
      Run run(device, 30 + world.rank);
      const auto draw = [&] {
        return torch::cat({torch::rand({3}, device).cpu(), torch::rand({3})});
      };
      draw();
      save_snapshot(path, run.state);
      const auto after = draw();
      torch::manual_seed(1000);
      ASSERT_TRUE(load_snapshot(path, run.state));
      EXPECT_TRUE(torch::equal(draw(), after)) << name;
    }
  });
}

WORLD_TEST(SimgpuSnapshots, OtherDevicesLoadThem, 1, 2) {
  with_delays([&](const at::Device& device) {
    const at::Device other(kDeviceType,
                           static_cast<c10::DeviceIndex>(device.index() + 4));
    for (const char* name : kPaths) {
      for (const auto& [from, to] : {std::pair(device, at::Device(at::kCPU)),
                                     {at::Device(at::kCPU), device},
                                     {device, other}}) {
        SCOPED_TRACE(c10::str(name, " from ", from, " to ", to));
        const auto path = path_of(world, name);
        Run first(from);
        first.steps(2);
        save_snapshot(path, first.state);
        Run second(to, /*seed=*/99);
        ASSERT_TRUE(load_snapshot(path, second.state));
        for (const auto& one : second.model->parameters()) {
          EXPECT_EQ(one.device(), to);
        }
        for (const auto& [key, kept] : second.optimizer.state()) {
          EXPECT_EQ(static_cast<const torch::optim::AdamParamState&>(*kept)
                        .exp_avg()
                        .device(),
                    to);
        }
        EXPECT_EQ(second.sum(), first.sum());
        second.step();
        EXPECT_FALSE(std::isnan(second.sum()));
      }
    }
  });
}

// The staged copy is made after the step before it, and before the next.
WORLD_TEST(SimgpuSnapshots, TheSaverCopiesBetweenTwoSteps, 1, 2) {
  with_delays([&](const at::Device& device) {
    for (const char* name : kPaths) {
      for (const bool background : {false, true}) {
        SCOPED_TRACE(c10::str(name, background ? " in the background" : ""));
        const auto path = path_of(world, name);
        Run run(device);
        double saved_sum = 0;
        {
          Run reference(device);
          reference.steps(4);
          saved_sum = reference.sum();
          torch::manual_seed(20);
          SnapshotSaver saver(path, run.state,
                              {.every_steps = 4,
                               .on_saved =
                                   [](const SavedSnapshot& saved) {
                                     EXPECT_EQ(saved.error, "");
                                   },
                               .in_background = background,
                               .overlap_copy = background});
          for (int i = 0; i < 6; ++i) {
            saver.wait_for_copy();
            run.step();
            if (saver.is_due()) saver.save();
          }
          saver.wait();
        }
        Run loaded(device, /*seed=*/99);
        ASSERT_TRUE(load_snapshot(path, loaded.state));
        EXPECT_EQ(loaded.state.step, 4);
        EXPECT_EQ(loaded.sum(), saved_sum);
      }
    }
  });
}

// The threads that load had the default stream, which does not wait for the
// program's own: what that still wrote overwrote what they had loaded.
WORLD_TEST(SimgpuSnapshots, FollowAStreamOfTheProgram, 1, 2) {
  with_delays([&](const at::Device& device) {
    const c10::impl::VirtualGuardImpl accelerator(device.type());
    for (const char* name : kPaths) {
      SCOPED_TRACE(name);
      const auto path = path_of(world, name);
      Run first(device), second(device, /*seed=*/99);
      torch::manual_seed(20);
      accelerator.synchronizeStream(accelerator.getStream(device));
      const c10::StreamGuard guard(
          accelerator.getStreamFromGlobalPool(device, false));
      first.steps(3);
      save_snapshot(path, first.state);
      second.step();
      ASSERT_TRUE(load_snapshot(path, second.state));
      EXPECT_EQ(second.sum(), first.sum());
      accelerator.synchronizeStream(accelerator.getStream(device));
    }
  });
}

struct PairImpl : torch::nn::Module {
  explicit PairImpl(const at::Device& device) {
    torch::manual_seed(2);
    for (int i = 0; i < 2; ++i) {
      units.emplace_back([&] {
        torch::nn::Linear linear(kFeatures, kFeatures);
        linear->to(device);
        return linear;
      });
      register_module("unit" + std::to_string(i), units.back().ptr());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return units[1](units[0](x).tanh());
  }
  std::vector<FullyShard<torch::nn::Linear>> units;
};
TORCH_MODULE(Pair);

WORLD_TEST(SimgpuSnapshots, HoldUnitsOfFullyShard, 2, 3) {
  with_delays([&](const at::Device& device) {
    const auto path = path_of(world, "fsdp/");
    std::vector<double> sums;
    const auto sum_of = [](const torch::nn::Module& module) {
      double sum = 0;
      for (const auto& [name, tensor] : full_state_dict(module)) {
        EXPECT_TRUE(tensor.is_cpu());
        sum += tensor.abs().sum().item<double>();
      }
      return sum;
    };
    for (const bool loads : {false, true}) {
      FullyShard<Pair> model([&] { return Pair(device); });
      torch::optim::AdamW optimizer(model->parameters(), 0.1);
      TrainingState state{.model = model.ptr(), .optimizer = &optimizer};
      if (loads) {
        ASSERT_TRUE(load_snapshot(path, state));
        sums.push_back(sum_of(*model.ptr()));
      }
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        model(torch::ones({3, kFeatures}, device)).square().sum().backward();
        optimizer.step();
        if (!loads && step == 0) save_snapshot(path, state);
        sums.push_back(sum_of(*model.ptr()));
      }
    }
    EXPECT_EQ(sums[2], sums[0]);
    EXPECT_EQ(sums[3], sums[1]);
  });
}

WORLD_TEST(SimgpuSnapshots, HoldAShardedOptimizer, 2, 3) {
  with_delays([&](const at::Device& device) {
    const auto path = path_of(world, "zero/");
    std::vector<at::Tensor> weights;
    for (const bool loads : {false, true}) {
      torch::manual_seed(2);
      torch::nn::Linear net(40, 40);
      net->to(device);
      DistributedDataParallel<torch::nn::Linear> model(net);
      ZeroRedundancyOptimizer<optim::AdamW> optimizer(model, {.lr = 0.1});
      TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
      if (loads) {
        ASSERT_TRUE(load_snapshot(path, state));
      }
      for (int step = loads ? 2 : 0; step < 4; ++step) {
        optimizer.zero_grad();
        model(torch::ones({3, 40}, device)).square().sum().backward();
        optimizer.step();
        if (!loads && step == 1) save_snapshot(path, state);
      }
      weights.push_back(net->weight.detach().clone());
    }
    EXPECT_TRUE(torch::equal(weights[0], weights[1]));
  });
}

// As torch.save writes a state_dict of a GPU: its storages say "cuda:3".
WORLD_TEST(SimgpuSnapshots, FilesThatNameDevicesAreRead, 1) {
  with_delays([&](const at::Device&) {
    const at::Device on_device(kDeviceType, 3);
    const auto bias = torch::arange(5, torch::kFloat);
    c10::Dict<std::string, at::Tensor> dict;
    dict.insert("bias", bias.to(on_device));
    std::string pickle;
    torch::jit::Pickler pickler(
        [&](const char* bytes, size_t size) { pickle.append(bytes, size); },
        nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
    pickler.protocol();
    pickler.pushIValue(dict);
    pickler.stop();
    ASSERT_NE(pickle.find(on_device.str()), std::string::npos);
    const auto path = path_of(world, "device.pt");
    {
      caffe2::serialize::PyTorchStreamWriter writer(path);
      writer.writeRecord("data.pkl", pickle.data(), pickle.size());
      writer.writeRecord("data/0", bias.data_ptr(), bias.nbytes());
      writer.writeEndOfFile();
    }
    for (const auto& tensors :
         {load_tensors(path), load_snapshot_file(path).model_state}) {
      ASSERT_EQ(tensors.size(), 1U);
      EXPECT_EQ(tensors[0].first, "bias");
      EXPECT_TRUE(tensors[0].second.is_cpu());
      EXPECT_TRUE(torch::equal(tensors[0].second, bias));
    }
  });
}

}  // namespace
}  // namespace lockstep::internal::testing
