#include "tests/parallel/parity/cases.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace lockstep::internal::testing {
namespace {

using Cases = std::vector<Case>;

void append(Cases& cases, const Cases& more) {
  cases.insert(cases.end(), more.begin(), more.end());
}

// Returns each model in both dtypes.
Cases models() {
  Cases cases;
  for (const char* dtype : {"float32", "float64"}) {
    for (const char* model : {"mlp", "cnn", "lstm", "transformer"}) {
      for (const char* optimizer : {"sgd_momentum", "adamw"}) {
        cases.push_back(
            {.name = std::string(model) + "_" + optimizer + "_" + dtype,
             .model = model,
             .dtype = dtype,
             .optimizer = optimizer});
      }
    }
    append(cases, {{.name = std::string("mlp_adam_") + dtype,
                    .dtype = dtype,
                    .optimizer = "adam"},
                   {.name = std::string("unused_branch_") + dtype,
                    .model = "branch",
                    .dtype = dtype,
                    .optimizer = "adamw",
                    .find_unused_parameters = true},
                   {.name = std::string("static_branch_") + dtype,
                    .model = "static_branch",
                    .dtype = dtype,
                    .optimizer = "adamw",
                    .static_graph = true},
                   {.name = std::string("sparse_embedding_") + dtype,
                    .model = "sparse_lstm",
                    .dtype = dtype}});
  }
  return cases;
}

// From here on the cases use float64 unless there is a reason for float32: then
// rounding cannot hide a difference in what is computed.
Cases options() {
  return {
      {.name = "plain_sgd"},
      {.name = "many_buckets",
       .model = "transformer",
       .optimizer = "adamw",
       .bucket_cap_mb = 0.002},
      {.name = "own_buffers", .model = "cnn", .broadcast_buffers = false},
      {.name = "accumulation",
       .model = "cnn",
       .optimizer = "sgd_momentum",
       .accumulate = 3},
      {.name = "accumulation_in_many_buckets",
       .model = "lstm",
       .optimizer = "adam",
       .accumulate = 2,
       .bucket_cap_mb = 0.001},
      {.name = "accumulation_of_sparse_gradients",
       .model = "sparse_lstm",
       .accumulate = 2},
      {.name = "accumulation_with_unused_branch",
       .model = "branch",
       .optimizer = "sgd_momentum",
       .accumulate = 2,
       .find_unused_parameters = true},
      {.name = "clip_norm",
       .model = "transformer",
       .optimizer = "adamw",
       .clip = "norm"},
      {.name = "clip_value", .model = "lstm", .clip = "value"},
      {.name = "fused_sgd", .optimizer = "fused_sgd_momentum"},
      {.name = "fused_adam", .model = "lstm", .optimizer = "fused_adam"},
      {.name = "fused_adamw",
       .model = "transformer",
       .optimizer = "fused_adamw"},
      {.name = "three_ranks", .ranks = 3, .model = "cnn", .optimizer = "adamw"},
      {.name = "three_ranks_with_unused_branch",
       .ranks = 3,
       .model = "branch",
       .optimizer = "adam",
       .find_unused_parameters = true}};
}

Cases joins() {
  Cases cases;
  for (bool initial : {true, false}) {
    std::string suffix = initial ? "_by_initial_size" : "_by_active_ranks";
    append(cases, {{.name = "join" + suffix,
                    .optimizer = "sgd_momentum",
                    .early = 5,
                    .divide_by_initial_world_size = initial},
                   {.name = "join_with_buffers" + suffix,
                    .model = "cnn",
                    .optimizer = "adamw",
                    .early = 5,
                    .divide_by_initial_world_size = initial},
                   {.name = "join_under_no_sync" + suffix,
                    .model = "lstm",
                    .accumulate = 2,
                    .bucket_cap_mb = 0.001,
                    .early = 5,
                    .divide_by_initial_world_size = initial},
                   {.name = "join_with_unused_branch" + suffix,
                    .model = "branch",
                    .optimizer = "adam",
                    .find_unused_parameters = true,
                    .early = 5,
                    .divide_by_initial_world_size = initial},
                   {.name = "join_of_three_ranks" + suffix,
                    .ranks = 3,
                    .model = "cnn",
                    .early = 5,
                    .divide_by_initial_world_size = initial}});
  }
  return cases;
}

Cases mixed_precision() {
  return {{.name = "grad_scaler",
           .dtype = "float32",
           .optimizer = "adamw",
           .grad_scaler = true},
          {.name = "grad_scaler_with_clipping_and_accumulation",
           .model = "cnn",
           .optimizer = "sgd_momentum",
           .accumulate = 2,
           .clip = "norm",
           .grad_scaler = true},
          // Each Linear has inputs of two dimensions. With more dimensions
          // LibTorch adds the bias after a rounding, and Python before it.
          {.name = "autocast",
           .model = "cnn",
           .dtype = "float32",
           .optimizer = "sgd_momentum",
           .autocast = true},
          {.name = "mixed_precision",
           .dtype = "float32",
           .optimizer = "sgd_momentum",
           .mixed_precision = true}};
}

Cases hooks() {
  Cases cases{{.name = "allreduce_hook", .model = "lstm", .hook = "allreduce"}};
  for (const char* hook : {"fp16", "bf16"}) {
    for (const char* dtype : {"float32", "float64"}) {
      cases.push_back({.name = std::string(hook) + "_hook_" + dtype,
                       .model = "transformer",
                       .dtype = dtype,
                       .optimizer = "sgd_momentum",
                       .bucket_cap_mb = 0.002,
                       .hook = hook});
    }
  }
  // Uses one bucket. With several, Python's hook hangs: it starts collectives
  // when others have ended, and that order differs between ranks.
  for (int64_t rank : {1, 2, 4}) {
    cases.push_back({.name = "power_sgd_rank_" + std::to_string(rank),
                     .model = "transformer",
                     .optimizer = "sgd_momentum",
                     .hook = "power_sgd",
                     .power_sgd_rank = rank});
  }
  append(
      cases,
      {{.name = "power_sgd_float32", .dtype = "float32", .hook = "power_sgd"},
       {.name = "power_sgd_in_batches",
        .hook = "power_sgd",
        .batch_tensors_with_same_shape = true}});
  // At three ranks the order of a sum in half precision matters.
  for (const char* hook : {"fp16", "bf16", "power_sgd"}) {
    cases.push_back({.name = std::string("three_ranks_") + hook,
                     .ranks = 3,
                     .model = "transformer",
                     .dtype = "float32",
                     .optimizer = "sgd_momentum",
                     .hook = hook,
                     .bound = 1e-2,
                     .losses_only = true});
  }
  return cases;
}

Cases sharded_optimizers() {
  Cases cases;
  for (const char* zero : {"parameters", "model", "shared_parameters"}) {
    auto name = [&](const char* what) {
      return std::string("zero_of_") + zero + "_" + what;
    };
    append(cases, {{.name = name("adamw"),
                    .model = "transformer",
                    .optimizer = "adamw",
                    .zero = zero},
                   {.name = name("fused_adamw"),
                    .model = "cnn",
                    .dtype = "float32",
                    .optimizer = "fused_adamw",
                    .zero = zero},
                   {.name = name("sgd_with_clipping"),
                    .model = "lstm",
                    .optimizer = "sgd_momentum",
                    .accumulate = 2,
                    .clip = "norm",
                    .zero = zero},
                   {.name = name("adam_with_grad_scaler"),
                    .ranks = 3,
                    .optimizer = "adam",
                    .grad_scaler = true,
                    .zero = zero}});
  }
  for (Case& test : cases) {
    // Only processes that share memory can do this.
    if (test.zero == "shared_parameters") test.backends = {"lockstep"};
  }
  return cases;
}

nlohmann::json to_json(const Case& test) {
  return {{"name", test.name},
          {"model", test.model},
          {"dtype", test.dtype},
          {"optimizer", test.optimizer},
          {"lr", test.lr()},
          {"accumulate", test.accumulate},
          {"bucket_cap_mb", test.bucket_cap_mb},
          {"broadcast_buffers", test.broadcast_buffers},
          {"find_unused_parameters", test.find_unused_parameters},
          {"static_graph", test.static_graph},
          {"mixed_precision", test.mixed_precision},
          {"autocast", test.autocast},
          {"early", test.early},
          {"divide_by_initial_world_size", test.divide_by_initial_world_size},
          {"clip", test.clip},
          {"grad_scaler", test.grad_scaler},
          {"hook", test.hook},
          {"power_sgd_rank", test.power_sgd_rank},
          {"batch_tensors_with_same_shape", test.batch_tensors_with_same_shape},
          {"zero", !test.zero.empty()}};
}

}  // namespace

std::vector<Case> all_cases() {
  Cases cases;
  append(cases, models());
  append(cases, options());
  append(cases, joins());
  append(cases, mixed_precision());
  append(cases, hooks());
  append(cases, sharded_optimizers());
  return cases;
}

void write_cases(const std::filesystem::path& path, int ranks) {
  nlohmann::json cases = nlohmann::json::array();
  for (const Case& test : all_cases()) {
    if (test.ranks == ranks) cases.push_back(to_json(test));
  }
  nlohmann::json infinite = nlohmann::json::array();
  for (const auto& [step, rank] : kInfiniteLosses) {
    infinite.push_back({step, rank});
  }
  std::ofstream file(path);
  file << nlohmann::json{{"samples", kSamples},
                         {"batch_size", kBatchSize},
                         {"sampler_seed", kSamplerSeed},
                         {"steps", kSteps},
                         {"max_norm", kMaxNorm},
                         {"clip_value", kClipValue},
                         {"init_scale", kInitScale},
                         {"growth_interval", kGrowthInterval},
                         {"start_power_sgd", kStartPowerSgd},
                         {"infinite_losses", infinite},
                         {"cases", cases}};
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace lockstep::internal::testing
