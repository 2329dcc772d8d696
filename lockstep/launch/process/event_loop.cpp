#include "lockstep/launch/process/event_loop.h"

#include <algorithm>
#include <cstddef>

namespace lockstep::internal {

Pollable::~Pollable() {
  if (loop_ != nullptr) std::erase(loop_->members_, this);
}

EventLoop::~EventLoop() {
  for (Pollable* one : members_) one->loop_ = nullptr;
}

void EventLoop::add(Pollable& one) {
  members_.push_back(&one);
  one.loop_ = this;
}

void EventLoop::wait() {
  entries_.clear();
  std::vector<size_t> ends;
  std::optional<Deadline> first;
  for (const Pollable* one : members_) {
    one->add_poll_entries(entries_);
    ends.push_back(entries_.size());
    first = earliest({first, one->due()});
  }
  const int timeout =
      first ? static_cast<int>(bounded_timeout(first->remaining()).count())
            : -1;
  if (poll(entries_.data(), entries_.size(), timeout) < 0) return;
  size_t begin = 0;
  for (size_t at = 0; at < ends.size(); ++at) {
    members_[at]->handle_poll_entries(
        std::span(entries_).subspan(begin, ends[at] - begin));
    begin = ends[at];
  }
}

bool has_come(std::span<const pollfd> entries, int fd) {
  return std::ranges::any_of(entries, [&](const pollfd& entry) {
    return entry.fd == fd && entry.revents != 0;
  });
}

std::optional<Deadline> earliest(
    std::initializer_list<std::optional<Deadline>> deadlines) {
  std::optional<Deadline> first;
  for (const auto& one : deadlines) {
    if (one && (!first || one->remaining() < first->remaining())) first = one;
  }
  return first;
}

}  // namespace lockstep::internal
