// A model's weights in a file of their own. interop_test.cpp tests the exchange
// with Python.
#include "lockstep/checkpoint/model_file.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using namespace lockstep::internal::testing;

// Every tensor holds `value`.
torch::nn::Sequential model_of(double value) {
  torch::nn::Sequential model(torch::nn::Linear(3, 2),
                              torch::nn::BatchNorm1d(2));
  for (const auto& [name, tensor] : state_dict(*model)) {
    tensor.fill_(value);
  }
  return model;
}

bool holds(const torch::nn::Module& module, double value) {
  const auto tensors = state_dict(module);
  return std::all_of(tensors.begin(), tensors.end(), [&](const auto& item) {
    return item.second.eq(value).all().template item<bool>();
  });
}

class ModelFile : public ::testing::Test {
 protected:
  // Returns the error of load_model() for `tensors`; the model must not change.
  std::string refusal_of(const NamedTensors& tensors) {
    save_tensors(path_, tensors);
    auto model = model_of(5);
    try {
      load_model(path_, *model);
      ADD_FAILURE() << "was loaded";
    } catch (const std::invalid_argument& error) {
      EXPECT_TRUE(holds(*model, 5));
      EXPECT_THAT(error.what(), StartsWith(path_ + ": "));
      return error.what();
    }
    return "";
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_.file("model.pt");
};

TEST_F(ModelFile, ComesBackIntoTheTensorsThatTheModelHas) {
  save_model(path_, *model_of(2));
  auto model = model_of(5);
  const at::Tensor alias = model->parameters()[0].detach();
  load_model(path_, *model);
  EXPECT_TRUE(holds(*model, 2));
  EXPECT_TRUE(alias.eq(2).all().item<bool>());
  EXPECT_TRUE(model->parameters()[0].requires_grad());
  EXPECT_EQ(folder_.count(), 1u);  // no temporary file is left
}

TEST_F(ModelFile, TheModelOfASnapshotIsTakenToo) {
  save_snapshot_file(path_,
                     {.model_state = state_dict(*model_of(2)),
                      .epochs_run = 7,
                      .generator_states = {torch::ones(4, torch::kByte)}});
  auto model = model_of(5);
  load_model(path_, *model);
  EXPECT_TRUE(holds(*model, 2));
}

TEST_F(ModelFile, AParameterMayHaveTheNameOfASnapshotsKey) {
  const NamedTensors tensors = {{"MODEL_STATE", torch::ones(2)},
                                {"STEP", torch::zeros(1)}};
  save_tensors(path_, tensors);
  EXPECT_TRUE(
      same_snapshot(load_snapshot_file(path_), {.model_state = tensors}));
}

TEST_F(ModelFile, WhatIsMissingTooMuchOrOtherIsNamedAtOnce) {
  auto tensors = state_dict(*model_of(2));
  ASSERT_EQ(tensors[0].first, "0.weight");
  ASSERT_EQ(tensors[1].first, "0.bias");
  ASSERT_EQ(tensors[2].first, "1.weight");
  tensors[0].second = torch::zeros({4, 3});
  tensors[1].first = "0.biass";
  tensors[2].second = torch::zeros(2, torch::kDouble);
  EXPECT_THAT(refusal_of(tensors),
              AllOf(HasSubstr("the snapshot lacks 0.bias;"),
                    HasSubstr("the model lacks 0.biass;"),
                    HasSubstr("0.weight (snapshot Float[4, 3], model "
                              "Float[2, 3])"),
                    HasSubstr("1.weight (snapshot Double[2], model Float[2])"),
                    Not(HasSubstr("1.bias")), Not(HasSubstr("\n"))));
}

TEST_F(ModelFile, AnEmptyOneIsOfAnotherModel) {
  EXPECT_THAT(refusal_of({}), HasSubstr("the snapshot lacks 0.weight, 0.bias"));
}

TEST_F(ModelFile, ADamagedFileIsNamedAndChangesNothing) {
  save_model(path_, *model_of(2));
  const std::string content = read_file(path_);
  // Finds the first of 0.weight's six elements.
  const std::string two("\0\0\0\x40", 4);
  const size_t at = content.find(two + two + two + two + two + two);
  ASSERT_NE(at, std::string::npos);
  auto model = model_of(5);
  const auto refused = [&](const std::string& damaged) {
    write_file(path_, damaged);
    try {
      load_model(path_, *model);
    } catch (const SnapshotError& error) {
      EXPECT_THAT(error.what(), HasSubstr("\"" + path_ + "\""));
      return true;
    }
    return false;
  };
  std::string flipped = content;
  flipped[at] ^= 1;
  EXPECT_TRUE(refused(flipped));
  EXPECT_TRUE(refused(content.substr(0, content.size() / 2)));
  EXPECT_TRUE(refused(""));
  EXPECT_TRUE(holds(*model, 5));
  EXPECT_FALSE(refused(content));
}

TEST_F(ModelFile, AFailedSaveKeepsTheOldFile) {
  save_model(path_, *model_of(2));
  const std::string before = read_file(path_);
  EXPECT_THROW(
      save_tensors(path_, {{"a", torch::ones(1)}, {"a", torch::ones(1)}}),
      std::invalid_argument);
  EXPECT_THROW(save_tensors(path_, {{"\xff", torch::ones(1)}}),
               std::invalid_argument);
  EXPECT_THROW(
      save_tensors(
          path_,
          {{"a", torch::ones(1)},
           {"b", torch::ones(1, torch::kByte).view(c10::ScalarType::Bits8)}}),
      std::invalid_argument);
  EXPECT_EQ(read_file(path_), before);
  EXPECT_EQ(folder_.count(), 1u);
}

TEST_F(ModelFile, NamesAreReplacedByPrefixOrByAFunction) {
  auto tensors = state_dict(*model_of(2));
  for (auto& [name, tensor] : tensors) {
    name = (name.starts_with("0.") ? "backbone.fc." : "norm.") + name.substr(2);
  }
  save_tensors(path_, tensors);
  auto model = model_of(5);
  load_model(path_, *model,
             {.rename = {{"backbone.fc.", "0."}, {"norm.", "1."}}});
  EXPECT_TRUE(holds(*model, 2));

  model = model_of(5);
  load_model(path_, *model, {.rename = [](const std::string& name) {
               return (name.starts_with("norm.") ? "1" : "0") +
                      name.substr(name.rfind('.'));
             }});
  EXPECT_TRUE(holds(*model, 2));

  // The first pair that matches a name is used; a name that none matches stays.
  model = model_of(5);
  const auto left = load_model(
      path_, *model,
      {.rename = {{"norm.", "1."}, {"norm.w", "0."}}, .strict = false});
  EXPECT_THAT(left.missing_keys, ElementsAre("0.weight", "0.bias"));
  EXPECT_THAT(left.unexpected_keys,
              ElementsAre("backbone.fc.weight", "backbone.fc.bias"));
}

TEST_F(ModelFile, APrefixOfAWrapperIsTakenOffAfterRenaming) {
  auto tensors = state_dict(*model_of(2));
  for (auto& [name, tensor] : tensors) name = "module.net." + name;
  save_tensors(path_, tensors);
  auto model = model_of(5);
  load_model(path_, *model, {.rename = {{"module.net.", "module."}}});
  EXPECT_TRUE(holds(*model, 2));
}

TEST_F(ModelFile, TwoNamesThatBecomeOneAreRefused) {
  save_model(path_, *model_of(2));
  auto model = model_of(5);
  EXPECT_THAT(message_of([&] {
                load_model(path_, *model, {.rename = {{"0.", "1."}}});
              }),
              HasSubstr("rename makes \"1.weight\" of both \"0.weight\" and "
                        "\"1.weight\""));
  EXPECT_TRUE(holds(*model, 5));
}

TEST_F(ModelFile, NotStrictItSaysWhatItLeftOut) {
  auto tensors = state_dict(*model_of(2));
  tensors[1].first = "0.biass";
  save_tensors(path_, tensors);
  auto model = model_of(5);
  const auto left = load_model(path_, *model, {.strict = false});
  EXPECT_THAT(left.missing_keys, ElementsAre("0.bias"));
  EXPECT_THAT(left.unexpected_keys, ElementsAre("0.biass"));
  const auto now = state_dict(*model);
  EXPECT_TRUE(now[0].second.eq(2).all().item<bool>());
  EXPECT_TRUE(now[1].second.eq(5).all().item<bool>());
}

TEST_F(ModelFile, NotStrictAnotherShapeIsStillRefused) {
  auto tensors = state_dict(*model_of(2));
  tensors[0].second = torch::zeros({4, 3});
  tensors.pop_back();
  save_tensors(path_, tensors);
  auto model = model_of(5);
  const std::string said =
      message_of([&] { load_model(path_, *model, {.strict = false}); });
  EXPECT_THAT(said, AllOf(HasSubstr("0.weight (snapshot Float[4, 3]"),
                          Not(HasSubstr("lacks"))));
  EXPECT_TRUE(holds(*model, 5));
}

TEST_F(ModelFile, FloatingPointTensorsAreConvertedIfAskedFor) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    NamedTensors tensors = state_dict(*model_of(2));
    for (auto& [name, tensor] : tensors) {
      if (tensor.is_floating_point()) tensor = tensor.to(dtype);
    }
    save_tensors(path_, tensors);
    auto model = model_of(5);
    EXPECT_THAT(message_of([&] { load_model(path_, *model); }),
                HasSubstr("options rename, strict and convert"));
    EXPECT_TRUE(holds(*model, 5));
    load_model(path_, *model, {.convert = true});
    EXPECT_TRUE(holds(*model, 2));
    EXPECT_EQ(model->parameters()[0].scalar_type(), torch::kFloat);

