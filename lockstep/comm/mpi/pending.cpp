#include "lockstep/comm/mpi/pending.h"

#include <c10/util/Exception.h>
#include <sched.h>

#include <thread>

namespace lockstep::internal::mpi {
namespace {

using std::chrono::microseconds;

constexpr int kLooksAtOnce = 50;
// A sleep would slow down a transfer that is under way, so there is none before
// the transfer should have ended even on a slow network.
constexpr microseconds kYields{50'000};
constexpr size_t kSlowBytesPerMicrosecond = 50;
constexpr microseconds kSleep{200};

}  // namespace

Backoff::Backoff(size_t bytes)
    : yields_until_(Deadline::Clock::now() + kYields +
                    microseconds(bytes / kSlowBytesPerMicrosecond)) {}

void Backoff::pause() {
  if (++looks_ < kLooksAtOnce) return;
  if (Deadline::Clock::now() < yields_until_) {
    ::sched_yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
}

void throw_if_over(const char* call, const Deadline& deadline,
                   const Communicator* communicator) {
  if (communicator != nullptr && communicator->abandoned()) {
    throw c10::DistBackendError(std::string(call) +
                                " was given up: this rank has left the group");
  }
  if (deadline.expired()) {
    throw c10::DistBackendError(
        c10::str(call, " had not ended after ", deadline.elapsed().count(),
                 " ms (allowed ", deadline.allowed().count(),
                 " ms): a rank is late, dead, or in another operation"));
  }
}

bool Pending::ended() {
  int flag = 0;
  const auto guard = calls_guard();
  check(MPI_Test(&request_, &flag, &status_), call_);
  return flag != 0;
}

void Pending::cancel() {
  const auto guard = calls_guard();
  check(MPI_Cancel(&request_), "MPI_Cancel");
}

void Pending::wait(const Deadline& deadline, const Communicator* communicator,
                   size_t bytes) {
  Backoff backoff(bytes);
  while (!ended()) {
    throw_if_over(call_, deadline, communicator);
    backoff.pause();
  }
}

}  // namespace lockstep::internal::mpi
