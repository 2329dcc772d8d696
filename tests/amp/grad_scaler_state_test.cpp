
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/amp/grad_scaler.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(GradScalerState, SurvivesJsonBitByBit) {
  GradScalerState state{.scale = 0.1,
                        .growth_factor = 1 + 1e-15,
                        .backoff_factor = 1.0 / 3,
                        .growth_interval = 123456789012,
                        .growth_tracker = 7};
  auto text = to_json(state);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(grad_scaler_state_from_json(text), state);
}

TEST(GradScalerState, ReadsWhatPythonsJsonWrites) {
  auto state = grad_scaler_state_from_json(
      R"({"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,)"
      R"( "growth_interval": 2000, "_growth_tracker": 3, "more": null})");
  EXPECT_EQ(state, (GradScalerState{.scale = 1024, .growth_tracker = 3}));
}

TEST(GradScalerState, RefusesWhatIsNoState) {
  auto refuses = [](const char* text, const char* why) {
    EXPECT_THAT([&] { grad_scaler_state_from_json(text); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(why)))
        << text;
  };
  refuses("", "not a JSON object");
  refuses("[1]", "not a JSON object");
  refuses("{}", "\"scale\"");
  refuses(R"({"scale": "1", "growth_factor": 2})", "not a number");
  refuses(R"({"scale": 1, "growth_factor": 2, "backoff_factor": 0.5,)"
          R"("growth_interval": 0.5, "_growth_tracker": 3})",
          "\"growth_interval\" that is not an integer");
  EXPECT_THAT(
      [] { to_json({.scale = std::numeric_limits<double>::infinity()}); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("scale is inf")));
}

// Regression: what came before the entry that does not fit was taken over.
TEST(GradScalerState, ATreeThatDoesNotFitChangesNothing) {
  StateTree::Dict dict;
  dict.set("scale", 4.0);
  dict.set("growth_factor", 3.0);
  dict.set("backoff_factor", "half");
  const GradScalerState before{.scale = 8, .growth_tracker = 1};
  auto state = before;
  EXPECT_THAT([&] { from_state_tree(dict, state); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("\"backoff_factor\" of another type")));
  EXPECT_EQ(state, before);
}

// One scaler's state is loaded into another, also before that one has seen a
// loss: both continue alike.
TEST(GradScalerState, GoesOnInAnotherScaler) {
  auto step = [](GradScaler& scaler) {
    auto weight = torch::ones({2}).requires_grad_();
    torch::optim::SGD optimizer({weight}, 0.1);
    scaler.scale(weight.sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  };
  GradScaler first({.device = at::kCPU,
                    .init_scale = 8,
                    .growth_factor = 4,
                    .backoff_factor = 0.25,
                    .growth_interval = 3});
  step(first);
  step(first);
  auto state = first.state_dict();
  EXPECT_EQ(state, (GradScalerState{.scale = 8,
                                    .growth_factor = 4,
                                    .backoff_factor = 0.25,
                                    .growth_interval = 3,
                                    .growth_tracker = 2}));
  GradScaler fresh({.device = at::kCPU});
  GradScaler used({.device = at::kCPU});
  step(used);
  for (GradScaler* other : {&fresh, &used}) {
    other->load_state_dict(state);
    EXPECT_EQ(other->state_dict(), state);
    EXPECT_EQ(other->get_growth_interval(), 3);
    step(*other);
    EXPECT_EQ(other->get_scale(), 32);
  }
}

TEST(GradScalerState, OfADisabledScalerIsNone) {
  GradScaler disabled({.device = at::kCPU, .enabled = false});
  EXPECT_EQ(disabled.state_dict(), std::nullopt);
  disabled.load_state_dict(GradScalerState{.scale = 2});
  EXPECT_EQ(disabled.get_scale(), 1);
  GradScaler enabled({.device = at::kCPU});
  EXPECT_THAT([&] { enabled.load_state_dict(disabled.state_dict()); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("disabled")));
}

}  // namespace
}  // namespace lockstep::internal
