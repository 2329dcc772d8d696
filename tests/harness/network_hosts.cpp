#include "tests/harness/network_hosts.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace lockstep::internal::testing {
namespace {

constexpr int kCommandNotFound = 127;  // of a shell

// Runs a command of iproute2. Returns an empty text if that went well,
// otherwise the command and why it failed.
std::string failure_of(const std::string& command) {
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

// Distinguishes the hosts of objects that exist at one time.
char next_letter() {
  static int made = 0;
  return static_cast<char>('a' + made++ % 26);
}

}  // namespace

NetworkHosts::NetworkHosts(int hosts)
    : id_(std::string(1, next_letter()) + std::to_string(::getpid())),
      hosts_(hosts) {
  std::vector<std::string> commands;
  for (int one = 0; one < hosts_; ++one) {
    commands.push_back("ip netns add " + host(one));
  }
  for (int one = 0; one < hosts_; ++one) {
    for (int other = one + 1; other < hosts_; ++other) {
      commands.push_back("ip link add " + cable(one, other) + " netns " +
                         host(one) + " type veth peer name " +
                         cable(other, one) + " netns " + host(other));
    }
  }
  for (const auto& command : commands) {
    obstacle_ = failure_of(command);
    if (!obstacle_.empty()) return;
  }
  commands.clear();
  for (int one = 0; one < hosts_; ++one) {
    const std::string on = "ip -n " + host(one);
    commands.push_back(on + " link set lo up");
    for (int other = 0; other < hosts_; ++other) {
      if (other == one) continue;
      commands.push_back(on + " addr add " + address(one) + " peer " +
                         address(other) + " dev " + cable(one, other));
      commands.push_back(on + " link set " + cable(one, other) + " up");
    }
  }
  for (const auto& command : commands) {
    const auto failure = failure_of(command);
    if (failure.empty()) continue;
    remove();
    throw std::runtime_error(failure);
  }
}

NetworkHosts::~NetworkHosts() { remove(); }

void NetworkHosts::remove() {
  for (int one = 0; one < hosts_; ++one)
    failure_of("ip netns del " + host(one));
}

std::string NetworkHosts::host(int number) const {
  return "lockstep-" + std::to_string(number) + "-" + id_;
}

// An interface's name has 15 characters at most.
std::string NetworkHosts::cable(int at, int towards) const {
  return "ls" + std::to_string(at) + std::to_string(towards) + "-" + id_;
}

std::string NetworkHosts::address(int host) {
  return "198.18.0." + std::to_string(host + 1);
}

std::vector<std::string> NetworkHosts::command_on(int host) const {
  return {"/bin/sh", "-c",   "exec \"$0\" \"$@\"", "ip",
          "netns",   "exec", this->host(host)};
}

bool NetworkHosts::unplug(int one, int other) const {
  return failure_of("ip -n " + host(one) + " link set " + cable(one, other) +
                    " down")
      .empty();
}

bool NetworkHosts::plug_in(int one, int other) const {
  return failure_of("ip -n " + host(one) + " link set " + cable(one, other) +
                    " up")
      .empty();
}

bool NetworkHosts::let_through(int one, int other) const {
  return failure_of("tc -n " + host(one) + " qdisc del dev " +
                    cable(one, other) + " root")
      .empty();
}

// A packet that is longer than the burst is dropped.
bool NetworkHosts::lose_packets(int one, int other) const {
  return failure_of("tc -n " + host(one) + " qdisc add dev " +
                    cable(one, other) +
                    " root tbf rate 8kbit burst 10 latency 1ms")
      .empty();
}

bool NetworkHosts::slow_down(int one, int other,
                             const std::string& rate) const {
  return failure_of("tc -n " + host(one) + " qdisc add dev " +
                    cable(one, other) + " root tbf rate " + rate +
                    " burst 32kb latency 50ms")
      .empty();
}

bool NetworkHosts::set_mtu(int one, int other, int bytes) const {
  return failure_of("ip -n " + host(one) + " link set " + cable(one, other) +
                    " mtu " + std::to_string(bytes))
      .empty();
}

}  // namespace lockstep::internal::testing
