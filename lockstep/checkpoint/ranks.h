#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// The ranks that save or load a snapshot together. Without a group that is this
// process alone. All functions but rank(), size(), are_imagined(), begin_save()
// and to_first() are collective.
class Ranks {
 public:
  // Null means the default group, if there is one.
  explicit Ranks(ProcessGroupPtr group);

  // Returns the same ranks, whose gather_objects() and share() go through the
  // group's store. So they do not count among the group's collectives, and
  // another thread may make them meanwhile; it waits in them as long as the
  // group's timeout, and learns within a second if a rank is gone. Collective.
  // gather(), any() and to_first() must not be called.
  Ranks through_store() const;

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

  // Returns, for each place, whether any rank's `mine` is 1 there and not 0.
  // Costs one all_reduce.
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

}  // namespace lockstep::internal
