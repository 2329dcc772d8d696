// One rank of a job in which a rank dies, fails or leaves outside of a
// collective: `faults_departing SCENARIO BACKEND [NAME=N]`, with the
// environment of a rank. It prints and ends as described in rank.cpp; it also
// prints
//
//   waiting R        it enters the call in which it is to be killed
//   child R TEXT     the errors of its forked child
//
// Scenarios, in which something happens to the rank `odd`:
//
//   new_group   it is killed before new_group(), which the others call
//   enters      it calls new_group() alone, and the test kills it; the others
//               call it as soon as the file LOCKSTEP_TEST_GO exists
//   monitored   it is killed before monitored_barrier()
//   meeting     it is killed in init_process_group(), in a world that meets in
//               the file LOCKSTEP_TEST_STORE, before it publishes its host
//   leaves      it destroys its group, and then prints whether the file
//               LOCKSTEP_TEST_GO existed; the others all_reduce, and leave as
//               soon as the file exists
//   absent      as `leaves`, but the others call monitored_barrier()
//   throws      it throws an exception that nobody catches, and then the others
//               do so, too
//   differs     it calls all_reduce() with a tensor of another size, and nobody
//               catches what the ranks throw
//   inside      it throws, and main() catches around the group's scope; `odd`
//               then tidies up for `tidies` ms
//   outside     as `inside`, but main() catches within the group's scope
//   record      as `inside`, but in lockstep::record()
//   forks       its child uses the group, destroys it and returns from main();
//               then all ranks continue

#include <ATen/ATen.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/record.h"
#include "tests/faults/rank_report.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const int my_rank = own_rank();

class DeadlyStore : public c10d::FileStore {
 public:
  using FileStore::FileStore;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key.ends_with("host/" + std::to_string(my_rank))) ::raise(SIGKILL);
    FileStore::set(key, value);
  }
};

ProcessGroupGuard join(const std::string& scenario, const std::string& backend,
                       const Arguments& given) {
  InitProcessGroupOptions options{
      .timeout = milliseconds(given.get("timeout", 300'000))};
  if (scenario == "meeting") {
    const std::string path = std::getenv("LOCKSTEP_TEST_STORE");
    options.world_size = std::stoi(std::getenv("WORLD_SIZE"));
    options.rank = my_rank;
    if (my_rank == given.get("odd")) {
      options.store =
          c10::make_intrusive<DeadlyStore>(path, options.world_size);
    } else {
      options.store =
          c10::make_intrusive<c10d::FileStore>(path, options.world_size);
    }
  }
  return init_process_group(backend, options);
}

void await_go() {
  const char* go = std::getenv("LOCKSTEP_TEST_GO");
  for (int i = 0; i < 6000 && !std::filesystem::exists(go); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
}

void all_reduce_ones() {
  auto tensor = at::ones({1000});
  all_reduce(tensor);
  if (!tensor.eq(get_world_size()).all().item<bool>()) {
    throw std::runtime_error("the sum is wrong");
  }
}

void throw_or_go_on(bool odd) {
  all_reduce_ones();
  if (odd) throw std::runtime_error("no such file: numbers.csv");
  while (true) all_reduce_ones();
}

void play(const std::string& scenario, bool odd) {
  all_reduce_ones();
  if (scenario == "new_group") {
    if (odd) ::raise(SIGKILL);
    new_group();
  } else if (scenario == "enters") {
    if (odd) {
      say("waiting");
    } else {
      say("ready");
      await_go();
    }
    new_group();
  } else if (scenario == "monitored") {
    if (odd) ::raise(SIGKILL);
    monitored_barrier();
  } else if (scenario == "leaves" || scenario == "absent") {
    if (odd) {
      say("ready");
      destroy_process_group();
      say("left", std::filesystem::exists(std::getenv("LOCKSTEP_TEST_GO"))
                      ? "after its peers knew"
                      : "before its peers knew");
    } else if (scenario == "leaves") {
      all_reduce_ones();
    } else {
      monitored_barrier();
    }
  } else {
    throw_or_go_on(odd);
  }
}

// The child returns from main() like a program that forgets to exit.
int fork_and_go_on(const ProcessGroupGuard& /* of main() */, bool odd) {
  all_reduce_ones();
  if (odd) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        all_reduce_ones();
        say("child", "its operation went well");
      } catch (const std::exception& error) {
        say("child", one_line(error));
      }
      destroy_process_group();
      say("child", is_initialized() ? "is initialized" : "is not initialized");
      return 0;
    }
    int status = -1;
    if (::waitpid(child, &status, 0) != child || status != 0) {
      throw std::runtime_error("the child ended with " +
                               std::to_string(status));
    }
  }
  for (int i = 0; i < 3; ++i) all_reduce_ones();
  new_group();
  destroy_process_group();
  say("done");
  return 0;
}

}  // namespace

int run(const std::string& scenario, const std::string& backend,
        const Arguments& given) {
  const bool odd = my_rank == given.get("odd", -1);
  if (scenario == "forks") {
    return fork_and_go_on(join(scenario, backend, given), odd);
  }
  if (scenario == "throws") {
    auto group = join(scenario, backend, given);
    throw_or_go_on(odd);
  }
  if (scenario == "differs") {
    auto group = join(scenario, backend, given);
    auto tensor = at::ones({odd ? 5 : 4});
    all_reduce(tensor);
  }
  if (scenario == "record") {
    return record([&] {
      auto group = join(scenario, backend, given);
      throw_or_go_on(odd);
      return 0;
    });
  }
  if (scenario == "inside") {
    try {
      auto group = join(scenario, backend, given);
      throw_or_go_on(odd);
    } catch (const std::exception& error) {
      say("failed", one_line(error));
      if (odd) std::this_thread::sleep_for(milliseconds(given.get("tidies")));
      return 1;
    }
  }
  try {
    auto group = join(scenario, backend, given);
    try {
      play(scenario, odd);
      if (!odd) say("done");
    } catch (const std::exception& error) {
      say("failed", one_line(error));
      if (scenario == "outside") return 1;
      if (scenario == "leaves") {
        await_go();
        return 0;
      }
    }
    std::this_thread::sleep_for(seconds(60));
  } catch (const std::exception& error) {
    say("refused", one_line(error));
  }
  return 0;
}

}  // namespace lockstep::internal::testing
