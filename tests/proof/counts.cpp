// Counts what one rank of a training needs and sends: bytes of memory
// (metrics/memory_stats.h), and operations, calls and bytes of one step (flight
// recorder), beside what dry_run() computes. counts.py gives the cases and
// compares with formulas.
//
//   lockstep run --nproc-per-node=4 proof_counts CASES
//
// CASES is a JSON list; rank 0 prints one line of JSON for each case. A case:
//
//   kind       "replicated" (ZeRO stage 0 and 1), "sharded" (2 and 3),
//              "tensor", "pipeline", "ring", or "bubble" (takes time)
//   backend    of the groups: "lockstep" (shared memory) or "gloo"
//   axes       of the mesh, with sizes: [["data", 2], ["shard", 2]]
//   model      DryRunModel, for dry_run(); may be left out
//   others     see the functions below
#include <lockstep/lockstep.h>
#include <lockstep/model_parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/object_collectives.h"
#include "lockstep/trace/flight_recorder.h"

namespace lockstep::internal::testing {
namespace {

using Json = nlohmann::json;
using torch::nn::Linear;

int64_t bytes_of_dtype(const std::string& name) {
  static const std::map<std::string, int64_t> bytes{
      {"Bool", 1}, {"Byte", 1},  {"Char", 1},   {"Half", 2}, {"BFloat16", 2},
      {"Int", 4},  {"Float", 4}, {"Double", 8}, {"Long", 8}};
  const auto found = bytes.find(name);
  if (found != bytes.end()) return found->second;
  throw std::runtime_error("the size of " + name + " is not known here");
}

// The operations that this rank has called since this object was made, or since
// the last take().
class Calls {
 public:
  explicit Calls(std::map<std::string, std::string> names)
      : names_(std::move(names)) {
    take();
  }

  // Returns, for each group and operation, calls and bytes: of the larger one
  // of what goes in and what comes out. Those of an Agreement are apart.
  Json take() {
    std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>>
        sums;
    const FlightRecorder::Reading reading;
    for (const auto* one = reading.first(); one != nullptr; one = one->next()) {
      auto& last = last_[one->group().name];
      const uint64_t end = one->last_id();
      if (end - last > one->capacity() && last > 0) {
        throw std::runtime_error("one step has more operations than records");
      }
      const auto name = name_of(one->group().name);
      for (uint64_t id = last + 1; !name.empty() && id <= end; ++id) {
        FlightRecord record{};
        if (!one->read(id, record)) continue;
        const std::string dtype =
            record.call.dtype == nullptr ? "" : record.call.dtype;
        const std::string operation = record.call.operation;
        auto& [calls, bytes] =
            sums[{name, operation == "all_gather_into_tensor" && dtype == "Long"
                            ? "agreement"
                            : operation}];
        ++calls;
        if (dtype.empty()) continue;
        bytes += bytes_of_dtype(dtype) *
                 static_cast<int64_t>(std::max(record.call.in_elements,
                                               record.call.out_elements));
      }
      last = end;
    }
    Json rows = Json::array();
    for (const auto& [key, sum] : sums) {
      rows.push_back({key.first, key.second, sum.first, sum.second});
    }
    return rows;
  }

 private:
  // Returns the axis of a group, or "part of" the axis that split_group()
  // divided into this group and others; empty if it is another group.
  std::string name_of(const std::string& group) const {
    const auto axis = names_.find(group);
    if (axis != names_.end()) return axis->second;
    const auto divided = std::ranges::find_if(names_, [&](const auto& one) {
      return group.starts_with("split/" + one.first + "/");
    });
    return divided == names_.end() ? "" : "part of " + divided->second;
  }

  std::map<std::string, std::string> names_;  // of groups: their axes
  std::map<std::string, uint64_t> last_;
};

// Where a case runs.
struct Place {
  explicit Place(const Json& given)
      : one(given),
        axes([&] {
          std::vector<MeshAxis> list;
          for (const auto& axis : given.at("axes")) {
            list.push_back({axis[0], axis[1]});
          }
          return list;
        }()),
        mesh(init_device_mesh(axes, {.backend = given.at("backend")})),
        calls([&] {
          std::map<std::string, std::string> names;
          for (const auto& [axis, size] : axes) {
            names[mesh.group(axis)->name()] = axis;
          }
          return names;
        }()) {}

  const Json& one;
  const std::vector<MeshAxis> axes;
  const DeviceMesh mesh;
  Calls calls;

