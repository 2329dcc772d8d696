// `lockstep inspect snapshot` on files written for the test: what it lists,
// what it finds damaged, and how two snapshots differ.
#include <caffe2/serialize/inline_container.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/snapshot.h"
#include "tests/cli/inspect_snapshot.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class InspectSnapshot : public InspectSnapshotTest {
 protected:
  static Snapshot sample() {
    Snapshot snapshot;
    torch::manual_seed(1);
    auto weight = torch::randn({3, 4});
    snapshot.model_state = {
        {"0.weight", weight},
        {"0.count", torch::tensor(7, torch::kLong)},
        {"0.empty", torch::empty({0, 2}, torch::kHalf)},
        {"0.phase", torch::full({2}, c10::complex<double>(3, 4))}};
    OptimizerState optimizer;
    optimizer.state[0]["exp_avg"] = weight * 2;
    optimizer.state[0]["step"] = 3.0;
    optimizer.param_groups.push_back({.options = {{"lr", 0.1}}, .params = {0}});
    snapshot.optimizer_state = optimizer;
    snapshot.epochs_run = 4;
    snapshot.step = 12;
    snapshot.sampler_state = {{"position", 64}};
    snapshot.metadata = {{"run", "seventh"}};
    return snapshot;
  }
  std::string saved(const std::string& name, const Snapshot& snapshot) const {
    save_snapshot_file(path(name), snapshot);
    return path(name);
  }
};

TEST_F(InspectSnapshot, ListsEveryTensorOfBothFormats) {
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const auto path = saved(name, sample());
    const auto result = inspect({path});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out,
                AllOf(StartsWith(path + ": 5 tensors, 120 B, epoch 4 has "
                                        "ended, step 12\n"),
                      HasSubstr("  sampler position: 64\n"),
                      HasSubstr("  run: seventh\n"),
                      HasSubstr("0.weight                   [3, 4]  float32"),
                      HasSubstr("optimizer.state.0.exp_avg  [3, 4]  float32"),
                      Not(HasSubstr("shard")), Not(HasSubstr("checksum")),
                      Not(HasSubstr("norm"))));
    const auto verified = inspect({"--verify", path});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
    EXPECT_THAT(verified.out,
                AllOf(HasSubstr("norm\n"), HasSubstr("ok        7.07107\n"),
                      HasSubstr("every checksum")));
    const auto document =
        json::parse(inspect({"--json", "--verify", path}).out);
    EXPECT_EQ(document.at("format"), 1);
    EXPECT_EQ(document.at("step"), 12);
    EXPECT_EQ(document.at("tensors").size(), 5u);
    // Safetensors files have an order of their own.
    for (const auto& tensor : document.at("tensors")) {
      if (tensor.at("name") != "0.weight") continue;
      EXPECT_EQ(tensor.at("shape"), json({3, 4}));
      EXPECT_NEAR(tensor.at("norm").get<double>(),
                  std::get<1>(sample().model_state[0]).norm().item<double>(),
                  1e-6);
    }
  }
}

TEST_F(InspectSnapshot, DamageIsNamedAndTheOtherTensorsAreVerified) {
  const auto weight = std::get<1>(sample().model_state[0]);
  const std::string bytes(static_cast<const char*>(weight.const_data_ptr()),
                          16);
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const auto file = saved(name, sample());
    flip_bit(file, bytes);
    const auto result = inspect({"--verify", file});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err,
                AllOf(StartsWith(kHead + ("snapshot \"" + file) +
                                 "\" is damaged: tensor \"0.weight\""),
                      HasSubstr("does not match its checksum")));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    const auto document = inspect_json({"--verify", file}, 1);
    EXPECT_EQ(document.at("damage").size(), 1u);
    for (const auto& tensor : document.at("tensors")) {
      const bool is_damaged = tensor.at("name") == "0.weight";
      EXPECT_EQ(tensor.at("checksum"), is_damaged ? "damaged" : "ok") << tensor;
      EXPECT_EQ(tensor.at("norm").is_null(), is_damaged) << tensor;
    }
    EXPECT_THAT(one_line_error({"--diff", file, file}, 1),
                HasSubstr("is damaged"));
  }
}

// The file also has records to which the pickle does not refer.
TEST_F(InspectSnapshot, DamageOutsideTheTensorsIsFound) {
  const auto file = saved("a.pt", sample());
  // The first place is the local header, whose name is followed by the content.
  flip_bit(file, "little");
  EXPECT_THAT(one_line_error({file}, 1), HasSubstr("archive/byteorder"));
  const auto other = saved("b.pt", sample());
  const auto content = read_file(other);
  const auto at = content.find("serialization_id");
  ASSERT_NE(at, std::string::npos);
  // The identity consists of 40 digits.
  const auto digits = content.find_first_of("0123456789", at);
  flip_bit(other, content.substr(digits, 40));
  const auto result = inspect({"--verify", other});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("serialization_id\" does not match"));
  EXPECT_THAT(result.out, HasSubstr("damaged in 1 place\n"));
}

