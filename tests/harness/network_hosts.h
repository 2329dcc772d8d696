#pragma once

#include <string>
#include <vector>

namespace lockstep::testing {

// Two hosts that are really apart: network namespaces joined by a cable (veth),
// with 198.18.0.1 and 198.18.0.2. Gone with this object, once no process is
// left in them.
class NetworkHosts {
 public:
  // made() is false, and obstacle() says why, where there is no `ip` or this
  // process may make no namespace or no cable. Throws std::runtime_error where
  // those were made and something else fails.
  NetworkHosts();
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;
  ~NetworkHosts();

  bool made() const { return obstacle_.empty(); }
  const std::string& obstacle() const { return obstacle_; }
  // `host` is 0 or 1 in all of these.
  static std::string address(int host);
  // What a command on that host begins with.
  std::vector<std::string> command_on(int host) const;
  bool unplug() const;

 private:
  void remove();

  std::string id_;
  std::string host_[2];
  std::string cable_[2];
  std::string obstacle_;
};

}  // namespace lockstep::testing