  int64_t number(const char* name) const { return one.at(name); }
  ProcessGroupPtr group(const char* axis) const {
    return mesh.layout().has(axis) ? mesh.group(axis) : nullptr;
  }
};

// Bytes since the object was made.
class Memory {
 public:
  int64_t now() const { return memory_allocated() - before_; }
  int64_t shared_now() const {
    return shared_memory_allocated() - shared_before_;
  }
  void reset() { reset_peak_memory_stats(); }
  Json peaks() const {
    return {max_memory_allocated() - before_,
            max_shared_memory_allocated() - shared_before_};
  }
  Json used() const { return {now(), shared_now()}; }

 private:
  const int64_t before_ = memory_allocated();
  const int64_t shared_before_ = shared_memory_allocated();
};

// Steps three times, and returns what the third one needed and sent: in the
// first ones states and buffers are made.
template <typename Step>
Json third_step(Place& place, Memory& memory, const Step& step) {
  step();
  step();
  place.calls.take();
  memory.reset();
  step();
  return {{"calls", place.calls.take()},
          {"peak", memory.peaks()},
          {"after_step", memory.used()}};
}

// `blocks` layers of `width` features, with `bias` or not.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(const Json& one) {
    for (int64_t i = 0; i < one.at("blocks").get<int64_t>(); ++i) {
      blocks.push_back(register_module(std::to_string(i), block_of(one)));
    }
  }
  static Linear block_of(const Json& one) {
    const int64_t width = one.at("width");
    return Linear(torch::nn::LinearOptions(width, width).bias(one.at("bias")));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x).tanh();
    return x;
  }
  std::vector<Linear> blocks;
};
TORCH_MODULE(Tower);

// The same, each layer a unit, and a head that belongs to the outermost one.
struct ShardedTowerImpl : torch::nn::Module {
  ShardedTowerImpl(const Json& one, const FullyShardOptions& options) {
    for (int64_t i = 0; i < one.at("blocks").get<int64_t>(); ++i) {
      blocks.emplace_back([&] { return TowerImpl::block_of(one); }, options);
      register_module(std::to_string(i), blocks.back().ptr());
    }
    if (one.value("head", false)) {
      head = register_module("head", TowerImpl::block_of(one));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x).tanh();
    return head ? head(x) : x;
  }
  std::vector<FullyShard<Linear>> blocks;
  Linear head{nullptr};
};
TORCH_MODULE(ShardedTower);

at::Tensor batch_of(const Json& one) {
  return torch::ones({2, one.at("width").get<int64_t>()});
}

// zero_stage 0 or 1; shared: one copy of the parameters; bucket_mb.
Json replicated(Place& place) {
  const auto& one = place.one;
  Memory memory;
  memory.reset();
  DistributedDataParallel<Tower> model(
      Tower(one), {.process_group = place.mesh.group(place.axes[0].name),
                   .bucket_cap_mb = one.at("bucket_mb").get<double>()});
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (one.at("zero_stage") == 0) {
    optimizer = std::make_unique<optim::AdamW>(model->parameters());
  } else {
    optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
        model, optim::AdamWOptions{},
        ZeroRedundancyOptions{.shared_parameters = one.at("shared")});
  }
  const Json construction = memory.peaks();
  const Json constructed = memory.used();
  const auto batch = batch_of(one);
  auto counted = third_step(place, memory, [&] {
    optimizer->zero_grad();
    model(batch).square().mean().backward();
    optimizer->step();
  });
  counted["construction_peak"] = construction;
  counted["constructed"] = constructed;
  return counted;
}

// zero_stage 2 or 3; shared: one copy of the parameters; head; root_reshards:
// false leaves the default, by which the outermost unit stays gathered;
// neighbours: the number of ranks as reshard_after_forward.
Json sharded(Place& place) {
  const auto& one = place.one;
  const bool reshards = one.at("zero_stage") == 3;
  FullyShardOptions options{.group = place.mesh.group("shard"),
                            .replicate_group = place.group("data"),
                            .reshard_after_forward = reshards,
                            .shared_memory = one.at("shared")};
  if (one.contains("neighbours")) {
    options.reshard_after_forward = one.at("neighbours").get<int>();
  }
  auto root = options;
  if (reshards && !one.value("root_reshards", true)) {
    root.reshard_after_forward.reset();
  }
  Memory memory;
  memory.reset();
  FullyShard<ShardedTower> model([&] { return ShardedTower(one, options); },
                                 root);
  const Json construction = memory.peaks();
  const Json constructed = memory.used();
  optim::AdamW optimizer(model->parameters());
  const auto batch = batch_of(one);
  auto counted = third_step(place, memory, [&] {
    optimizer.zero_grad();
    model(batch).square().mean().backward();
    optimizer.step();
  });
  counted["construction_peak"] = construction;
  counted["constructed"] = constructed;
  return counted;
}