TEST_F(InspectSnapshot, AFileOfOthersHasNoChecksums) {
  save_tensors(path("a.safetensors"), {{"w", torch::ones({4})}});
  // Without the three keys of Lockstep.
  std::string content = read_file(path("a.safetensors"));
  uint64_t length = 0;
  std::memcpy(&length, content.data(), sizeof length);
  auto header = json::parse(content.substr(sizeof length, length));
  header.erase("__metadata__");
  std::string text = header.dump();
  text.resize(length, ' ');
  content.replace(sizeof length, length, text);
  std::ofstream(path("a.safetensors"), std::ios::binary) << content;
  const auto result = inspect({"--verify", path("a.safetensors")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("none         2\n"),
                                HasSubstr("no tensor has a checksum\n")));
}

TEST_F(InspectSnapshot, TensorsThatShareMemoryAreEachRead) {
  Snapshot snapshot;
  const auto flat = torch::arange(6, torch::kFloat);
  snapshot.model_state = {{"a", flat}, {"tied", flat}};
  const auto document = inspect_json({"--verify", saved("a.pt", snapshot)});
  EXPECT_EQ(tensor_in(document, "a").at("norm"),
            tensor_in(document, "tied").at("norm"));
  EXPECT_EQ(tensor_in(document, "a").at("norm"), std::sqrt(55.0));
}

// Writes a .pt file of a tensor "w" of 2^20 times 2^20 elements, whose memory
// has fewer. Returns its path.
std::string write_vast(const std::string& file,
                       const std::vector<float>& elements, char stride) {
  const auto number = [](size_t value) {
    const auto bytes = static_cast<uint32_t>(value);
    return "J" + std::string(reinterpret_cast<const char*>(&bytes), 4);
  };
  const auto text = [](const std::string& value) {
    return std::string("\x8c") + static_cast<char>(value.size()) + value;
  };
  const std::string side = number(1 << 20);
  const std::string step{'K', stride};
  const std::string pickle =
      "\x80\x02}" + text("w") + "ctorch._utils\n_rebuild_tensor_v2\n((" +
      text("storage") + "ctorch\nFloatStorage\n" + text("0") + text("cpu") +
      number(elements.size()) + "tQ" + number(0) + "(" + side + side + "t(" +
      step + step + "t\x89NtRs.";
  caffe2::serialize::PyTorchStreamWriter writer(file);
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("data/0", elements.data(), elements.size() * 4);
  writer.writeEndOfFile();
  return file;
}

// Reading it took a minute, and comparing it all memory.
TEST_F(InspectSnapshot, TheRepetitionsOfAnExpandedTensorAreNoWork) {
  const auto three = write_vast(path("three.pt"), {3}, 0);
  const auto four = write_vast(path("four.pt"), {4}, 0);
  EXPECT_EQ(tensor_in(inspect_json({"--verify", three}), "w").at("norm"),
            3.0 * (1 << 20));
  const auto difference = inspect_json({"--diff", three, four}, 1);
  EXPECT_EQ(difference.at("differences").at(0).at("what"),
            "1099511627776 of 1099511627776 elements differ");
  EXPECT_EQ(difference.at("differences").at(0).at("greatest"), 1);
}

// A shape of 2^40 elements over 8 MB took all memory.
TEST_F(InspectSnapshot, ElementsThatOverlapAreNoWork) {
  std::vector<float> elements(size_t{1} << 21);
  const auto zeros = write_vast(path("zeros.pt"), elements, 1);
  const auto same = write_vast(path("same.pt"), elements, 1);
  elements.front() = 1;
  const auto other = write_vast(path("other.pt"), elements, 1);
  const auto expanded = write_vast(path("expanded.pt"), {0}, 0);
  const auto document = inspect_json({"--verify", zeros});
  EXPECT_EQ(tensor_in(document, "w").at("checksum"), "ok");
  EXPECT_TRUE(tensor_in(document, "w").at("norm").is_null());
  EXPECT_EQ(inspect({"--verify", zeros}).exit_code, 0);
  EXPECT_EQ(inspect_json({"--diff", zeros, same}).at("equal_tensors"), 1);
  for (const std::string& b : {other, expanded}) {
    const auto difference = inspect_json({"--diff", zeros, b}, 1);
    EXPECT_THAT(difference.at("differences").at(0).at("what"),
                StartsWith("not compared: the strides overlap"));
  }
}

