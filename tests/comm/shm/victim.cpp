// A rank of a group over shared memory that is killed or stopped
// (failures_test.cpp). The environment has RANK, WORLD_SIZE, MASTER_ADDR and
// MASTER_PORT; the argument says what happens:
//
//   die-before     killed before its first collective
//   die-between    killed while the others wait in their second
//   die-in-wait    killed while it waits in one that the others do not enter
//   die-amid       reduces 16 MiB again and again until it is killed
//   stop           stops while the others wait in their second, and takes part
//                  in it after it is continued

#include <ATen/ATen.h>

#include <csignal>
#include <string>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"

namespace {

void await(c10d::Store& store, const std::string& key) {
  store.wait({key}, std::chrono::seconds(30));
}

}  // namespace

int main(int, char** argv) {
  const std::string harm = argv[1];
  auto group = lockstep::init_process_group(
      "cpu:shm", {.timeout = std::chrono::seconds(30)});
  auto& store = *lockstep::internal::inside(group).store();
  auto tensor = at::ones({1000});
  if (harm == "die-before") {
    ::raise(SIGKILL);
  }
  lockstep::all_reduce(tensor);
  if (harm == "die-between") {
    await(store, "entering");
    ::raise(SIGKILL);
  }
  if (harm == "die-in-wait") {
    std::thread([&] {
      await(store, "waiting");
      ::raise(SIGKILL);
    }).detach();
    lockstep::all_reduce(tensor);
  }
  if (harm == "die-amid") {
    auto large = at::ones({4 << 20});
    while (true) lockstep::all_reduce(large);
  }
  if (harm == "stop") {
    await(store, "entering");
    ::raise(SIGSTOP);
    lockstep::all_reduce(tensor);
  }
}
