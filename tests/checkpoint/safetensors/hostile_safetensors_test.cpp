// Safetensors files that somebody has made to do harm (fault 20): each is
// refused with a one-line error, in little time and little memory.

#include <gmock/gmock.h>

#include "lockstep/checkpoint/safetensors/safetensors_format.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using namespace std::string_literals;

std::string safetensors(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// A tensor of a parameter or group that the description lacks was refused with
// "map::at", and "0.5" was read as parameter 0.
TEST(HostileSafetensors, TensorsThatTheDescriptionLacksAreNamed) {
  const auto refusal = [](const std::string& tensor, const std::string& state) {
    return message_of([&] {
      snapshot_of({.tensors = {{tensor, torch::ones({2})}},
                   .description =
                       R"({"format":1,"epochs_run":0,"step":0,)"
                       R"("sampler_state":{},"metadata":{},)"
                       R"("generator_states":0,"optimizer_state":{"state":)" +
                       state + R"(,"param_groups":[]}})"});
    });
  };
  EXPECT_EQ(refusal("lockstep.state.0.exp_avg", R"({"0":{}})"), "");
  for (const char* name : {"lockstep.state.1.exp_avg",
                           "lockstep.param_groups.0.lr", "lockstep.x"}) {
    EXPECT_THAT(refusal(name, R"({"0":{}})"), HasSubstr(name));
  }
  EXPECT_THAT(refusal("a", R"({"0.5":{}})"),
              HasSubstr("\"0.5\", which is not a parameter's number"));
}

TEST(HostileSafetensors, SchedulersThatAreNoneAreRefused) {
  const auto refusal = [](const std::string& scheduler) {
    return message_of([&] {
      snapshot_of({.tensors = {},
                   .description = R"({"format":1,"epochs_run":0,"step":0,)"
                                  R"("sampler_state":{},"metadata":{},)"
                                  R"("generator_states":0,"scheduler_state":)" +
                                  scheduler + "}"});
    });
  };
  EXPECT_EQ(refusal(R"({"milestones":{"30":1,"-2":3},"gamma":0.1})"), "");
  EXPECT_THAT(refusal("[1]"), HasSubstr("scheduler's state is not an object"));
  EXPECT_THAT(refusal(R"({"1":2})"), HasSubstr("is not an object by names"));
  EXPECT_THAT(refusal(R"({"m":{"1":1,"x":2}})"),
              HasSubstr("a Counter has the key x"));
  EXPECT_NE(refusal(R"({"m":{"1":"x"}})"), "");
  std::string deep = "1";
  for (int i = 0; i < 100; ++i) deep = "[" + deep + "]";
  EXPECT_THAT(refusal("{\"m\":" + deep + "}"), HasSubstr("nested too deeply"));
}

TEST(HostileSafetensors, EachIsRefusedWithItsReason) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a.safetensors");
  const auto refusal = [&](const std::string& content) {
    write_file(path, content);
    return message_of([&] { load_snapshot_file(path); });
  };
  const auto one = [](const std::string& entry) {
    return safetensors("{\"a\":" + entry + "}", "12345678");
  };
  const std::string good =
      R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(refusal(one(good)), "");

  EXPECT_THAT(refusal(std::string(8, '\xff') + "{"), HasSubstr("header of 1844"
                                                               "674407370955"));
  EXPECT_THAT(refusal("\0\xe1\xf5\x05\0\0\0\0{"s), HasSubstr("does not fit"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})")),
      HasSubstr("not an integer of 0 or more"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})")),
      HasSubstr("do not fit"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})")),
      HasSubstr("not an integer of 0 or more"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F64","shape":[2],"data_offsets":[0,8]})")),
      HasSubstr("do not fit"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"Q9","shape":[2],"data_offsets":[0,8]})")),
      HasSubstr("dtype \"Q9\""));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})")),
      HasSubstr("not an integer of 0 or more"));
  EXPECT_THAT(refusal(one(R"({"dtype":"F32","shape":[4611686018427387904,)"
                          R"(4611686018427387904,0],"data_offsets":[0,0]})")),
              HasSubstr("too large"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})")),
      HasSubstr("leaves a gap"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})")),
      HasSubstr("belong to no tensor"));
  EXPECT_THAT(
      refusal(one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})")),
      HasSubstr("cut short"));
  EXPECT_THAT(refusal(one(good + ",\"b\":" + good)), HasSubstr("overlaps"));
  EXPECT_THAT(refusal(one(good + ",\"a\":" + good)), HasSubstr("twice"));
  EXPECT_THAT(refusal(one("[" + std::string(100'000, '['))),
              HasSubstr("nested too deeply"));
  EXPECT_THAT(refusal(one("7")), HasSubstr("needs dtype"));
  EXPECT_THAT(refusal(one(good + ",\"__metadata__\":{\"x\":1}")),
              HasSubstr("wrong type"));
  EXPECT_THAT(
      refusal(one(good + ",\"__metadata__\":{\"lockstep.snapshot\":\"{}\"}")),
      HasSubstr("does not match its checksum"));
  EXPECT_THAT(refusal(safetensors("{\"a\":\xff}", "")), HasSubstr("not valid"));
}

}  // namespace
}  // namespace lockstep::internal
