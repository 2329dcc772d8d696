#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/base/deadline.h"

// MPI in this process, and communicators. Internal to the module.
namespace lockstep::mpi {

// Throws c10::DistBackendError with MPI's words for `code` unless it is
// MPI_SUCCESS.
void check(int code, const char* call);

// Every call of MPI is made under this: a lock where MPI runs with
// MPI_THREAD_SERIALIZED, nothing with MPI_THREAD_MULTIPLE.
std::unique_lock<std::mutex> calls_guard();

// Starts MPI unless the program has. What is started here is finalised at
// exit, unless something has failed or a group still lives: MPI_Finalize waits
// for ranks that may never come, while mpirun ends the others when one leaves
// without it. Throws std::invalid_argument where MPI has ended, or was started
// with less than MPI_THREAD_SERIALIZED.
void start_mpi();

// Whether MPI was finalised: nothing of it may be called any more.
bool has_ended();

// Something has failed: this process leaves without MPI_Finalize.
void never_finalize();

// A group that lives: while there is one, this process leaves without
// MPI_Finalize.
class LivingGroup {
 public:
  LivingGroup();
  LivingGroup(const LivingGroup&) = delete;
  LivingGroup& operator=(const LivingGroup&) = delete;
  ~LivingGroup();
};

// A communicator of our own, with errors as codes. Freed at the end of its life
// unless it was broken: requests may still use it then.
class Communicator {
 public:
  // Takes `handle` over.
  explicit Communicator(MPI_Comm handle);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  // All ranks of `parent` must call; blocks to the deadline at most.
  static std::shared_ptr<Communicator> duplicate(MPI_Comm parent,
                                                 const Deadline& deadline);
  // The ranks `members` of `parent`, in that order; they alone call. Blocks
  // until all have, without a deadline. `tag` tells it apart from another one
  // that is made at the same time by another thread.
  static std::shared_ptr<Communicator> of_members(
      const Communicator& parent, const std::vector<int>& members, int tag);

  MPI_Comm handle() const { return handle_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Waits in it end with an error; it is not freed.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

 private:
  MPI_Comm handle_;
  int rank_ = 0;
  int size_ = 0;
  std::atomic<bool> abandoned_{false};
};

}  // namespace lockstep::mpi