// layers, hidden, heads, batch, sequence; sequence_parallel.
Json tensor(Place& place) {
  const bool sequence = place.one.at("sequence_parallel");
  const int64_t hidden = place.number("hidden");
  const auto group = place.mesh.group("tensor");
  struct Layer {
    nn::SequenceParallelLayerNorm first, second;
    nn::ParallelSelfAttention attention;
    nn::ColumnParallelLinear up;
    nn::RowParallelLinear down;
  };
  std::vector<Layer> layers;
  for (int64_t i = 0; i < place.number("layers"); ++i) {
    layers.push_back({nn::SequenceParallelLayerNorm(hidden, {.group = group}),
                      nn::SequenceParallelLayerNorm(hidden, {.group = group}),
                      nn::ParallelSelfAttention(
                          hidden, place.number("heads"),
                          {.group = group, .sequence_parallel = sequence}),
                      nn::ColumnParallelLinear(
                          hidden, 4 * hidden,
                          {.group = group, .sequence_parallel = sequence}),
                      nn::RowParallelLinear(
                          4 * hidden, hidden,
                          {.group = group, .sequence_parallel = sequence})});
  }
  const int64_t tokens =
      place.number("sequence") / (sequence ? group->size() : 1);
  const auto input =
      torch::ones({place.number("batch"), tokens, hidden}).requires_grad_();
  Memory memory;
  return third_step(place, memory, [&] {
    auto x = input;
    for (auto& layer : layers) {
      // Without sequence parallelism norms are ordinary ones.
      const auto normed = [&](nn::SequenceParallelLayerNorm& norm) {
        return sequence ? norm(x) : at::layer_norm(x, {hidden});
      };
      x = x + layer.attention(normed(layer.first));
      x = x + layer.down(layer.up(normed(layer.second)).relu());
    }
    x.square().mean().backward();
  });
}

// schedule, micro_batches, stages_per_rank, hidden, rows of a micro-batch.
Json pipeline(Place& place) {
  const auto group = place.mesh.group("pipeline");
  const auto schedule =
      make_pipeline_schedule(place.one.at("schedule"), group->size(),
                             static_cast<int>(place.number("micro_batches")),
                             static_cast<int>(place.number("stages_per_rank")));
  const auto facts = check_pipeline_schedule(schedule);
  const int64_t hidden = place.number("hidden");
  std::vector<PipelineStage> stages;
  for (int stage = 0; stage < facts.stages; ++stage) {
    if (facts.rank_of_stage[stage] == group->rank()) {
      stages.emplace_back(stage, Linear(hidden, hidden));
    }
  }
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return torch::mse_loss(output, target);
  };
  Pipeline pipe(stages, {.schedule = schedule, .loss = loss, .group = group});
  const auto batch = torch::ones(
      {place.number("micro_batches") * place.number("rows"), hidden});
  Memory memory;
  return third_step(place, memory, [&] { pipe.step(batch, batch); });
}

// layers, batch, heads, sequence, head_dim; causal.
Json ring(Place& place) {
  const auto group = place.mesh.group("context");
  const auto input = torch::ones({place.number("batch"), place.number("heads"),
                                  place.number("sequence") / group->size(),
                                  place.number("head_dim")})
                         .requires_grad_();
  Memory memory;
  return third_step(place, memory, [&] {
    auto x = input;
    for (int64_t i = 0; i < place.number("layers"); ++i) {
      x = ring_attention(
          x, x, x,
          {.group = group, .is_causal = place.one.at("causal").get<bool>()});
    }
    x.square().mean().backward();
  });
}

// When this rank slept, in nanoseconds of the clock that all processes share.
struct Nap {
  int64_t begin;
  int64_t end;
};
std::vector<Nap> naps;

void nap(int64_t milliseconds) {
  using Clock = std::chrono::steady_clock;
  const auto now = [] {
    return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
  };
  const auto begin = now();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  naps.push_back({begin, now()});
}

// Returns its input; its backward sleeps.
class SleepInBackward : public torch::autograd::Function<SleepInBackward> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& input, int64_t milliseconds) {
    context->saved_data["milliseconds"] = milliseconds;
    return input.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    nap(context->saved_data["milliseconds"].toInt());
    return {gradients[0], {}};
  }
};

