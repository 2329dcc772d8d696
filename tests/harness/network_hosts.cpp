#include "tests/harness/network_hosts.h"

#include <unistd.h>

#include <cstdlib>

namespace lockstep::testing {
namespace {

bool ip(const std::string& arguments) {
  return std::system(("ip " + arguments + " >/dev/null 2>&1").c_str()) == 0;
}

}  // namespace

NetworkHosts::NetworkHosts()
    : id_(std::to_string(::getpid())),
      host_{"lockstep-a-" + id_, "lockstep-b-" + id_},
      cable_{"lsa" + id_, "lsb" + id_} {
  made_ = ip("netns add " + host_[0]) && ip("netns add " + host_[1]) &&
          ip("link add " + cable_[0] + " netns " + host_[0] +
             " type veth peer name " + cable_[1] + " netns " + host_[1]);
  for (int one = 0; one < 2 && made_; ++one) {
    made_ = ip("-n " + host_[one] + " addr add " + address(one) + "/24 dev " +
               cable_[one]) &&
            ip("-n " + host_[one] + " link set " + cable_[one] + " up") &&
            ip("-n " + host_[one] + " link set lo up");
  }
}

NetworkHosts::~NetworkHosts() {
  for (const auto& host : host_) ip("netns del " + host);
}

std::string NetworkHosts::address(int host) {
  return "198.18.0." + std::to_string(host + 1);
}

std::vector<std::string> NetworkHosts::command_on(int host) const {
  return {"/bin/sh", "-c",   "exec \"$0\" \"$@\"", "ip",
          "netns",   "exec", host_[host]};
}

bool NetworkHosts::unplug() const {
  return ip("-n " + host_[0] + " link set " + cable_[0] + " down");
}

}  // namespace lockstep::testing
