#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "lockstep/comm/gather_texts.h"

namespace lockstep::internal {

// The text by which the first rank of a group that ends something tells the
// others why, in a store that may end with the rank that hosts it. Keys: `key`
// has the text, `key` + "/told" counts the ranks that know it.
//
// Refers to the store. Its errors pass through.
class LastWords {
 public:
  LastWords(c10d::Store& store, std::string key)
      : store_(store), key_(std::move(key)) {}

  // Says `text`, unless another rank was first, and returns the text of the
  // rank that was. Counts this rank among those that know it. Unlike set(),
  // this waits until the store has the text.
  std::string say(const std::string& text) const {
    auto first = store_.compareSet(key_, std::string(), text);
    store_.add(told(), 1);
    return first;
  }

  // Returns the text and counts this rank, or nothing if no rank has said it.
  std::optional<std::string> heard() const {
    if (!store_.check({key_})) return std::nullopt;
    auto text = store_.get_to_str(key_);
    store_.add(told(), 1);
    return text;
  }

  // Waits until `ranks` ranks know the text, this one included, for a second at
  // most: a rank that left before this could take the store with it.
  void await_heard(int64_t ranks) const {
    poll_store(Deadline::after(std::chrono::seconds(1)),
               [&] { return store_.add(told(), 0) >= ranks; });
  }

 private:
  std::string told() const { return key_ + "/told"; }

  c10d::Store& store_;
  const std::string key_;
};

}  // namespace lockstep::internal
