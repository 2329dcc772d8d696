#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/comm/shm/protocol/handshake.h"

// Where the ranks of handshake tests meet, as threads or as processes.
namespace lockstep::internal::shm::testing {

// A store with one file per key, in a folder of its own that is removed with
// it. Threads and forked processes of any user may use it.
class MeetingPlace {
 public:
  MeetingPlace();
  MeetingPlace(const MeetingPlace&) = delete;
  MeetingPlace& operator=(const MeetingPlace&) = delete;
  ~MeetingPlace();

  Exchange exchange() const;
  // Blocks until the key is set, at most 20 s.
  std::string get(const std::string& key) const;
  // Returns the abstract name of the socket that `rank` listens on.
  std::string socket_of(int rank) const;

 private:
  std::filesystem::path folder_;
  pid_t owner_;
};

// Returns a rank's description, with limits that no test reaches.
Meeting meeting_of(int rank, int size);

// Returns "met", or the exception's type and words.
std::string outcome_of(const std::function<void()>& body);

// Runs ranks 0 to `size` - 1 as threads; throws the exception of the lowest
// rank that threw.
std::vector<Membership> meet_in_threads(const MeetingPlace& place, int size);

// A forked process that runs `body`. Fork it while the test has only one
// thread. The destructor kills and reaps it.
class Process {
 public:
  explicit Process(const std::function<std::string()>& body);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process() { kill(); }

  // Sends SIGKILL; returns when the process has ended.
  void kill();
  // Returns the result of `body`, or its outcome_of(); waits for the process's
  // end.
  std::string result();

 private:
  pid_t pid_;
  FileDescriptor output_;
};

// Returns the number of descriptors that this process has open.
size_t open_descriptors();

}  // namespace lockstep::internal::shm::testing
