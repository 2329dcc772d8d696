#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

// Groups that outlive a member: the ranks that stay, and a new process in the
// place of each that is gone, make all groups again; or those that stay go on
// without it. Handles that the program holds stay valid. The names are those of
// c10d's ProcessGroup::reconfigure (pytorch pull requests 186298 and 187381).
// HealedTraining (parallel/healing/healed_training.h) calls this; programs do
// not need to.
namespace lockstep {

struct ReconfigureOptions {
  // Names the new generation of the groups: the same on all its ranks, and
  // different from all before in `store`.
  std::string uuid{};

  // The ranks that the default group goes on with, by the numbers that they had
  // when this process made it, in ascending order. They are numbered from 0 on.
  // Empty means all.
  std::vector<int> members{};

  // Where the ranks meet. Null means the store at which the default group was
  // made; for a process whose groups are apart it is the launcher's.
  c10::intrusive_ptr<c10d::Store> store{};

  // How long this waits for the other ranks. None means the timeout of the
  // default group.
  std::optional<std::chrono::milliseconds> timeout{};

  // Called some twenty times a second while this waits for other ranks: what
  // it throws ends the wait, and is thrown by reconfigure(). For a caller that
  // learns that this generation will never be complete.
  std::function<void()> look{};
};

// Thrown by the use of a group of which a rank is gone for good, because the
// default group goes on with fewer ranks.
class LostGroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns whether reconfigure() can make `group` again (none means the default
// group): not the backends "mpi" and "nccl", nor a group whose ranks may be
// Python's.
bool supports_reconfigure(const ProcessGroupPtr& group = nullptr);

// Makes the default group again, and then all others in the order in which they
// were made, each for the same ranks as before. If the default group goes on
// with fewer ranks, rank() and size() of the groups follow, and a group of some
// ranks that has lost one is of no use any more (LostGroupError). The handles
// that the program holds, and what it has made of them, refer to the new
// generation afterwards; calls are numbered from 1 again. Operations that are
// pending, in which peers may wait for this rank too, fail.
//
// Collective over the ranks of the new generation: those that were in the
// groups, and for each rank that is gone a process whose groups are apart. They
// must have made the same groups in the same order. No other thread may use a
// group meanwhile.
//
// Throws std::invalid_argument if a group cannot be made again, or this rank
// and another have made different groups; c10::DistError with the ranks that
// are absent at the timeout, or that are gone; and what `look` throws. Then the
// groups are of no use, except that reconfigure() may be called again with
// another uuid.
void reconfigure(const ReconfigureOptions& options);

namespace internal {

// Returns whether the groups of this process are *apart*: a process that takes
// the place of one that died (generation_joined() in worker/healing_place.h)
// makes its groups without the others. Until reconfigure(), their collectives
// return at once, as those of the backend "fake" do.
bool groups_are_apart();

// Called by run_reconfigured() as long as this object lives: for objects that
// hold what belongs to one generation of a group, such as memory that the ranks
// share.
class OnReconfigured {
 public:
  struct Object {
    std::function<void()> function{};
    // The parameters that the object trains, if it can be told.
    std::vector<at::Tensor> parameters{};
    // A flag that it keeps from one step to the next; null if it has none.
    bool* memory = nullptr;
  };

  explicit OnReconfigured(Object object);
  explicit OnReconfigured(std::function<void()> function)
      : OnReconfigured(Object{.function = std::move(function)}) {}
  OnReconfigured(const OnReconfigured&) = delete;
  OnReconfigured& operator=(const OnReconfigured&) = delete;
  ~OnReconfigured();

 private:
  std::shared_ptr<const Object> object_;
};

// Returns how many OnReconfigured live, and the parameters of all.
int objects_to_reconfigure();
std::vector<at::Tensor> parameters_to_reconfigure();

// Whether this thread may make no groups: a function that is called again would
// make them again.
bool& refuses_new_groups();

// Return the flags of all of them, a character for each, and set them.
std::string memory_to_reconfigure();
void set_memory_to_reconfigure(const std::string& memory);

// Calls the functions of all OnReconfigured that live, in the order in which
// they were made, which is the same on all ranks. After reconfigure(), once the
// ranks have the same state; the functions may make collectives.
void run_reconfigured();

}  // namespace internal
}  // namespace lockstep
