// One rank of a training that heals: `healing_trainer FOLDER [NAME=VALUE]...`.
// Each rank writes FOLDER/result-RANK when it has ended: the checksums of what
// the training has left, one a line. Two trainings with the same arguments but
// `kill` must have the same.
//
//   epochs=N     (2)
//   model=KIND   mlp: batch norm and dropout; plain: neither, and the ranks'
//                generators are equal; accumulate: four batches a step,
//                of which the first three are not averaged; across: a call
//                of run() adds gradients that are not averaged, and the next
//                one steps; scaled: bfloat16 with a GradScaler; experts: each
//                rank also has a layer of its own; local: ranks step alone,
//                and average every fourth step
//   zero=1       the optimizer is a ZeroRedundancyOptimizer
//   own=1        an item is per_rank()
//   sum=1        the update ends with a collective; 2: before it counts, it has
//                one of the first and the last rank (groups=ends)
//   draws=1      the update draws a random number and changes buffers; 2: so do
//                the functions of calls=1, and the update does not
//   pairs=1      two batches a step, each from a call of next()
//   leave=N      leaves the loop over the loader after each N steps
//   calls=1      also calls run() before each loop, before each step, after the
//                loop and at the end, with the moments first, top, epoch and
//                last, and first_done, ..., after the function's collective
//   buddies=1    copies on the other host; 2: only rank 0 wants them
//   critic=1     another module, of which each rank has its own buffers:
//   compute
//                changes them, and so do the functions of calls=1
//   loops=2      each epoch has a second loop, over another loader; 3: over the
//                same
//   late=1       one more DistributedDataParallel is made after HealedTraining
//   snapshot=N   loads FOLDER/snapshots/, and saves there every N steps
//   saver=FORM   a SnapshotSaver saves in FOLDER/saved/ every five steps;
//                inside: it is asked in a function of run(); outside: before
//                run() is called
//   last=N       ends after step N, and leaves a snapshot
//   outlive=R    rank R is killed once another's training has ended
//   groups=1     also uses a group of each rank alone and one of all; ends: the
//                first and the last rank also use one of their own
//   pause=MS     sleeps so long in each step, for tests that kill from outside
//   kill=LIST    "RANK@STEP:MOMENT,...": that rank kills itself in that step,
//                once: MOMENT is next, forward, backward, computed, update,
//                stepped (before the update's collective), updated, snapshot;
//                or joining, of a process that takes a place; throws, for an
//                exception in forward; exits, for exit code 0 there; leaves,
//                for _exit(0) there; stop, for SIGSTOP there; agent, for
//                SIGKILL to the agent there; agent_next and agent_updated,
//                likewise at these moments; node, for SIGSTOP to the agent and
//                all its workers; end, for SIGKILL to the agent when the
//                training has ended; lingers, for a process that does not end
//                then. With own=1 also recording, while the state is copied
//                after the update, and recorded, when it has been

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/comm/launcher_store.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/lockstep.h"
#include "lockstep/worker/healing_place.h"
#include "tests/parallel/healing/trainer.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

// The state of each rank by itself. It sees when HealedTraining copies it.
class OwnState {
 public:
  static constexpr bool state_is_per_rank = true;
  OwnState(const Kills& kills, const TrainingState& state)
      : kills_(kills), state_(state) {}

  void update() {
    values_ = values_ * 0.5 + at::rand({3}) + get_rank();
    is_recorded_next_ = true;
  }
  void compute() { is_recorded_next_ = false; }

  ItemState state_dict() const {
    ItemState state{.values = StateTree::Dict(),
                    .tensors = {{"values", values_}}};
    std::get<StateTree::Dict>(state.values.value)
        .set("rank", int64_t{get_rank()});
    if (!is_recorded_next_) return state;
    kills_.at(state_.step, "recording");
    const auto gone = [this](void*) { kills_.at(state_.step, "recorded"); };
    static float memory = 1;
    state.tensors.emplace_back("seen", at::from_blob(&memory, {1}, gone));
    return state;
  }
  void load_state_dict(const ItemState& state) {
    for (const auto& [name, tensor] : state.tensors) {
      if (name == "values") values_ = tensor.clone();
    }
    const auto* rank =
        state.values.as<StateTree::Dict>()->find("rank")->as<int64_t>();
    if (*rank != get_rank()) throw std::logic_error("another rank's state");
  }

 private:
  const Kills& kills_;
  const TrainingState& state_;
  at::Tensor values_ = at::zeros({3});
  bool is_recorded_next_ = false;
};

// A module of all ranks and, if wanted, one of this rank alone.
struct NetImpl : torch::nn::Module {
  NetImpl(torch::nn::Sequential of_all, bool with_expert)
      : shared(register_module("shared", std::move(of_all))) {
    if (!with_expert) return;
    const auto name = "expert" + std::to_string(get_rank());
    expert = register_module(name, torch::nn::Linear(4, 4));
    for (const auto& parameter : expert->parameters()) {
      set_placement(parameter, Own{});
    }
  }
  torch::nn::Sequential shared;
  torch::nn::Linear expert{nullptr};
};
TORCH_MODULE(Net);

