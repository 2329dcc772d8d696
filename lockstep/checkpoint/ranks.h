#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <exception>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// The ranks that save or load a snapshot together; this process alone if there
// is no group. All functions but rank() and size() are collective.
class Ranks {
 public:
  // Null: the default group, if there is one.
  explicit Ranks(ProcessGroupPtr group);

  size_t rank() const;
  size_t size() const;

  // Returns every rank's `mine`, by rank; shape and dtype must be equal on all
  // ranks.
  std::vector<at::Tensor> gather(const at::Tensor& mine) const;

  // The same for objects of any size.
  std::vector<nlohmann::json> gather_objects(const nlohmann::json& mine) const;

  // Returns the `text` of rank `from`, on all ranks.
  std::string share(const std::string& text, size_t from) const;

 private:
  ProcessGroupPtr group_;
};

// Returns the message of an exception, without a stack trace.
std::string words_of(const std::exception_ptr& failure);

// Returns "rank 1" or "ranks 0, 2".
std::string list_of_ranks(const std::vector<size_t>& ranks);

}  // namespace lockstep::internal
