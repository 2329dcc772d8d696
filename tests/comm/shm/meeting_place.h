#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/comm/shm/protocol/handshake.h"

// Where ranks of a handshake's tests meet, as threads or as processes.
namespace lockstep::shm::testing {

// A store of one file a key, in a folder of its own that goes with it. Threads
// and forked processes of any user may use it.
class MeetingPlace {
 public:
  MeetingPlace();
  MeetingPlace(const MeetingPlace&) = delete;
  MeetingPlace& operator=(const MeetingPlace&) = delete;
  ~MeetingPlace();

  Exchange exchange() const;
  // Blocks until the key is there, 20 s at most.
  std::string get(const std::string& key) const;
  // The abstract name of the socket that `rank` listens on.
  std::string socket_of(int rank) const;

 private:
  std::filesystem::path folder_;
  pid_t owner_;
};

// A rank's description with limits that no test comes near.
Meeting meeting_of(int rank, int size);

// "met", or the exception's type and words.
std::string outcome_of(const std::function<void()>& body);

// Ranks 0 to `size` - 1 as threads; throws what the lowest threw.
std::vector<Membership> meet_in_threads(const MeetingPlace& place, int size);

// A forked process that runs `body`; fork while there is one thread. Killed
// and reaped at the end of its life.
class Process {
 public:
  explicit Process(const std::function<std::string()>& body);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process() { kill(); }

  // SIGKILL; returns when the process is no more.
  void kill();
  // What `body` returned, or outcome_of() it; waits for the process's end.
  std::string result();

 private:
  pid_t pid_;
  FileDescriptor output_;
};

// Descriptors that this process has open.
size_t open_descriptors();

}  // namespace lockstep::shm::testing
