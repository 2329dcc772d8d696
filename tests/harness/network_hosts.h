#pragma once

#include <string>
#include <vector>

namespace lockstep::internal::testing {

// Hosts that are really separate: network namespaces, each two of them joined
// by a cable (veth), with the addresses 198.18.0.1, 198.18.0.2 and so on. They
// go with this object, once no process is left in them.
class NetworkHosts {
 public:
  // If there is no `ip`, or this process may make no namespace or no cable,
  // made() is false and obstacle() says why. Throws std::runtime_error if those
  // were made and something else fails.
  explicit NetworkHosts(int hosts = 2);
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;
  ~NetworkHosts();

  bool made() const { return obstacle_.empty(); }
  const std::string& obstacle() const { return obstacle_; }
  // `host` is from 0 to hosts - 1 in all of these.
  static std::string address(int host);
  // Returns the words with which a command on that host begins.
  std::vector<std::string> command_on(int host) const;
  // Pulls the cable between two hosts out, or lets no packet through that
  // leaves `one` for `other`, or only so many bits a second ("20mbit"), or sets
  // the largest packet. All return whether that worked.
  bool unplug(int one = 0, int other = 1) const;
  bool plug_in(int one, int other) const;  // after unplug()
  bool lose_packets(int one, int other) const;
  bool let_through(int one, int other) const;  // after lose_packets()
  bool slow_down(int one, int other, const std::string& rate) const;
  bool set_mtu(int one, int other, int bytes) const;

 private:
  void remove();
  // The end of a cable at `at`.
  std::string cable(int at, int towards) const;
  std::string host(int number) const;

  std::string id_;
  int hosts_;
  std::string obstacle_;
};

}  // namespace lockstep::internal::testing
