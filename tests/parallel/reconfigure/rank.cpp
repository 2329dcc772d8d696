// One rank of a training whose ranks die and are replaced:
//
//   parallel_reconfigure_rank TRAINING RANK SIZE FOLDER [PLAN]
//
// TRAINING is one of those in training.h. The ranks meet in FOLDER, where
// `generation` holds the number of the generation that the test has announced;
// LOCKSTEP_GENERATION makes this a process that takes a place.
//
// The first ranks train without a death, and keep what they have then. Then
// they train anew by the PLAN: each rank writes its state before each step, and
// reads that of the newest step which all ranks have, when the groups were made
// again. That is what HealedTraining does. At the end a rank prints "equal" if
// its state is that of the first training, bit by bit.
//
// PLAN is "again=N", which makes the groups again before each of N steps, or
// deaths, "RANK@STEP:MOMENT" with commas between: in generation G the
// process of RANK kills itself at the Gth, when it comes to MOMENT in STEP.
// MOMENT#3 is the third time in that step.

#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/worker/healing_place.h"
#include "tests/parallel/reconfigure/training.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using Tensors = std::map<std::string, at::Tensor>;

constexpr int kSteps = 13;
// Steps before the first that PLAN concerns: what is learnt once is learnt.
constexpr int kStepsBefore = 2;
constexpr std::chrono::seconds kReplacedWithin{40};

// The death that this process is to die.
struct Death {
  int step = -1;
  std::string moment{};
  int times = 1;  // how often it comes to the moment first
};
Death next_death;
int current_step = -1;

// Returns the death of this rank in generation `generation`, if there is one.
Death death_in(const std::string& plan, int generation, int rank) {
  std::istringstream list(plan);
  std::string each;
  for (int i = 0; i <= generation; ++i) {
    if (!std::getline(list, each, ',')) return {};
  }
  const auto at = each.find('@');
  const auto colon = each.find(':');
  const auto hash = each.find('#');
  if (at == each.npos || std::stoi(each) != rank) return {};
  return {.step = std::stoi(each.substr(at + 1)),
          .moment = each.substr(colon + 1, hash - colon - 1),
          .times = hash == each.npos ? 1 : std::stoi(each.substr(hash + 1))};
}

// The resources that this process has.
struct Held {
  int64_t descriptors = 0;
  int64_t shared_bytes = 0;  // mapped
};

Held held() {
  const auto all = fs::directory_iterator("/proc/self/fd");
  Held now{.descriptors = std::distance(begin(all), end(all))};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == line.npos) continue;
    const auto end = line.substr(line.find('-') + 1);
    now.shared_bytes += static_cast<int64_t>(std::stoull(end, nullptr, 16) -
                                             std::stoull(line, nullptr, 16));
  }
  return now;
}

std::string key_of(int64_t number, const std::string& name) {
  return "state " + std::to_string(number) + " " + name;
}

// Parameters, and the state of the optimizer that this rank has.
Tensors state_of(Training& training) {
  Tensors all;
  auto& optimizer = training.optimizer();
  auto* shards = dynamic_cast<OptimizerShards*>(&optimizer);
  const OptimizerState local =
      shards ? shards->shards().local : state_dict(optimizer);
  for (const auto& [number, values] : local.state) {
    for (const auto& [name, value] : values) {
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        all[key_of(number, name)] = tensor->clone();
      }
    }
  }
  const auto parameters = training.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    all["parameter " + std::to_string(i)] = parameters[i].detach().clone();
  }
  return all;
}

void load_state(Training& training, const Tensors& all) {
  const at::NoGradGuard no_grad;
  auto parameters = training.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].copy_(all.at("parameter " + std::to_string(i)));
    parameters[i].mutable_grad().reset();
  }
  OptimizerState local;
  for (const auto& [key, tensor] : all) {
    std::istringstream words(key);
    std::string kind;
    int64_t number = 0;
    std::string name;
    words >> kind >> number >> name;
    if (kind == "state") local.state[number][name] = tensor;
  }
  auto& optimizer = training.optimizer();
  if (auto* shards = dynamic_cast<OptimizerShards*>(&optimizer)) {
    shards->prepare_load(shards->shards().groups, local)->apply();
    return;
  }
  local.param_groups = state_dict(optimizer).param_groups;
  load_state_dict(optimizer, local);
}

void write_file(const fs::path& path, const Tensors& all) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : all) dict.insert(name, tensor);
  const auto bytes = torch::pickle_save(dict);
  const fs::path temporary = path.string() + ".new";
  std::ofstream(temporary, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  fs::rename(temporary, path);
}

Tensors read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors all;
  const auto dict = torch::pickle_load(bytes).toGenericDict();
  for (const auto& item : dict) {
    all[item.key().toStringRef()] = item.value().toTensor();
  }
  return all;
}

// Returns the name of the first tensor that differs; empty if there is none.
std::string difference(const Tensors& a, const Tensors& b) {
  for (const auto& [name, tensor] : a) {
    if (!b.contains(name) || !at::equal(tensor, b.at(name))) return name;
  }
  return a.size() == b.size() ? "" : "the number of tensors";
}