    // The other way: weights of float32 are loaded into a model of that dtype.
    save_model(path_, *model_of(3));
    auto low = model_of(5);
    low->to(dtype);
    for (const auto& item : low->named_buffers()) {
      if (item.key().ends_with("num_batches_tracked")) {
        item.value().set_data(item.value().to(torch::kLong));
      }
    }
    load_model(path_, *low, {.convert = true});
    EXPECT_TRUE(holds(*low, 3));
    EXPECT_EQ(low->parameters()[0].scalar_type(), dtype);
  }
}

TEST_F(ModelFile, IntegersAreNeverConverted) {
  auto tensors = state_dict(*model_of(2));
  ASSERT_EQ(tensors.back().first, "1.num_batches_tracked");
  tensors.back().second = torch::ones({});
  save_tensors(path_, tensors);
  auto model = model_of(5);
  EXPECT_THAT(
      message_of([&] { load_model(path_, *model, {.convert = true}); }),
      HasSubstr("1.num_batches_tracked (snapshot Float[], model Long[])"));
}

TEST_F(ModelFile, OnlyADictOfTorchSaveHasEntries) {
  const std::string safetensors = folder_.file("model.safetensors");
  save_model(safetensors, *model_of(2));
  auto model = model_of(5);
  EXPECT_THAT(
      message_of([&] { load_model(safetensors, *model, {.key = "model"}); }),
      AllOf(StartsWith(safetensors),
            HasSubstr("safetensors file has no entry \"model\"")));
  save_snapshot_file(path_, {.model_state = state_dict(*model_of(2))});
  load_model(path_, *model, {.key = "MODEL_STATE"});
  EXPECT_TRUE(holds(*model, 2));
  EXPECT_THAT(message_of([&] { load_model(path_, *model, {.key = "model"}); }),
              AllOf(StartsWith(path_),
                    HasSubstr("the file has no entry \"model\"; its "
                              "entries are MODEL_STATE, EPOCHS_RUN")));
}

