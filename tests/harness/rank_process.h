#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::testing {

// One rank of a world as its test program holds it: a child process and the
// socket over which it is told a case to run and answers with what failed.
// Killed and reaped at the end of its life.
class RankProcess {
 public:
  // Starts this program again as `rank` of `size`. `environment` is added to
  // this process's own.
  RankProcess(int rank, const std::vector<std::string>& environment);
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;
  ~RankProcess();

  int rank() const { return rank_; }
  int socket() const { return socket_.get(); }

  void send(const nlohmann::json& message);
  // The next message; nothing where the process has ended.
  std::optional<nlohmann::json> receive();
  // Waits for its end (it must be dead or dying): "was killed by signal 9
  // (Killed)", "exited with code 3".
  std::string describe_end();

 private:
  void kill_and_reap();

  int rank_;
  pid_t pid_ = -1;
  FileDescriptor socket_;
};

// The rank's side: the socket it was started with, if it was.
std::optional<int> inherited_control_socket();

// Over a SOCK_SEQPACKET socket, one message a packet.
void send_message(int socket, const nlohmann::json& message);
std::optional<nlohmann::json> receive_message(int socket);

}  // namespace lockstep::testing
