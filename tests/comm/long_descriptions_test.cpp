// Ranks that compare their calls describe them in the store, whose values have
// a largest size. The description of a call with 9,000 tensors was longer than
// the launcher's store takes, and a call without any mistake failed.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/worker/worker_call.h"
#include "tests/comm/failure_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::World;

// Takes the values that the launcher's store takes.
class BoundedStore final : public c10d::FileStore {
 public:
  using FileStore::FileStore;
  using FileStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (value.size() > kMostWorkerValueBytes) {
      throw std::invalid_argument("the value of " + key + " is too long");
    }
    FileStore::set(key, value);
  }
};

WORLD_TEST(ComparedCalls, ALongDescriptionFitsTheLaunchersStore, 2) {
  auto store = c10::make_intrusive<BoundedStore>(
      (world.folder / "bounded").string(), world.size);
  auto group = init_process_group("gloo", {.world_size = world.size,
                                           .rank = world.rank,
                                           .store = store,
                                           .check_calls = true});
  std::vector<at::Tensor> tensors(9000);
  for (auto& tensor : tensors) tensor = at::ones({1, 1});
  all_reduce_coalesced(tensors);
  EXPECT_EQ(tensors.back().item<float>(), 2);
  // Ranks that differ in what is left out are still told.
  if (world.rank == 1) tensors.back() = at::ones({1, 2});
  EXPECT_THAT(failure_of([&] { all_reduce_coalesced(tensors); }),
              AllOf(HasSubstr("the ranks disagree"),
                    HasSubstr("rank 1: all_reduce_coalesced #2 SUM, Float [1, "
                              "1], Float [1, 1]")));
}

}  // namespace
}  // namespace lockstep::internal
