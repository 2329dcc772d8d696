#pragma once

#include <mpi.h>

#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::internal::mpi {

// Pauses between two looks at a call that moves `bytes`. MPI has no wait with a
// deadline, and moves data only inside its calls. So there is no pause at
// first, then sched_yield, and short sleeps if it has taken long.
class Backoff {
 public:
  explicit Backoff(size_t bytes);
  void pause();

 private:
  Deadline::Clock::time_point yields_until_;
  int looks_ = 0;
};

// Throws c10::DistBackendError if the time for `call` is over, or if another
// thread has abandoned `communicator` (which may be null).
void throw_if_over(const char* call, const Deadline& deadline,
                   const Communicator* communicator);

// A nonblocking call of MPI that has been started. MPI cannot take a collective
// back: one that is given up goes on, and keeps the memory that it was given.
class Pending {
 public:
  // `start` calls MPI with the request to fill, and returns its code. `call`
  // is its name, a literal.
  template <typename Start>
  Pending(const char* call, Start&& start) : call_(call) {
    const auto guard = calls_guard();
    check(std::forward<Start>(start)(&request_), call);
  }

  // Looks once whether the call has ended, which also lets MPI work. Once it
  // has ended, status() is that of the message.
  bool ended();
  const MPI_Status& status() const { return status_; }

  // Cancels a receive: no message will come to it that has not begun to. If
  // none has begun, the receive ends soon; otherwise it ends with that message.
  void cancel();

  // Looks until the call has ended; throws like throw_if_over().
  void wait(const Deadline& deadline, const Communicator* communicator,
            size_t bytes = 0);

 private:
  const char* call_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  MPI_Status status_{};
};

}  // namespace lockstep::internal::mpi
