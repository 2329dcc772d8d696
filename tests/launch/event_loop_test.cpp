#include "lockstep/launch/process/event_loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

// One pipe. Counts how often the loop serves it, and how often with something
// to read.
class Reader : public Pollable {
 public:
  Reader() {
    int ends[2];
    if (pipe(ends) != 0) throw_errno("pipe");
    reading_ = FileDescriptor(ends[0]);
    writing_ = FileDescriptor(ends[1]);
  }

  void say() const { ASSERT_EQ(write(writing_.get(), "x", 1), 1); }

  void add_poll_entries(std::vector<pollfd>& entries) const override {
    entries.push_back({reading_.get(), POLLIN, 0});
  }
  std::optional<Deadline> due() const override { return deadline; }
  void handle_poll_entries(std::span<const pollfd> entries) override {
    ++served;
    ASSERT_EQ(entries.size(), 1u);
    ASSERT_EQ(entries[0].fd, reading_.get());
    if (!has_come(entries, reading_.get())) return;
    ++heard;
    char byte;
    ASSERT_EQ(read(reading_.get(), &byte, 1), 1);
  }

  std::optional<Deadline> deadline{};
  int served = 0;
  int heard = 0;

 private:
  FileDescriptor reading_{};
  FileDescriptor writing_{};
};

TEST(EventLoop, EachMemberIsServedWithItsOwnEntries) {
  EventLoop loop;
  Reader first;
  Reader second;
  loop.add(first);
  loop.add(second);
  second.say();
  loop.wait();
  EXPECT_EQ(std::pair(first.served, first.heard), std::pair(1, 0));
  EXPECT_EQ(std::pair(second.served, second.heard), std::pair(1, 1));
}

TEST(EventLoop, WaitsUntilTheFirstDeadline) {
  EventLoop loop;
  Reader late;
  Reader early;
  late.deadline = Deadline::after(std::chrono::hours(1));
  early.deadline = Deadline::after(std::chrono::milliseconds(20));
  loop.add(late);
  loop.add(early);
  loop.wait();
  EXPECT_TRUE(early.deadline->expired());
  EXPECT_EQ(std::pair(late.served, early.served), std::pair(1, 1));
}

TEST(EventLoop, AMemberThatIsDestroyedHasLeft) {
  EventLoop loop;
  std::optional<Reader> gone(std::in_place);
  Reader stays;
  loop.add(*gone);
  loop.add(stays);
  gone.reset();
  stays.say();
  loop.wait();
  EXPECT_EQ(stays.heard, 1);
}

TEST(EventLoop, AMemberMayOutliveItsLoop) {
  Reader member;
  {
    EventLoop loop;
    loop.add(member);
  }
  EventLoop another;
  another.add(member);
  member.say();
  another.wait();
  EXPECT_EQ(member.heard, 1);
}

}  // namespace
}  // namespace lockstep::internal
