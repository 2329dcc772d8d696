#pragma once

#include <mpi.h>

#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::mpi {

// The pauses between two looks at a call that moves `bytes`. MPI has no wait
// with a deadline, and moves data only within its calls: none at first, then
// sched_yield, and short sleeps when it has taken long.
class Backoff {
 public:
  explicit Backoff(size_t bytes);
  void pause();

 private:
  Deadline::Clock::time_point yields_until_;
  int looks_ = 0;
};

// Throws c10::DistBackendError when the time for `call` is over, or another
// thread has abandoned `communicator` (which may be none).
void throw_if_over(const char* call, const Deadline& deadline,
                   const Communicator* communicator);

// A nonblocking call of MPI that has been started. MPI cannot take a collective
// back: one that is given up stays, with the memory that it was given.
class Pending {
 public:
  // `start` calls MPI with the request to fill, and returns its code. `call`
  // is its name, a literal.
  template <typename Start>
  Pending(const char* call, Start&& start) : call_(call) {
    const auto guard = calls_guard();
    check(std::forward<Start>(start)(&request_), call);
  }

  // One look, which also lets MPI work. Afterwards status() is that of the
  // message.
  bool ended();
  const MPI_Status& status() const { return status_; }

  // Of a receive: no message that has not begun to come will come to it. It
  // ends soon where none has; where one has, with that message.
  void cancel();

  // Looks until it has ended; throws as throw_if_over().
  void wait(const Deadline& deadline, const Communicator* communicator,
            size_t bytes = 0);

 private:
  const char* call_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  MPI_Status status_{};
};

}  // namespace lockstep::mpi
