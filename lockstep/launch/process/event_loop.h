#pragma once

#include <poll.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {

class EventLoop;

// A part that an EventLoop serves: it owns descriptors and deadlines, and never
// blocks. Leaves its loop when it is destroyed. For one thread.
class Pollable {
 public:
  Pollable() = default;
  // The new object is in no loop.
  Pollable(Pollable&& /*other*/) noexcept {}
  virtual ~Pollable();

  // Appends what poll() must watch now.
  virtual void add_poll_entries(std::vector<pollfd>& entries) const = 0;
  // Returns when handle_poll_entries() must be called, though nothing is ready.
  virtual std::optional<Deadline> due() const { return std::nullopt; }
  // Serves what is ready or due. `entries` are those that this object has
  // added, and may hold others.
  virtual void handle_poll_entries(std::span<const pollfd> entries) = 0;

 private:
  friend class EventLoop;
  EventLoop* loop_ = nullptr;
};

// Waits for several Pollables at once. For one thread.
class EventLoop {
 public:
  EventLoop() = default;
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // `one` must be in no loop.
  void add(Pollable& one);
  // Blocks until a descriptor is ready, a deadline is over or a signal has
  // come. Then has each Pollable serve its own entries, in the order in which
  // they were added. None of them may leave the loop meanwhile.
  void wait();

 private:
  friend class Pollable;
  std::vector<Pollable*> members_{};
  std::vector<pollfd> entries_{};
};

// Returns whether poll() has reported something of `fd`.
bool has_come(std::span<const pollfd> entries, int fd);

// Returns the first of those deadlines that there are.
std::optional<Deadline> earliest(
    std::initializer_list<std::optional<Deadline>> deadlines);

}  // namespace lockstep::internal
