#include "tests/harness/network_hosts.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace lockstep::internal::testing {
namespace {

constexpr int kCommandNotFound = 127;  // of a shell

// Runs `ip`. Returns an empty text if that went well, otherwise the command and
// why it failed.
std::string failure_of_ip(const std::string& arguments) {
  const std::string command = "ip " + arguments;
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return command + ": popen failed";
  std::string words;
  for (int c; (c = ::fgetc(pipe)) != EOF;) {
    words += c == '\n' ? ' ' : static_cast<char>(c);
  }
  const int status = ::pclose(pipe);
  if (status == 0) return {};
  if (WIFEXITED(status) && WEXITSTATUS(status) == kCommandNotFound) {
    return "there is no `ip` (Debian: iproute2)";
  }
  return "`" + command + "` failed: " + words;
}

}  // namespace

NetworkHosts::NetworkHosts()
    : id_(std::to_string(::getpid())),
      host_{"lockstep-a-" + id_, "lockstep-b-" + id_},
      cable_{"lsa" + id_, "lsb" + id_} {
  for (const auto& command :
       {"netns add " + host_[0], "netns add " + host_[1],
        "link add " + cable_[0] + " netns " + host_[0] +
            " type veth peer name " + cable_[1] + " netns " + host_[1]}) {
    obstacle_ = failure_of_ip(command);
    if (!obstacle_.empty()) return;
  }
  for (int one = 0; one < 2; ++one) {
    const std::string on = "-n " + host_[one];
    for (const auto& command :
         {on + " addr add " + address(one) + "/24 dev " + cable_[one],
          on + " link set " + cable_[one] + " up", on + " link set lo up"}) {
      const auto failure = failure_of_ip(command);
      if (failure.empty()) continue;
      remove();
      throw std::runtime_error(failure);
    }
  }
}

NetworkHosts::~NetworkHosts() { remove(); }

void NetworkHosts::remove() {
  for (const auto& host : host_) failure_of_ip("netns del " + host);
}

std::string NetworkHosts::address(int host) {
  return "198.18.0." + std::to_string(host + 1);
}

std::vector<std::string> NetworkHosts::command_on(int host) const {
  return {"/bin/sh", "-c",   "exec \"$0\" \"$@\"", "ip",
          "netns",   "exec", host_[host]};
}

bool NetworkHosts::unplug() const {
  return failure_of_ip("-n " + host_[0] + " link set " + cable_[0] + " down")
      .empty();
}

}  // namespace lockstep::internal::testing
