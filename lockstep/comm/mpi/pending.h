#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/mpi/datatypes.h"
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

// One collective under way: its communicator, its deadline, and the memory that
// MPI works on. For one thread.
class Round {
 public:
  Round(const Communicator& communicator, const Deadline& deadline)
      : communicator_(communicator), deadline_(deadline) {}

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  MPI_Comm comm() const { return communicator_.handle(); }

  // Starts a nonblocking call and waits for its end, see Pending.
  template <typename Start>
  void run(const char* call, size_t bytes, Start&& start) {
    Pending(call, std::forward<Start>(start))
        .wait(deadline_, &communicator_, bytes);
  }

  // Everything that MPI is given goes through these functions: it is kept as
  // long as this object. References stay valid.
  const at::Tensor& keep(at::Tensor tensor) {
    return kept_.tensors.emplace_back(std::move(tensor));
  }
  const Bytes& keep(Bytes bytes) {
    return kept_.types.emplace_back(std::move(bytes));
  }
  std::vector<int>& numbers(size_t count, int value) {
    return kept_.numbers.emplace_back(count, value);
  }
  std::vector<MPI_Datatype>& types(size_t count) {
    return kept_.lists.emplace_back(count, MPI_BYTE);
  }

  // For a collective that has failed: MPI may work on its memory for ever, so
  // the memory is never freed.
  void leak_memory() {
    for (auto& type : kept_.types) type.leak();
    (void)std::make_unique<Kept>(std::move(kept_)).release();
  }

 private:
  struct Kept {
    std::deque<at::Tensor> tensors{};
    std::deque<Bytes> types{};
    std::deque<std::vector<int>> numbers{};
    std::deque<std::vector<MPI_Datatype>> lists{};
  };

  const Communicator& communicator_;
  const Deadline deadline_;
  Kept kept_;
};

}  // namespace lockstep::internal::mpi