TEST_F(InspectSnapshot, OptimizerStateHasTheNamesOfParameters) {
  auto snapshot = sample();
  snapshot.optimizer_state->param_groups[0].param_names = {"0.weight"};
  const auto named = saved("named.pt", snapshot);
  tensor_in(inspect_json({named}), "optimizer.state.0.weight.exp_avg");
  for (const char* other : {"numbered.pt", "numbered.safetensors"}) {
    const auto difference =
        inspect_json({"--diff", named, saved(other, sample())});
    EXPECT_EQ(difference.at("equal_tensors"), 5);
  }
}

TEST_F(InspectSnapshot, WhatCannotBeReadIsOneLine) {
  EXPECT_THAT(one_line_error({(scratch() / "none").string()}, 2),
              AllOf(StartsWith(kHead), HasSubstr("No such file")));
  std::ofstream(scratch() / "text") << "no snapshot, but long enough";
  EXPECT_THAT(one_line_error({(scratch() / "text").string()}, 1),
              AllOf(StartsWith(kHead), HasSubstr("neither")));
  EXPECT_THAT(one_line_error({}, 2), HasSubstr("PATH is required"));
}

// A bug: escape sequences and newlines of a file that was downloaded reached
// the terminal.
TEST_F(InspectSnapshot, NamesOfAFileAreNoEscapeSequences) {
  Snapshot hostile;
  hostile.model_state = {{"\033[2J\nweight", torch::ones({1})}};
  hostile.metadata = {{"run", "\033]0;owned\007\n  state: sound"}};
  const auto file = saved("a.safetensors", hostile);
  const auto other = saved("b.safetensors", sample());
  for (const auto& result :
       {inspect({file}), inspect({"--verify", file}),
        inspect({"--diff", other, file}), inspect({"--json", file})}) {
    EXPECT_EQ(result.err, "");
    EXPECT_THAT(result.out, HasSubstr("[2J"));
    EXPECT_EQ(result.out.find_first_of("\033\007"), std::string::npos);
    EXPECT_THAT(result.out, AllOf(Not(HasSubstr("\nweight")),
                                  Not(HasSubstr("\n  state: sound"))));
  }
}

// A bug: the document could not be written.
TEST_F(InspectSnapshot, APathThatIsNotUtf8HasADocument) {
  const auto file = saved("caf\xe9.pt", sample());
  EXPECT_EQ(inspect_json({file}).at("step"), 12);
  EXPECT_EQ(inspect_json({"--diff", file, file}).at("equal_tensors"), 5);
}

TEST_F(InspectSnapshot, OutputThatAFullDiskLosesIsAFailure) {
  const auto result = run_program(
      {"/bin/sh", "-c",
       "exec " LOCKSTEP_BIN_DIR "/lockstep inspect snapshot --verify '" +
           saved("a.pt", sample()) + "' > /dev/full"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("its output could not be written"));
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
}

TEST_F(InspectSnapshot, DifferencesAreNamedWithTheirSize) {
  const auto a = saved("a.pt", sample());
  // The same numbers in the other format make no difference.
  EXPECT_EQ(inspect({"--diff", saved("b.safetensors", sample()), a}).exit_code,
            0);
  auto other = sample();
  other.step = 13;
  std::get<1>(other.model_state[0])[1][2] += 0.5;
  std::get<1>(other.model_state[1]) = torch::tensor(7, torch::kInt);
  std::get<1>(other.model_state[2]) = torch::empty({0, 3}, torch::kHalf);
  std::get<0>(other.model_state[3]) = "0.angle";
  const auto result = inspect({"--diff", saved("c.pt", other), a});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("1 tensor is equal, 6 differences\n"),
            HasSubstr("12 and 13"), HasSubstr("1 of 12 elements differ   "),
            HasSubstr("       0.5\n"), HasSubstr("dtype int64 and int32\n"),
            HasSubstr("shape [0, 2] and [0, 3]\n"),
            HasSubstr("0.phase   only in A\n"),
            HasSubstr("0.angle   only in B\n")));
  const auto document =
      json::parse(inspect({"--json", "--diff", saved("c.pt", other), a}).out);
  EXPECT_EQ(document.at("format"), 1);
  EXPECT_EQ(document.at("differences").size(), 6u);
}

TEST_F(InspectSnapshot, NaNsInBothAreEqual) {
  auto first = sample();
  std::get<1>(first.model_state[0])[0][0] =
      std::numeric_limits<float>::quiet_NaN();
  auto second = sample();
  const auto a = saved("a.pt", first);
  EXPECT_EQ(inspect({"--diff", saved("b.pt", first), a}).exit_code, 0);
  const auto result = inspect({"--diff", saved("c.pt", second), a});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("nan\n"));
}

}  // namespace
}  // namespace lockstep::internal::testing