// One weight under two names.
struct Tied : torch::nn::Module {
  Tied() {
    first = register_parameter("z", torch::zeros({2, 3}));
    register_parameter("a", first);
    other = register_parameter("other", torch::zeros(2));
  }
  at::Tensor first, other;
};

// As in the files of safetensors.torch.save_model and of Hugging Face, which
// have one name; it was called a file of another model.
TEST_F(ModelFile, OfTiedWeightsOneNameIsEnough) {
  const auto weight = torch::arange(6.0f).view({2, 3});
  for (const char* file : {"a.pt", "a.safetensors"}) {
    for (const char* name : {"z", "a"}) {
      const std::string path = folder_.file(file);
      save_tensors(path, {{name, weight}, {"other", torch::ones(2)}});
      Tied model;
      const auto left = load_model(path, model, {.strict = false});
      EXPECT_TRUE(left.missing_keys.empty());
      load_model(path, model);
      EXPECT_TRUE(torch::equal(model.first, weight));
      Tied alias;
      // Two names of one memory, as set_data() makes them.
      alias.named_parameters()["a"].set_data(alias.first);
      load_model(path, alias);
      EXPECT_TRUE(torch::equal(alias.named_parameters()["z"], weight));
      save_tensors(path, {{"other", torch::ones(2)}});
      EXPECT_THAT(message_of([&] { load_model(path, model); }),
                  HasSubstr("the snapshot lacks z, a;"));
    }
  }
}