class Rank {
 public:
  Rank(const std::string& name, int rank, int size, fs::path folder,
       std::string plan)
      : folder_(std::move(folder)),
        plan_(std::move(plan)),
        rank_(rank),
        generation_(generation_joined()),
        store_(c10::make_intrusive<c10d::FileStore>(
            (folder_ / "store").string(), -1)),
        world_(init_process_group("lockstep", {.timeout = kReplacedWithin,
                                               .world_size = size,
                                               .rank = rank,
                                               .store = store_})),
        make_(make_training(name)) {}

  // Returns the exit code.
  int run() {
    if (generation_ == 0) {
      training_ = make_();
      for (int step = 0; step < kSteps; ++step) train(step);
      write_file(state_file("end"), state_of(*training_));
      barrier();
      training_.reset();
    }
    training_ = make_();
    int step = 0;
    if (generation_ > 0) step = heal("this process takes a place");
    next_death = death_in(plan_, generation_, rank_);
    while (step < kSteps) {
      try {
        keep(step);
        if (times_again() > 0) make_groups_again(step);
        train(step);
        if (++step == kSteps) barrier();
      } catch (const std::exception& failure) {
        step = heal(failure.what());
        next_death = death_in(plan_, generation_, rank_);
      }
    }
    const auto name =
        difference(read_file(state_file("end")), state_of(*training_));
    if (name.empty()) {
      std::cout << "equal" << std::endl;
    } else {
      std::cout << "differs in " << name << std::endl;
    }
    barrier();  // the others may wait for the end of this rank's last step
    return 0;
  }

 private:
  static MakeTraining make_training(const std::string& name) {
    const auto colon = name.find(':');
    const auto kind = name.substr(0, colon);
    const auto rest = name.substr(colon + 1);
    if (kind == "zero") return zero_training(rest);
    if (kind == "pipeline") return pipeline_training(rest);
    return tensor_training(rest);
  }

  void train(int step) {
    current_step = step;
    training_->optimizer().zero_grad();
    training_->compute(step);
    reach("computed");
    training_->optimizer().step();
    reach("updated");
  }

  fs::path state_file(const std::string& step) const {
    return folder_ / ("state-" + std::to_string(rank_) + "-" + step);
  }

  // Keeps the state with which `step` begins.
  void keep(int step) {
    write_file(state_file(std::to_string(step)), state_of(*training_));
  }

  // Begins with the newest step whose state all ranks have kept.
  int begin_again() {
    int64_t newest = kSteps;
    while (newest > 0 && !fs::exists(state_file(std::to_string(newest)))) {
      --newest;
    }
    for (const auto& numbers : gather_numbers(default_group(), {newest})) {
      newest = std::min(newest, numbers[0]);
    }
    load_state(*training_, read_file(state_file(std::to_string(newest))));
    run_reconfigured();
    return static_cast<int>(newest);
  }

  int announced() const {
    int number = 0;
    std::ifstream(folder_ / "generation") >> number;
    return number;
  }

  int heal(const std::string& why) {
    const auto begun = std::chrono::steady_clock::now();
    std::cerr << "rank " << rank_ << ": " << why << std::endl;
    while (joined_ == generation_ && announced() <= generation_) {
      if (std::chrono::steady_clock::now() - begun > kReplacedWithin) {
        throw std::runtime_error("no generation was announced");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    joined_ = generation_ = std::max(generation_, announced());
    reconfigure({.uuid = std::to_string(generation_), .store = store_});
    return begin_again();
  }

  int times_again() const {
    return plan_.starts_with("again=") ? std::stoi(plan_.substr(6)) : 0;
  }

  // The last times must leave no more than the first ones. When a rank maps and
  // unmaps a peer's memory depends on when it hears of it, so one time says
  // little.
  void make_groups_again(int step) {
    const int time = step - kStepsBefore;
    const auto now = held();
    if (time >= 1 && time < times_again() - 1) {
      most_held_.descriptors =
          std::max(most_held_.descriptors, now.descriptors);
      most_held_.shared_bytes =
          std::max(most_held_.shared_bytes, now.shared_bytes);
    }
    if (time == times_again()) {
      std::cout << (now.descriptors <= most_held_.descriptors &&
                            now.shared_bytes <= most_held_.shared_bytes
                        ? "holds no more"
                        : "holds more")
                << std::endl;
    }
    if (time < 0 || time >= times_again()) return;
    reconfigure({.uuid = "again-" + std::to_string(time), .store = store_});
    begin_again();
  }

  const fs::path folder_;
  const std::string plan_;
  const int rank_;
  int generation_;
  int joined_ = 0;  // the generation whose groups this process has
  const c10::intrusive_ptr<c10d::FileStore> store_;
  const ProcessGroupGuard world_;
  const MakeTraining make_;
  std::unique_ptr<Training> training_;
  Held most_held_;
};

}  // namespace

void reach(const std::string& moment) {
  if (current_step != next_death.step || moment != next_death.moment) return;
  if (--next_death.times == 0) ::kill(::getpid(), SIGKILL);
}

at::Tensor reaching(const at::Tensor& tensor) {
  reach("forward");
  if (tensor.requires_grad()) {
    tensor.register_hook([](const at::Tensor&) { reach("backward"); });
  }
  return tensor;
}

}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  return lockstep::internal::testing::Rank(argv[1], std::stoi(argv[2]),
                                           std::stoi(argv[3]), argv[4],
                                           argc > 5 ? argv[5] : "")
      .run();
}
