// A rank of the training of items_training.h, for items_job_test.cpp:
//
//   items_rank KIND SNAPSHOT LOG STOP
//
// KIND is "plain" or "sharded". The ranks save every third step in the
// background. After STOP steps in all, rank 0 prints "stopped" and they wait to
// be killed; if that is the end of the training, rank 0 prints a digest of what
// each rank has.
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/state/digest.h"
#include "tests/parallel/items_end.h"
#include "tests/parallel/items_training.h"

namespace lockstep::internal::testing {
namespace {

uint64_t digest_of(Training& training) {
  Digest digest;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor dense = tensor.contiguous();
    digest.add(std::string_view(
        static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()));
  };
  for (const torch::nn::Module* module :
       {static_cast<const torch::nn::Module*>(training.net.get()),
        static_cast<const torch::nn::Module*>(training.critic.get()),
        static_cast<const torch::nn::Module*>(&training.ema)}) {
    for (const auto& [name, tensor] : state_dict(*module)) add(tensor);
  }
  add(training.curriculum.history);
  add(torch::rand({3}));
  digest.add(static_cast<uint64_t>(training.curriculum.level));
  digest.add(training.log_text());
  return digest.value();
}

void run(const std::string& kind, const std::string& snapshot,
         const std::string& log, int64_t stop) {
  torch::manual_seed(1);  // one model on all ranks
  // A file holds no state of each rank.
  Training training(
      log, kind == "plain" ? OptimizerKind::kPlain : OptimizerKind::kSharded,
      /*with_metric=*/snapshot.ends_with('/'));
  torch::manual_seed(10 + static_cast<uint64_t>(get_rank()));
  load_snapshot(snapshot, training.state);
  SnapshotSaver saver(snapshot, training.state, {.every_steps = 3});
  training.train(stop, &saver);
  if (stop < kEnd) {
    if (get_rank() == 0) std::puts("stopped");
    std::fflush(stdout);
    for (;;) pause();
  }
  saver.finish();
  const auto all = all_gather_object(Object(digest_of(training)));
  if (get_rank() != 0) return;
  for (const auto& rank : all) std::printf("%s\n", rank.dump().c_str());
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  const auto group = lockstep::init_process_group();
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  lockstep::internal::testing::run(arguments.at(0), arguments.at(1),
                                   arguments.at(2),
                                   std::stoll(arguments.at(3)));
  return 0;
}