TEST_F(ModelFile, TiedWeightsAreInSafetensorsOnce) {
  const std::string path = folder_.file("model.safetensors");
  Tied model;
  model.first.data().copy_(torch::arange(6.0f).view({2, 3}));
  save_model(path, model);
  EXPECT_THAT(read_file(path),
              AllOf(HasSubstr("\"z\":\"a\""), Not(HasSubstr("\"z\":{"))));
  const auto read = load_tensors(path);
  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read.back().first, "z");
  EXPECT_TRUE(torch::equal(read.back().second, model.first));
  for (const bool mmap : {false, true}) {
    Tied other;
    load_model(path, other, {.mmap = mmap});
    for (const auto& [name, tensor] : state_dict(other)) {
      EXPECT_EQ(tensor.sum().item<float>(), name == "other" ? 0 : 15) << name;
    }
  }
}

TEST_F(ModelFile, AnIndexOfFilesOfTorchSaveIsNamedAndItsFilesAreRead) {
  auto tensors = state_dict(*model_of(2));
  const auto save = [&](const char* name, const NamedTensors& part) {
    save_tensors(folder_.file("part.pt"), part);
    std::filesystem::rename(folder_.file("part.pt"), folder_.file(name));
  };
  save("pytorch_model-00001-of-00002.bin", {tensors[0]});
  save("pytorch_model-00002-of-00002.bin",
       {tensors.begin() + 1, tensors.end()});
  const std::string index = folder_.file("pytorch_model.bin.index.json");
  write_file(index, R"({"metadata": {}, "weight_map": {
      "0.weight": "pytorch_model-00001-of-00002.bin",
      "0.bias": "pytorch_model-00002-of-00002.bin"}})");
  auto model = model_of(5);
  for (const std::string& path : {index, folder_.file("")}) {
    EXPECT_THAT(message_of([&] { load_model(path, *model); }),
                AllOf(HasSubstr("is an index of files of torch.save "
                                "(pytorch_model-00002-of-00002.bin)"),
                      HasSubstr("load_model() with strict = false")));
  }
  for (const char* name : {"pytorch_model-00001-of-00002.bin",
                           "pytorch_model-00002-of-00002.bin"}) {
    load_model(folder_.file(name), *model, {.strict = false});
  }
  EXPECT_TRUE(holds(*model, 2));
}

// Was LibTorch's error about a memory location, or about inference mode.
TEST_F(ModelFile, ATensorThatTakesNoValuesIsNamed) {
  const auto with = [](const at::Tensor& buffer) {
    auto model = std::make_shared<torch::nn::Module>();
    model->register_buffer("b", buffer);
    return model;
  };
  const auto expanded = torch::ones({1}).expand({6});
  at::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = torch::full({6}, 2);
  }
  for (const char* name : {"a.pt", "a.safetensors", "folder/"}) {
    SCOPED_TRACE(name);
    const std::string path = folder_.file(name);
    for (const auto& [tensor, words] :
         {std::pair(expanded, "the model's b is an expanded tensor"),
          std::pair(inference, "the model's b is an inference tensor")}) {
      save_snapshot(path, {.model = with(tensor)});
      EXPECT_THAT(message_of([&] { load_model(path, *with(tensor)); }),
                  HasSubstr(words));
      TrainingState state{.model = with(tensor)};
      // The second is before a training that would save there.
      for (const std::string& from : {path, folder_.file("none-") + name}) {
        EXPECT_THAT(message_of([&] { load_snapshot(from, state); }),
                    HasSubstr(words));
      }
      const at::Tensor own = torch::zeros_like(tensor.clone());
      load_model(path, *with(own));
      EXPECT_TRUE(torch::equal(own, tensor));
    }
  }
}

TEST_F(ModelFile, AMissingFileIsASystemError) {
  auto model = model_of(5);
  try {
    load_model(path_, *model);
    FAIL();
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code(), std::errc::no_such_file_or_directory);
    EXPECT_THAT(error.what(), HasSubstr(path_));
  }
}

}  // namespace
}  // namespace lockstep::internal
