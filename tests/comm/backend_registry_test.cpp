#include "lockstep/comm/backend_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/register_backend.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

std::string names(const std::string& config) {
  std::string text;
  for (auto& [type, entry] : resolve_backends(config)) {
    text += c10::DeviceTypeName(type, true) + ":" + entry->name + " ";
  }
  return text;
}

const BackendEntry& entry_of(const std::string& name) {
  const auto& all = registered_backends();
  auto found = std::ranges::find(all, name, &BackendEntry::name);
  if (found == all.end()) throw std::logic_error("not registered: " + name);
  return *found;
}

bool is_here(const BackendEntry& entry) {
  return !entry.missing || entry.missing().empty();
}

class NcclWhereItIsMissing : public ::testing::Test {
 protected:
  void SetUp() override {
    if (is_here(entry_of("nccl"))) GTEST_SKIP() << "NCCL can be used here";
  }
};

TEST_F(NcclWhereItIsMissing, IsAnErrorOfOneLineThatSaysWhyAndWhatToDo) {
  for (const char* config : {"nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"}) {
    EXPECT_THAT([&] { resolve_backends(config); },
                ThrowsMessage<std::invalid_argument>(AllOf(
                    HasSubstr("backend \"nccl\""), HasSubstr(config),
                    HasSubstr("cannot be used: "),
                    HasSubstr(entry_of("nccl").missing()),
                    HasSubstr("a backend for CPUs"), Not(HasSubstr("\n")))))
        << config;
  }
}

TEST_F(NcclWhereItIsMissing, MakesNoGroupOfAnotherBackend) {
  EXPECT_THAT([] { auto group = init_process_group("nccl"); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("\"nccl\"")));
  EXPECT_FALSE(is_initialized());
}

TEST_F(NcclWhereItIsMissing, IsNotAmongThoseThatAnErrorOffers) {
  EXPECT_THAT([] { resolve_backends("goo"); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("\"gloo\""), Not(HasSubstr("nccl")))));
}

TEST(NcclWhereItIsBuilt, ServesCudaOnly) {
  const auto& nccl = entry_of("nccl");
  EXPECT_EQ(nccl.devices, std::vector<c10::DeviceType>{c10::kCUDA});
  EXPECT_EQ(nccl.default_devices, nccl.devices);
  if (!is_here(nccl)) GTEST_SKIP() << nccl.missing();
  EXPECT_EQ(names("nccl"), "cuda:nccl ");
  EXPECT_EQ(names("cpu:gloo,cuda:nccl"), "cpu:gloo cuda:nccl ");
  EXPECT_THAT([] { resolve_backends("cpu:nccl"); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("does not serve device type cpu")));
}

TEST(ChosenByDevice, AreTheFirstOfEachTypeThatCanBeUsed) {
  const auto chosen = resolve_backends("");
  for (auto type : {c10::kCPU, c10::kCUDA}) {
    const BackendEntry* first = nullptr;
    if (type == c10::kCPU || visible_accelerator() == type) {
      for (const auto& entry : registered_backends()) {
        if (first || !std::ranges::count(entry.default_devices, type)) continue;
        if (is_here(entry)) first = &entry;
      }
    }
    auto found = chosen.find(type);
    EXPECT_EQ(found == chosen.end() ? nullptr : found->second, first)
        << c10::DeviceTypeName(type);
  }
  ASSERT_TRUE(chosen.contains(c10::kCPU));
}

TEST(DeviceTypes, AreThoseOfLibTorch) {
  EXPECT_THAT([] { resolve_backends("cpu:gloo,gpu:nccl"); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("unknown device type \"gpu\""),
                        HasSubstr("such as xpu"), Not(HasSubstr("\n")))));
  EXPECT_EQ(names("cpu:gloo,xpu:fake"), "cpu:gloo xpu:fake ");
  EXPECT_THAT([] { resolve_backends("xpu:gloo"); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("does not serve device type xpu")));
}

TEST(RegisterBackend, RefusesWhatCannotBeNamedOrMade) {
  const auto create = [](const c10d::DistributedBackendOptions&) {
    return c10::intrusive_ptr<c10d::Backend>();
  };
  const auto refused = [](auto call, const char* why) {
    EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(AllOf(
                          HasSubstr("register_backend: "), HasSubstr(why))));
  };
  refused([&] { register_backend("", create, {at::kXPU}); }, "not a name");
  refused([&] { register_backend("a:b", create, {at::kXPU}); }, "not a name");
  refused([&] { register_backend("gloo", create, {at::kXPU}); },
          "another backend");
  refused([&] { register_backend("mine", create, {}); }, "no device type");
  refused([&] { register_backend("mine", nullptr, {at::kXPU}); }, "no creator");
}

// The first collective read from address 0.
TEST(RegisterBackend, ACreatorThatReturnsNullFailsTheGroup) {
  register_backend("nothing",
                   [](const c10d::DistributedBackendOptions&) {
                     return c10::intrusive_ptr<c10d::Backend>();
                   },
                   {at::kCPU});
  EXPECT_THAT([] { auto group = init_process_group("nothing"); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("returned null")));
}

TEST(Registered, HaveNamesOfTheirOwnAndDefaultsThatTheyServe) {
  std::vector<std::string> seen;
  for (const auto& entry : registered_backends()) {
    EXPECT_EQ(std::ranges::count(seen, entry.name), 0) << entry.name;
    seen.push_back(entry.name);
    EXPECT_TRUE(entry.create) << entry.name;
    for (auto type : entry.default_devices) {
      EXPECT_EQ(std::ranges::count(entry.devices, type), 1) << entry.name;
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
