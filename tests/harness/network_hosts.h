#pragma once

#include <string>
#include <vector>

namespace lockstep::internal::testing {

// Two hosts that are really separate: network namespaces joined by a cable
// (veth), with the addresses 198.18.0.1 and 198.18.0.2. They go with this
// object, once no process is left in them.
class NetworkHosts {
 public:
  // If there is no `ip`, or this process may make no namespace or no cable,
  // made() is false and obstacle() says why. Throws std::runtime_error if those
  // were made and something else fails.
  NetworkHosts();
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;
  ~NetworkHosts();

  bool made() const { return obstacle_.empty(); }
  const std::string& obstacle() const { return obstacle_; }
  // `host` is 0 or 1 in all of these.
  static std::string address(int host);
  // Returns the words with which a command on that host begins.
  std::vector<std::string> command_on(int host) const;
  bool unplug() const;

 private:
  void remove();

  std::string id_;
  std::string host_[2];
  std::string cable_[2];
  std::string obstacle_;
};

}  // namespace lockstep::internal::testing
