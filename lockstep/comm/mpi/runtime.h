#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/base/deadline.h"

// MPI in this process, and communicators. Internal to the module.
namespace lockstep::internal::mpi {

// Throws c10::DistBackendError with MPI's words for `code` unless it is
// MPI_SUCCESS.
void check(int code, const char* call);

// Returns the guard under which every call of MPI is made: a lock if MPI runs
// with MPI_THREAD_SERIALIZED, nothing with MPI_THREAD_MULTIPLE.
std::unique_lock<std::mutex> calls_guard();

// Starts MPI unless the program has. If it was started here it is finalised at
// exit, unless something has failed or a group still lives: MPI_Finalize waits
// for ranks that may never come, while mpirun ends the others if one leaves
// without it. Throws std::invalid_argument if MPI has ended, or was started
// with less than MPI_THREAD_SERIALIZED.
void start_mpi();

// Whether MPI was finalised: none of its functions may be called any more.
bool has_ended();

// Says that something has failed: this process then leaves without
// MPI_Finalize.
void never_finalize();

// Stands for a group that lives: while there is one, this process leaves
// without MPI_Finalize.
class LivingGroup {
 public:
  LivingGroup();
  LivingGroup(const LivingGroup&) = delete;
  LivingGroup& operator=(const LivingGroup&) = delete;
  ~LivingGroup();
};

// A communicator of our own, which returns errors as codes. Its end frees it
// unless it was abandoned: requests may still use it then.
class Communicator {
 public:
  // Takes over the ownership of `handle`.
  explicit Communicator(MPI_Comm handle);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  // All ranks of `parent` must call; blocks until the deadline at most.
  static std::shared_ptr<Communicator> duplicate(MPI_Comm parent,
                                                 const Deadline& deadline);
  // Makes a communicator of the ranks `members` of `parent`, in that order;
  // only they call. Blocks until all of them have called, without a deadline.
  // `tag` tells it apart from one that another thread makes at the same time.
  static std::shared_ptr<Communicator> of_members(
      const Communicator& parent, const std::vector<int>& members, int tag);

  MPI_Comm handle() const { return handle_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Ends all waits in it with an error; it is not freed then.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

 private:
  MPI_Comm handle_;
  int rank_ = 0;
  int size_ = 0;
  std::atomic<bool> abandoned_{false};
};

}  // namespace lockstep::internal::mpi
