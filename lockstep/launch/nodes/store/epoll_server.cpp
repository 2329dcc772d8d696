#include "lockstep/launch/nodes/store/epoll_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <exception>

#include "lockstep/base/signals.h"

namespace lockstep::internal {
namespace {

constexpr uint64_t kStop = 0;

void control(int epoll, int operation, int fd, uint32_t events, uint64_t id,
             const char* what) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll, operation, fd, &event) != 0) throw_errno(what);
}

}  // namespace

FileDescriptor make_event_fd(const char* what) {
  FileDescriptor fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw_errno(what);
  return fd;
}

EpollServer::EpollServer(const char* what)
    : what_(what),
      stop_(make_event_fd(what)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw_errno(what);
  control(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), EPOLLIN, kStop, what_);
}

void EpollServer::start() {
  thread_ = quiet_thread([this] { work(); });
}

void EpollServer::stop() {
  const uint64_t one = 1;
  [[maybe_unused]] auto ignored = ::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void EpollServer::watch(int fd, Id id, std::optional<uint32_t>& awaited,
                        uint32_t events) const {
  if (awaited == events) return;
  control(epoll_.get(), awaited ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, events, id,
          what_);
  awaited = events;
}

void EpollServer::ignore(int fd) const {
  control(epoll_.get(), EPOLL_CTL_DEL, fd, 0, 0, what_);
}

void EpollServer::work() noexcept {
  try {
    std::array<epoll_event, 256> events;
    while (true) {
      const int count =
          epoll_wait(epoll_.get(), events.data(),
                     static_cast<int>(events.size()), longest_wait());
      begin_events();
      for (int at = 0; at < count; ++at) {
        const epoll_event& event = events[static_cast<size_t>(at)];
        if (event.data.u64 == kStop) return;
        serve_event(event.data.u64, event.events);
      }
      end_events();
    }
  } catch (const std::exception&) {
    give_up();
  }
}

}  // namespace lockstep::internal
