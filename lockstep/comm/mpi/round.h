#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/mpi/datatypes.h"
#include "lockstep/comm/mpi/pending.h"

namespace lockstep::internal::mpi {

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
