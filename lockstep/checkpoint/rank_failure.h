#pragma once

#include <exception>
#include <optional>
#include <string>
#include <utility>

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

}  // namespace lockstep::internal
