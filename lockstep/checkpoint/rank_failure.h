#pragma once

#include <exception>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/ranks.h"

namespace lockstep::internal {

// How a rank has failed, to be told to the others.
class RankFailure {
 public:
  explicit RankFailure(const std::exception_ptr& failure);
  // From and to one line; empty if there was no failure.
  static std::optional<RankFailure> from_text(const std::string& text);
  std::string text() const;

  // Throws the error of the other ranks: `path`, `problem` ("was not saved:
  // rank 1: ") and the rank's words.
  [[noreturn]] void throw_for(const std::string& path,
                              const std::string& problem) const;

 private:
  RankFailure(bool is_mistake, std::string words)
      : is_mistake_(is_mistake), words_(std::move(words)) {}

  bool is_mistake_;  // std::invalid_argument
  std::string words_;
};

// How the ranks of a save tell each other that one has failed. `path` is what
// was to be saved, `mine` how this rank has failed, if it has; it throws its
// own error, the others throw_for().

// The member of what a rank tells the others that says how it has failed: the
// text() of its RankFailure.
inline constexpr const char* kFailed = "failed";

// Throws on every rank if one of them has told that it has failed.
void throw_if_any_failed(const std::string& path,
                         const std::vector<nlohmann::json>& all,
                         const std::exception_ptr& mine);

// Returns rank 0's text on all ranks; throws on all if rank 0 has failed.
// Collective.
std::string share_outcome(const Ranks& ranks, const std::string& path,
                          const std::string& text,
                          const std::exception_ptr& mine);

}  // namespace lockstep::internal