// Sleeps once in forward, once for the gradient of the input, and once for that
// of the parameter, so that ranks need no cores of their own. Stage 0, whose
// input needs no gradient, does both with the parameters.
struct SleepingImpl : torch::nn::Module {
  explicit SleepingImpl(int64_t given) : milliseconds(given) {
    weight = register_parameter("weight", torch::zeros({1}));
    first = register_parameter("first", torch::zeros({1}));
  }
  at::Tensor forward(at::Tensor x) {
    nap(milliseconds);
    if (!x.requires_grad()) x = x + first;
    return SleepInBackward::apply(x, milliseconds) +
           SleepInBackward::apply(weight, milliseconds);
  }
  int64_t milliseconds;
  at::Tensor weight, first;
};
TORCH_MODULE(Sleeping);

// schedule, micro_batches, stages_per_rank, milliseconds. Returns for each rank
// how long it slept, and from when to when.
Json bubble(Place& place) {
  const auto group = place.mesh.group("pipeline");
  const auto schedule =
      make_pipeline_schedule(place.one.at("schedule"), group->size(),
                             static_cast<int>(place.number("micro_batches")),
                             static_cast<int>(place.number("stages_per_rank")));
  const auto facts = check_pipeline_schedule(schedule);
  std::vector<PipelineStage> stages;
  std::vector<Sleeping> sleeping;
  for (int stage = 0; stage < facts.stages; ++stage) {
    if (facts.rank_of_stage[stage] != group->rank()) continue;
    sleeping.emplace_back(0);
    stages.emplace_back(stage, sleeping.back());
  }
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return torch::mse_loss(output, target);
  };
  Pipeline pipe(stages, {.schedule = schedule, .loss = loss, .group = group});
  const auto batch = torch::ones({place.number("micro_batches"), 1});
  pipe.step(batch, batch);  // tells the shapes
  for (auto& one : sleeping) one->milliseconds = place.number("milliseconds");
  naps.clear();
  barrier({.group = group});
  pipe.step(batch, batch);
  int64_t slept = 0;
  for (const auto& [begin, end] : naps) slept += end - begin;
  const auto times = simulate_pipeline(schedule);
  return {{"slept", slept},
          {"begin", naps.front().begin},
          {"end", naps.back().end},
          {"simulated", {times.makespan, times.bubble_fraction}}};
}

Json counted(Place& place) {
  const std::string kind = place.one.at("kind");
  if (kind == "replicated") return replicated(place);
  if (kind == "sharded") return sharded(place);
  if (kind == "tensor") return tensor(place);
  if (kind == "pipeline") return pipeline(place);
  if (kind == "ring") return ring(place);
  if (kind == "bubble") return bubble(place);
  throw std::invalid_argument("no kind of case is named " + kind);
}

Json computed(const Place& place) {
  if (!place.one.contains("model")) return nullptr;
  const auto& given = place.one["model"];
  DryRunModel model;
  const auto take = [&](const char* name, auto& field) {
    if (given.contains(name)) given[name].get_to(field);
  };
  take("parameters", model.parameters);
  take("zero_stage", model.zero_stage);
  take("units", model.units);
  take("layers", model.layers);
  take("hidden", model.hidden);
  take("sequence", model.sequence);
  take("micro_batch", model.micro_batch);
  take("micro_batches", model.micro_batches);
  take("sequence_parallel", model.sequence_parallel);
  const auto run = dry_run(MeshLayout(place.axes, get_world_size()), model);
  Json rows = Json::array();
  for (const auto& row : run.traffic) {
    rows.push_back({row.axis, row.operation, row.calls, row.bytes, row.what});
  }
  return {
      {"traffic", rows},
      {"memory",
       {run.memory.parameters, run.memory.gradients, run.memory.optimizer}}};
}

int run(const char* cases) {
  record_memory_stats();
  torch::set_num_threads(1);
  auto group = init_process_group({}, {.timeout = std::chrono::seconds(60)});
  for (const auto& one : Json::parse(cases)) {
    Place place(one);
    const auto all = gather_object(counted(place));
    if (get_rank() != 0) continue;
    const Json line{{"ranks", all}, {"dry_run", computed(place)}};
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: proof_counts CASES\n");
    return 2;
  }
  return lockstep::record(
      [&] { return lockstep::internal::testing::run(argv[1]); });
}
