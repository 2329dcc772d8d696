// One rank of a job in which ranks are killed, stopped or fail: `faults_rank
// SCENARIO BACKEND [NAME=N]`, with the environment of a rank. It prints these
// lines, each with its rank, on stdout:
//
//   ready R             it has come to the point that the test needs
//   turn R              it makes progress; printed every 50 ms at most
//   failed R TEXT       an operation failed; line ends in TEXT are " | "
//   refused R TEXT      init_process_group() failed
//   left R              it has destroyed its group after the failure
//   done R              its part went well
//
// Then it stays until it is killed, a minute at most, so that its own end
// affects none of its peers. Scenarios:
//
//   loop      all_reduce for ever, of sizes that rotate, checked
//   first     the rank `odd` waits to be killed, the others all_reduce
//   disagree  `calls` calls, each of which fails: `odd` differs first in the
//             element count, then in dtype, reduce operation and operation;
//             at the end all ranks make the same call
//   skip      all_reduce, broadcast, barrier; `odd` leaves out the first
//   behind    four all_reduces; `odd` leaves out the last
//   chain     each rank sends messages to the next one, around, for ever
//   relay     rank 1 waits to be killed, rank 2 for a message of rank 1, rank 3
//             for one of rank 2 in a group of these two, rank 0 for one of rank
//             3
//   storm     `turns` operations (storm.h) of `seed`
//   shared    all_reduce of empty_shared(), `mebibytes`; prints "shared R 0" or
//             1
//   held      as `shared`, in a world that meets in the file
//             LOCKSTEP_TEST_STORE; rank 1 prints "holding 1" during the
//             handshake of shared memory and continues as soon as a file with
//             ".go" appended to that name exists
//
// More arguments: `timeout` in ms (30,000); `elements`, of loop, instead of
// several sizes; `ordered`, of storm; `leave`, to destroy the group after a
// failure; `end`, to end instead of staying; `quit`, to end at once after a
// failure, without destroying anything; `unwind`, to let the exception leave
// the scope of the group's guard.

#include <ATen/ATen.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/point_to_point.h"
#include "tests/faults/rank_report.h"
#include "tests/faults/storm.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const int my_rank = own_rank();

// Rank 1 stops before it announces its listening socket; rank 0 has one
// already, and waits.
class HeldStore : public c10d::FileStore {
 public:
  HeldStore(const std::string& path, int size)
      : FileStore(path, size), go_(path + ".go") {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (my_rank == 1 && key.ends_with("shm/1")) {
      say("holding");
      for (int i = 0; i < 2000 && !std::filesystem::exists(go_); ++i) {
        std::this_thread::sleep_for(milliseconds(10));
      }
    }
    FileStore::set(key, value);
  }

 private:
  std::string go_;
};

void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what + " is wrong");
}

bool all_are(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item<bool>();
}

