#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal::testing {

// One rank of a world, held by its test program: a child process, and the
// socket over which it is told which case to run and answers with what failed.
// The destructor kills and reaps the process.
class RankProcess {
 public:
  // Starts this program again as `rank`. `environment` is added to this
  // process's own.
  RankProcess(int rank, const std::vector<std::string>& environment);
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;
  ~RankProcess();

  int rank() const { return rank_; }
  int socket() const { return socket_.get(); }

  void send(const nlohmann::json& message);
  // Returns the next message, or nothing if the process has ended.
  std::optional<nlohmann::json> receive();
  // Waits for the end of the process, which must be dead or dying. Returns "was
  // killed by signal 9 (Killed)" or "exited with code 3".
  std::string describe_end();

 private:
  void kill_and_reap();

  int rank_;
  pid_t pid_ = -1;
  FileDescriptor socket_;
};

// In a rank: returns the socket that it was started with. Elsewhere: nothing.
std::optional<int> inherited_control_socket();

// Both use a SOCK_SEQPACKET socket, one message in each packet.
void send_message(int socket, const nlohmann::json& message);
std::optional<nlohmann::json> receive_message(int socket);

}  // namespace lockstep::internal::testing
