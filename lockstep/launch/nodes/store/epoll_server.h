#pragma once

#include <cstdint>
#include <optional>
#include <thread>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// One thread that waits in epoll and serves descriptors: what the stores of the
// agents and of the workers have in common. What is served is known by a
// number, never by its descriptor, so that a late event of what was dropped
// finds nothing. All members but stop() are for that thread, once start() has
// been called.
class EpollServer {
 public:
  EpollServer(const EpollServer&) = delete;
  EpollServer& operator=(const EpollServer&) = delete;

 protected:
  using Id = uint64_t;  // not 0, and never used twice
  // How often what always has something to say is read at once: it must not
  // starve the others.
  static constexpr int kReadsAtOnce = 8;

  // `what` is named in errors: "the agents' store". Throws std::system_error.
  explicit EpollServer(const char* what);
  // Requires stop(), since a derived object is destroyed before this one.
  virtual ~EpollServer() = default;

  // Starts the thread, with all signals blocked. Throws std::system_error.
  void start();
  // Ends the thread.
  void stop();

  // Makes `events` of `fd` be served from now on; with 0, only its end.
  // `awaited` are the events so far, which this sets, or nothing if it is not
  // watched yet. Closing the descriptor ends the watch. Throws
  // std::system_error.
  void watch(int fd, Id id, std::optional<uint32_t>& awaited,
             uint32_t events) const;
  void ignore(int fd) const;

  // Serves what has come.
  virtual void serve_event(Id id, uint32_t events) = 0;
  // Returns for how long the thread may wait, in milliseconds; -1 means for
  // ever.
  virtual int longest_wait() const { return -1; }
  // Called after each wait, before and after its events are served.
  virtual void begin_events() {}
  virtual void end_events() {}
  // There is no memory, or the system refuses epoll: closes all connections, so
  // that the other sides see that the store is lost.
  virtual void give_up() noexcept = 0;

 private:
  void work() noexcept;

  const char* what_;
  FileDescriptor stop_;
  FileDescriptor epoll_;
  std::thread thread_;
};

// Returns an eventfd that does not block. Throws std::system_error.
FileDescriptor make_event_fd(const char* what);

}  // namespace lockstep::internal
