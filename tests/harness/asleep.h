#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::testing {

// Waits until a thread of any process has fallen asleep, which it does in the
// call that waits for what the test is about to do. Call it after the thread
// has told that it enters that call. Several looks must find it asleep, since
// it may sleep for a moment before, too. Returns false after 20 s.
inline bool await_asleep(pid_t thread) {
  constexpr int kLooks = 5;
  const std::string path = "/proc/" + std::to_string(thread) + "/stat";
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  for (int asleep = 0; asleep < kLooks;) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::ifstream file(path);
    const std::string stat{std::istreambuf_iterator<char>(file), {}};
    asleep = stat.find(") S ") != stat.npos ? asleep + 1 : 0;
  }
  return true;
}

// The same for a thread that tells its id by setting `thread`.
inline bool await_asleep(const std::atomic<pid_t>& thread) {
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (thread == 0 && !deadline.expired()) std::this_thread::yield();
  return thread != 0 && await_asleep(thread.load());
}

}  // namespace lockstep::internal::testing
