#pragma once

#include <string>
#include <vector>

namespace lockstep::testing {

// Two hosts that are really apart: network namespaces joined by a cable (veth),
// with 198.18.0.1 and 198.18.0.2. Gone with this object, once no process is
// left in them.
class NetworkHosts {
 public:
  // made() is false where this process has no right to make them.
  NetworkHosts();
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;
  ~NetworkHosts();

  bool made() const { return made_; }
  // `host` is 0 or 1 in all of these.
  static std::string address(int host);
  // What a command on that host begins with.
  std::vector<std::string> command_on(int host) const;
  bool unplug() const;

 private:
  std::string id_;
  std::string host_[2];
  std::string cable_[2];
  bool made_ = false;
};

}  // namespace lockstep::testing