void loop(const Arguments& given) {
  std::vector<int64_t> sizes{1, 700, 40'000, 3 << 20};
  if (const int only = given.get("elements")) sizes = {only};
  auto said = std::chrono::steady_clock::now();
  for (int64_t turn = 0;; ++turn) {
    auto tensor = at::full({sizes[turn % sizes.size()]}, turn % 100);
    all_reduce(tensor);
    expect(all_are(tensor.slice(0, 0, 100), turn % 100 * get_world_size()),
           "turn " + std::to_string(turn));
    if (turn == 5) say("ready");
    const auto now = std::chrono::steady_clock::now();
    if (now - said > milliseconds(50)) {
      said = now;
      say("turn");
    }
  }
}

void chain() {
  const int size = get_world_size();
  auto got = at::empty({1000});
  for (int64_t turn = 0;; ++turn) {
    auto sent = isend(at::full({1000}, 1.F * (turn % 100)),
                      (my_rank + 1) % size, {.tag = 3});
    recv(got, (my_rank + size - 1) % size, {.tag = 3});
    sent->wait();
    expect(all_are(got, turn % 100), "turn " + std::to_string(turn));
    if (turn == 5) say("ready");
  }
}

void relay() {
  const auto pair = new_group({2, 3});
  all_reduce(at::ones({1000}));
  say("ready");
  if (my_rank == 1) std::this_thread::sleep_for(seconds(60));
  recv(at::empty({1000}), (my_rank + 3) % 4,
       {.group = my_rank == 3 ? pair : nullptr});
}

void disagree(int calls, bool odd) {
  auto usual = at::ones({1000});
  const std::function<void()> different[] = {
      [] { all_reduce(at::ones({1001})); },
      [] { all_reduce(at::ones({1000}, at::kInt)); },
      [&] { all_reduce(usual, {.op = ReduceOp::MAX}); },
      [&] { broadcast(usual, 0); }};
  for (int call = 0; call < calls; ++call) {
    try {
      if (odd) {
        different[call]();
      } else {
        all_reduce(usual);
      }
      throw std::logic_error("nothing was noticed");
    } catch (const c10::Error& error) {
      say("failed", one_line(error));
    }
  }
  auto same = at::ones({1000});
  all_reduce(same);
  expect(all_are(same, get_world_size()), "the sum");
}

void skip(bool odd) {
  auto tensor = at::ones({1000});
  all_reduce(tensor);
  if (!odd) all_reduce(tensor);
  broadcast(at::ones({500}), 0);
  barrier();
}

void behind(bool odd) {
  auto tensor = at::ones({1000});
  for (int i = 0; i < 3; ++i) all_reduce(tensor);
  say("ready");
  if (!odd) all_reduce(tensor);
}

void shared(int mebibytes) {
  auto tensor = empty_shared({mebibytes * (1 << 18)});
  say("shared", std::to_string(is_shared(tensor)));
  tensor.fill_(my_rank + 1);
  all_reduce(tensor);
  const int size = get_world_size();
  expect(all_are(tensor, size * (size + 1) / 2), "the sum");
}

void play(const std::string& scenario, const Arguments& given) {
  const bool odd = my_rank == given.get("odd", -1);
  if (scenario == "loop") {
    loop(given);
  } else if (scenario == "chain") {
    chain();
  } else if (scenario == "relay") {
    relay();
  } else if (scenario == "first") {
    say("ready");
    // Until it is killed: while the others may still be in init, a death there
    // would be another test's.
    if (odd) std::this_thread::sleep_for(seconds(60));
    all_reduce(at::ones({1000}));
  } else if (scenario == "disagree") {
    disagree(given.get("calls"), odd);
  } else if (scenario == "skip") {
    skip(odd);
  } else if (scenario == "behind") {
    behind(odd);
  } else if (scenario == "storm") {
    run_storm({.seed = static_cast<uint32_t>(given.get("seed")),
               .turns = given.get("turns"),
               .in_rank_order = given.get("ordered") != 0});
  } else {
    shared(given.get("mebibytes", 1));
  }
}

std::optional<ProcessGroupGuard> join(const std::string& scenario,
                                      const std::string& backend,
                                      const Arguments& given) {
  InitProcessGroupOptions options{
      .timeout = milliseconds(given.get("timeout", 30'000))};
  if (scenario == "held") {
    options.world_size = std::stoi(std::getenv("WORLD_SIZE"));
    options.rank = my_rank;
    options.store = c10::make_intrusive<HeldStore>(
        std::getenv("LOCKSTEP_TEST_STORE"), options.world_size);
  }
  try {
    return init_process_group(backend, options);
  } catch (const std::exception& error) {
    say("refused", one_line(error));
    return std::nullopt;
  }
}

int take_part(const std::string& scenario, const std::string& backend,
              const Arguments& given) {
  bool right = false;
  if (auto group = join(scenario, backend, given)) {
    try {
      play(scenario, given);
      right = true;
      say("done");
    } catch (const std::exception& error) {
      say("failed", one_line(error));
      if (given.get("quit")) ::_exit(1);
      if (given.get("unwind")) throw;
    }
    if (given.get("leave")) {
      group.reset();
      say("left");
    }
    if (!given.get("end")) std::this_thread::sleep_for(seconds(60));
  }
  return right ? 0 : 1;
}

}  // namespace

int run(const std::string& scenario, const std::string& backend,
        const Arguments& given) {
  try {
    return take_part(scenario, backend, given);
  } catch (const std::exception&) {  // caught, so the group's guard unwinds
    return 1;
  }
}

}  // namespace lockstep::internal::testing
