#include "lockstep/worker/own_address.h"

#include <gtest/gtest.h>
#include <stdlib.h>

namespace lockstep::internal {
namespace {

class OwnAddressOf : public ::testing::Test {
 protected:
  OwnAddressOf() { forget(); }
  ~OwnAddressOf() override { forget(); }
  static void forget() {
    unsetenv("GLOO_SOCKET_IFNAME");
    unsetenv("MASTER_ADDR");
  }
};

TEST_F(OwnAddressOf, OneHostMeetsAtLoopback) {
  EXPECT_EQ(own_address(true).address, "127.0.0.1");
  setenv("MASTER_ADDR", "192.0.2.1", 1);
  EXPECT_EQ(own_address(true).address, "127.0.0.1");
}

TEST_F(OwnAddressOf, TheInterfaceThatTheUserNamesCountsFirst) {
  setenv("GLOO_SOCKET_IFNAME", "eth7", 1);
  for (const bool one_host : {true, false}) {
    EXPECT_EQ(own_address(one_host).interface, "eth7");
    EXPECT_EQ(own_address(one_host).address, "");
  }
}

TEST_F(OwnAddressOf, BetweenHostsLoopbackIsNoAddress) {
  for (const char* master : {"", "127.0.0.1", "127.0.1.1", "localhost"}) {
    setenv("MASTER_ADDR", master, 1);
    const auto own = own_address(false);
    EXPECT_EQ(own.interface, "") << master;
    EXPECT_EQ(own.address, "") << master;
  }
  EXPECT_EQ(address_towards("127.0.0.1"), "127.0.0.1");
}

}  // namespace
}  // namespace lockstep::internal