int train(const fs::path& folder, std::map<std::string, std::string> given) {
  const auto number = [&](const std::string& name, int64_t otherwise) {
    return given.contains(name) ? std::stoll(given[name]) : otherwise;
  };
  const std::string kind = given.contains("model") ? given["model"] : "mlp";
  auto group = init_process_group("lockstep");
  const Kills kills(folder, given["kill"]);
  ProcessGroupPtr alone;
  ProcessGroupPtr other;
  ProcessGroupPtr ends;
  if (given.contains("groups")) {
    alone = new_subgroups(1);
    other = new_group();
    if (given["groups"] == "ends") ends = new_group({0, get_world_size() - 1});
  }

  torch::manual_seed(1);
  // Large enough for ZeroRedundancyOptimizer to cut them.
  const int64_t width = number("zero", 0) != 0 ? 1024 : 32;
  torch::nn::Sequential model(
      torch::nn::Linear(16, width), torch::nn::BatchNorm1d(width),
      torch::nn::ReLU(), torch::nn::Dropout(0.5), torch::nn::Linear(width, 4));
  if (kind == "plain") {
    model =
        torch::nn::Sequential(torch::nn::Linear(16, width), torch::nn::ReLU(),
                              torch::nn::Linear(width, 4));
  }
  const auto data = torch::randn({192, 16});
  TensorDataset dataset(data, data.narrow(1, 0, 4).sin());
  torch::manual_seed(kind == "plain" ? 100 : 100 + get_rank());
  DistributedDataParallel<torch::nn::Sequential> ddp(model);
  Net net(model, kind == "experts");
  std::shared_ptr<torch::optim::Optimizer> made;
  if (number("zero", 0) != 0) {
    made = std::make_shared<ZeroRedundancyOptimizer<optim::AdamW>>(
        net->parameters(), optim::AdamWOptions{.lr = 0.01});
  } else {
    made = std::make_shared<optim::AdamW>(net->parameters(),
                                          optim::AdamWOptions{.lr = 0.01});
  }
  if (kind == "local") {
    made = std::make_shared<PostLocalSGDOptimizer>(
        made, std::make_shared<PeriodicModelAverager>());
  }
  torch::optim::Optimizer& optimizer = *made;
  optim::StepLR scheduler(optimizer, {.step_size = 5});
  AveragedModel<torch::nn::Sequential> average(model,
                                               {.avg_fn = get_ema_avg_fn(0.9)});
  DistributedSampler sampler(dataset);
  GradScaler scaler({.enabled = kind == "scaled"});
  DataLoader loader(dataset, sampler, {.batch_size = 8, .num_workers = 1});
  DistributedSampler second_sampler(dataset, {.seed = 1});
  DataLoader second_loader(dataset, second_sampler, {.batch_size = 8});
  TrainingState state{
      .model = net.ptr(),
      .optimizer = &optimizer,
      .scheduler = &scheduler,
      .items = {
          {"sampler", sampler}, {"average", average}, {"scaler", scaler}}};
  if (number("loops", 1) == 2) state.items.emplace("second", second_sampler);
  OwnState own(kills, state);
  if (number("own", 0) != 0) state.items.emplace("own", own);
  torch::nn::BatchNorm1d critic(torch::nn::BatchNormOptions(16).affine(false));
  if (number("critic", 0) != 0) state.items.emplace("critic", critic);
  const auto snapshots = folder / "snapshots/";
  if (number("snapshot", 0) != 0) load_snapshot(snapshots, state);
  std::optional<SnapshotSaver> saver;
  if (given.contains("saver")) {
    SnapshotSaverOptions options{.every_steps = 5, .in_background = false};
    if (given["saver"] == "outside") options.stop_signals.clear();
    saver.emplace((folder / "saved/").string(), state, options);
  }
  if (groups_are_apart()) kills.at(0, "joining");
  struct AtEnd {
    ~AtEnd() {
      kills.at(state.step, "end");
      kills.at(state.step, "lingers");
    }
    const Kills& kills;
    const TrainingState& state;
  } const at_end{kills, state};
  const auto buddies = number("buddies", 0);
  HealedTraining training(
      state, {.buddy_copies = buddies == 2 ? get_rank() == 0 : buddies == 1});
  std::optional<DistributedDataParallel<torch::nn::Sequential>> late;
  if (number("late", 0) != 0) late.emplace(model);
  std::cout << "ready " << get_rank() << " " << getpid() << std::endl;

  const auto backward = [&](const auto& batch, double share) {
    critic(batch.data);
    auto input = batch.data;
    if (input.size(0) == 8) {
      input = input.clone();
      input.requires_grad_(true);
      input.register_hook(
          [&](const at::Tensor&) { kills.at(state.step, "backward"); });
    }
    kills.at(state.step, "forward");
    kills.at(state.step, "throws");
    kills.at(state.step, "exits");
    kills.at(state.step, "leaves");
    kills.at(state.step, "stop");
    kills.at(state.step, "agent");
    kills.at(state.step, "node");
    at::Tensor loss;
    {
      const Autocast autocast(at::kCPU, at::kBFloat16, kind == "scaled");
      auto output = kind == "local" ? model->forward(input) : ddp(input);
      if (net->expert) output = net->expert(output);
      loss = torch::mse_loss(output, batch.target) * share;
    }
    scaler.scale(loss).backward();
  };
  const auto draw = [&] {
    const at::NoGradGuard no_grad;
    const at::Tensor drawn = at::rand({1});
    for (at::Tensor& buffer : model->buffers()) {
      if (buffer.is_floating_point()) buffer.add_(drawn);
    }
  };
  const auto update = [&] {
    kills.at(state.step, "update");
    if (kind == "across" && state.step % 2 == 0) {
      ++state.step;
      return kills.at(state.step, "updated");
    }
    scaler.step(optimizer);
    scaler.update();
    scheduler.step();
    average.update_parameters(model);
    if (state.items.contains("own")) own.update();
    if (number("draws", 0) == 1) draw();
    if (number("sum", 0) == 2 && ends) {
      auto one = at::ones({1});
      all_reduce(one, {.group = ends});
    }
    ++state.step;
    kills.at(state.step, "stepped");
    if (number("sum", 0) == 1) {
      auto one = at::ones({1});
      all_reduce(one);
    }
    kills.at(state.step, "updated");
    kills.at(state.step, "agent_updated");
  };
  for (int64_t epoch = state.next_epoch(); epoch < number("epochs", 2);
       ++epoch) {
    sampler.set_epoch(epoch);
    const auto call = [&](const std::string& moment) {
      if (number("calls", 0) == 0) return;
      training.run([&] {
        kills.at(state.step, moment);
        if (number("draws", 0) == 2) draw();
        if (number("critic", 0) != 0) {
          critic(data.narrow(0, 4 * get_rank(), 4) + state.step);
        }
        auto sum = at::full({2}, static_cast<double>(state.epochs_run));
        all_reduce(sum);
        kills.at(state.step, moment + "_done");
      });
    };
    call("first");
    std::optional<torch::data::Example<>> first;
    while (const auto* batch = training.next(loader)) {
      kills.at(state.step, "next");
      kills.at(state.step, "agent_next");
      if (number("pairs", 0) != 0 && !first) {
        first = *batch;
        continue;
      }
      call("top");
      training.run(
          [&] {
            std::this_thread::sleep_for(
                std::chrono::milliseconds(number("pause", 0)));
            own.compute();
            const bool adds = kind == "across" && state.step % 2 == 0;
            if (kind != "across" || adds) optimizer.zero_grad();
            if (kind == "accumulate" || adds) {
              const auto no_sync = ddp.no_sync();
              backward(*batch, 0.5);
            }
            if (adds) return;
            if (first) backward(*first, 0.5);
            backward(*batch, kind == "accumulate" ? 0.5 : 1);
            if (alone) {
              auto one = at::ones({3});
              all_reduce(one, {.group = alone});
              all_reduce(one, {.group = other});
              if (ends) all_reduce(one.clone(), {.group = ends});
              if (one[0].item<int64_t>() != get_world_size()) {
                throw std::logic_error("a wrong sum");
              }
            }
            scaler.unscale_(optimizer);
            kills.at(state.step, "computed");
            kills.at(state.step, "stop_computed");
          },
          update);
      if (number("snapshot", 0) != 0 &&
          state.step % number("snapshot", 0) == 0) {
        training.run([&] {
          kills.at(state.step, "snapshot");
          save_snapshot(snapshots, state, {.keep_last = 2});
        });
        if (state.step == number("last", -1)) return 0;
      }
      const auto save = [&] {
        kills.at(state.step, "snapshot");
        saver->save();
      };
      if (saver && given["saver"] == "inside") {
        training.run([&] {
          if (saver->is_due()) save();
        });
      } else if (saver && saver->is_due()) {
        training.run(save);
      }
      first.reset();
      if (state.step % number("leave", 1000) == 0) break;
    }
    if (number("loops", 1) > 1) {
      auto& again = number("loops", 1) == 2 ? second_loader : loader;
      while (const auto* batch = training.next(again)) {
        training.run(
            [&] {
              optimizer.zero_grad();
              backward(*batch, 1);
            },
            update);
      }
    }
    state.epochs_run = epoch;
    call("epoch");
    if (epoch + 1 == number("epochs", 2)) call("last");
  }
  own.compute();  // leaves out what only a record has
  write_result(folder / ("result-" + std::to_string(get_rank())), state,
               training);
  if (number("outlive", -1) == get_rank()) {
    LauncherStore(std::getenv("LOCKSTEP_STORE"), std::chrono::seconds(30))
        .wait({training_ended_key()}, std::chrono::seconds(30));
    ::raise(SIGKILL);
  }
  return 0;
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  return lockstep::record([&] {
    std::map<std::string, std::string> given;
    for (int i = 2; i < argc; ++i) {
      const std::string one = argv[i];
      given[one.substr(0, one.find('='))] = one.substr(one.find('=') + 1);
    }
    return lockstep::internal::testing::train(argv[1], std::move(given));
  });
}
