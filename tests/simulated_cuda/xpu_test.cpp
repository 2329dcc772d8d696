// A second type of device, XPU: the library asks LibTorch for the accelerator,
// and a backend for it that the program registers is used as Lockstep's own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/observe/kineto_trace.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;

WORLD_TEST(Xpu, IsTheDeviceOfARankAndHasTheRegisteredBackend, 1, 2) {
  EXPECT_EQ(at::getAccelerator(), torch::kXPU);
  EXPECT_FALSE(torch::cuda::is_available());
  const torch::Device device(torch::kXPU,
                             static_cast<c10::DeviceIndex>(world.rank));
  EXPECT_EQ(local_device(), device);
  for (const char* const config :
       {"", "xccl", "xpu:xccl", "cpu:gloo,xpu:xccl"}) {
    SCOPED_TRACE(config);
    const auto group = init_process_group(config);
    EXPECT_THAT(default_group()->backend_config(),
                ::testing::EndsWith("xpu:xccl"));
    EXPECT_EQ(torch::empty({1}, torch::kXPU).device(), device);
    const auto sum = torch::full({3}, world.rank + 1, device);
    all_reduce(sum);
    EXPECT_EQ(sum[2].item<int>(), world.size * (world.size + 1) / 2);
    const auto own = new_group({world.rank}, {.backend = "xpu:xccl"});
    all_reduce(sum, {.group = own});
    EXPECT_EQ(sum[0].item<int>(), world.size * (world.size + 1) / 2);
  }
}

WORLD_TEST(Xpu, StepsAreProfiled, 2) {
  const auto group = init_process_group("xpu:xccl");
  const auto path =
      (world.folder / ("xpu" + std::to_string(world.rank) + ".json")).string();
  KinetoTrace trace({});
  trace.start();
  all_reduce(torch::ones({4}, local_device()).exp());
  trace.stop();
  trace.save(path);
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(text, ::testing::HasSubstr("aten::exp"));
  EXPECT_THAT(text, ::testing::HasSubstr("record_param_comms"));
}

// Whether the data of a tensor of the CPU, as a module's to() does it, can be
// replaced by that of a tensor with this dispatch key.
bool may_replace_data(c10::DispatchKey key, c10::DeviceType type) {
  const c10::Storage no_memory(c10::Storage::use_byte_size_t{}, 0,
                               c10::DataPtr(nullptr, c10::Device(type, 0)),
                               /*allocator=*/nullptr, /*resizable=*/false);
  const auto other = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(no_memory), c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(at::kFloat));
  torch::Tensor parameter = torch::zeros({0});
  try {
    parameter.set_data(other);
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("incompatible tensor type"));
    return false;
  }
  return true;
}

// Why the second type is XPU.
TEST(TypesOfDevices, ThatAModuleMayMoveTo) {
  using c10::DispatchKey;
  EXPECT_TRUE(may_replace_data(DispatchKey::CUDA, at::kCUDA));
  EXPECT_TRUE(may_replace_data(DispatchKey::XPU, at::kXPU));
  EXPECT_TRUE(may_replace_data(DispatchKey::HPU, at::kHPU));
  EXPECT_TRUE(may_replace_data(DispatchKey::MTIA, at::kMTIA));
  EXPECT_FALSE(may_replace_data(DispatchKey::PrivateUse1, at::kPrivateUse1));
  torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1,
                         __FILE__, __LINE__);
  library.impl("_has_compatible_shallow_copy_type",
               [](const at::Tensor&, const at::Tensor&) { return true; });
  EXPECT_TRUE(may_replace_data(DispatchKey::PrivateUse1, at::kPrivateUse1));
}

}  // namespace
}  // namespace lockstep::internal
