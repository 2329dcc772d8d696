#include "lockstep/base/endpoint.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace lockstep::internal {
namespace {

TEST(Endpoint, HostAndPortInEverySpelling) {
  const struct {
    const char* text;
    const char* host;
    int port;
  } cases[] = {{"node0", "node0", 29400},       {"node0:123", "node0", 123},
               {"192.0.2.1:0", "192.0.2.1", 0}, {"[::1]:29603", "::1", 29603},
               {"[::1]", "::1", 29400},         {"fe80::1", "fe80::1", 29400}};
  for (const auto& one : cases) {
    const Endpoint endpoint = parse_endpoint("--option", one.text, 29400);
    EXPECT_EQ(endpoint.host, one.host) << one.text;
    EXPECT_EQ(endpoint.port, one.port) << one.text;
  }
  EXPECT_EQ((Endpoint{"::1", 5}).text(), "[::1]:5");
  EXPECT_EQ((Endpoint{"node0", 5}).text(), "node0:5");
  for (const char* text : {"", ":1", "node0:", "node0:x", "node0:70000", "[::1",
                           "[::1]1", "http://node0", "a b"}) {
    EXPECT_THROW(parse_endpoint("--option", text, 1), std::invalid_argument)
        << text;
  }
}

TEST(Endpoint, OnlyLoopbackItselfIsReachedByLoopback) {
  for (const char* host : {"localhost", "127.0.0.1", "127.3.2.1", "::1"}) {
    EXPECT_TRUE(names_loopback(host)) << host;
  }
  for (const char* host : {"0.0.0.0", "192.0.2.1", "node0", "::", "fe80::1"}) {
    EXPECT_FALSE(names_loopback(host)) << host;
  }
  const auto own = resolve({"127.0.0.1", 7}).front();
  const auto bound = [&](const std::string& host) {
    const auto fd =
        bind_for_nodes({host, 0}, resolve({"127.0.0.1", 0}).front());
    return bound_address(fd.get()).host();
  };
  EXPECT_EQ(bound("127.0.0.1"), "127.0.0.1");
  // Debian maps a host's own name like this; others reach the host at another
  // address.
  EXPECT_EQ(bound("node0"), "::");
  // The others may reach this host at any address of either family.
  EXPECT_EQ(bound("localhost"), "::");
  for (const char* host : {"127.0.0.1", "127.0.1.1", "::1"}) {
    EXPECT_TRUE(is_of_this_host(resolve({host, 7}).front())) << host;
  }
  for (const char* host : {"192.0.2.1", "2001:db8::1"}) {
    EXPECT_FALSE(is_of_this_host(resolve({host, 7}).front())) << host;
  }
  EXPECT_TRUE(names_every_interface("0.0.0.0"));
  EXPECT_TRUE(names_every_interface("::"));
  EXPECT_FALSE(names_every_interface("192.0.2.1"));
  EXPECT_FALSE(names_every_interface("node0"));
  EXPECT_EQ(local_address_towards(own), "127.0.0.1");
}

}  // namespace
}  // namespace lockstep::internal
