#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// The ranks that save or load a snapshot together. Without a group that is this
// process alone. All functions but rank(), size(), are_imagined(),
// begin_save(), give_up() and to_first() are collective.
class Ranks {
 public:
  // Null means the default group, if there is one.
  explicit Ranks(ProcessGroupPtr group);

  // Returns the same ranks, whose gather_objects() and share() go through the
  // group's store. So they do not count among the group's collectives, and
  // another thread may make them meanwhile; it waits in them as long as the
  // group's timeout, and learns within a second if a rank is gone. They stay as
  // they are if the group's ranks get other numbers. Collective. gather(),
  // any() and to_first() must not be called.
  Ranks through_store() const;
  // Ends what another thread waits for through the store, with an error, and
  // all that it would wait for.
  void give_up() const;

  // Begins the exchanges of a save, if they go through the store: from now on
  // they do not meet those of other saves, in which a rank may have made fewer
  // calls than the others because it gave up. `number` must be the same on all
  // ranks and in no other save, and all ranks must have ended the exchanges of
  // the save before. Not collective.
  void begin_save(uint64_t number) const;

  size_t rank() const;
  size_t size() const;
  // Whether the other ranks do not exist (a dry run). Each tells what this rank
  // tells.
  bool are_imagined() const;

  // Returns every rank's `mine`, by rank; shape and dtype must be equal on all
  // ranks.
  std::vector<at::Tensor> gather(const at::Tensor& mine) const;

  // The same for objects of any size.
  std::vector<nlohmann::json> gather_objects(const nlohmann::json& mine) const;

  // Returns, for each place, the largest number that a rank's `mine` has there;
  // so for 0 and 1 whether any rank has 1. Costs one all_reduce.
  std::vector<int64_t> any(const std::vector<int64_t>& mine) const;

  // Returns the `text` of rank `from`, on all ranks.
  std::string share(const std::string& text, size_t from) const;

  // Sends `tensor` of rank `from`, which must not be the first, to the first
  // rank, which gives a tensor of the same shape and dtype, and gets a tensor
  // on the CPU that has the values. Only these two ranks call.
  at::Tensor to_first(const at::Tensor& tensor, size_t from) const;

 private:
  class StoreTexts;

  ProcessGroupPtr group_;
  std::shared_ptr<StoreTexts> store_;  // null means the group's collectives
};

// Throws the error of a rank that has not failed itself. `words` are the ranks
// that have and the words of the first: "rank 1: ...". `is_mistake`: whether
// that rank has thrown std::invalid_argument.
using ThrowForOthers =
    std::function<void(const std::string& words, bool is_mistake)>;

// Throws that `path` "was not saved", or "cannot be saved":
// std::invalid_argument for a mistake, else SnapshotError.
ThrowForOthers failed_save(const std::string& path,
                           const std::string& outcome = "was not saved");

// Throws SnapshotError: `path` was loaded by no rank.
ThrowForOthers failed_load(const std::string& path);

// Collective. `collect` fills in the object that this rank tells the others.
// Returns what all have told, by rank. If `collect` has thrown on a rank, every
// rank throws: that rank its own exception, the others `throw_for_others`.
//
// Snapshots compare what this returns, and do not make an Agreement, because
// their ranks may be one process without a group, or exchange texts beside
// training (Ranks::through_store()), and because their errors name all ranks
// that differ.
std::vector<nlohmann::json> gather_or_fail(
    const Ranks& ranks, const std::function<void(nlohmann::json&)>& collect,
    const ThrowForOthers& throw_for_others);

// Collective. Returns on all ranks what `work` returns on rank 0, where alone
// it is called. If it throws, every rank throws, as with gather_or_fail().
std::string from_first_rank(const Ranks& ranks,
                            const std::function<std::string()>& work,
                            const ThrowForOthers& throw_for_others);

// The checksums of what this rank has and other ranks may have, too, which must
// then be equal: by set, then by the tensor's name. A rank has most sets as a
// whole or not at all, so one number stands for a set in the first comparison.
using ReplicaChecksums =
    std::map<std::string, std::map<std::string, std::string>>;

// Returns these numbers, for require_equal_replicas() on all ranks.
nlohmann::json digests_of(const ReplicaChecksums& checksums);

// Throws std::invalid_argument, on every rank, if ranks have different values
// of a tensor; it names the tensor and the ranks. `digests`: the digests_of()
// all ranks, in rank order; only if those of a set differ do the ranks tell
// each other its checksums. Collective.
void require_equal_replicas(const std::vector<nlohmann::json>& digests,
                            const ReplicaChecksums& mine, const Ranks& ranks);

}  // namespace lockstep::internal
