#include "lockstep/launch/process/output_options.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/endpoint.h"
#include "lockstep/launch/process/process_count.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/store_port.h"
#include "lockstep/launch/process/usable_cores.h"
#include "lockstep/launch/process/visible_gpus.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

TEST(StreamSelection, OneNumberIsForEveryRankAMapForTheNamedOnes) {
  const auto all = StreamSelection::parse("--tee", "3");
  EXPECT_EQ(all.of(0), Streams::all);
  EXPECT_EQ(all.of(4000), Streams::all);
  const auto some = StreamSelection::parse("--tee", "0:1,12:2");
  EXPECT_EQ(some.of(0), Streams::out);
  EXPECT_EQ(some.of(1), Streams::none);
  EXPECT_EQ(some.of(12), Streams::err);
  EXPECT_TRUE(StreamSelection::parse("--tee", "0").empty());
  EXPECT_FALSE(some.empty());
}

TEST(StreamSelection, RefusesAnythingElse) {
  for (const char* text : {"", "4", "33", "0:", ":3", "0:3,", "a:1", "-1:3",
                           "0:3;1:3", "99999999999:1"}) {
    EXPECT_THROW(StreamSelection::parse("--tee", text), std::invalid_argument)
        << text;
  }
}

// A bug: values of templates, and lists with blanks, were refused.
TEST(StreamSelection, WhiteSpaceAroundItemsIsNothing) {
  EXPECT_EQ(StreamSelection::parse("--tee", "3\n").of(7), Streams::all);
  const auto some = StreamSelection::parse("--tee", " 0:3, 1 : 2\n");
  EXPECT_EQ(some.of(0), Streams::all);
  EXPECT_EQ(some.of(1), Streams::err);
  EXPECT_EQ(parse_local_ranks("--f", " 0, 2\n"), (std::set<int>{0, 2}));
  EXPECT_THROW(parse_local_ranks("--f", "0, "), std::invalid_argument);
}

TEST(LineFilters, CommasSeparateAndTwoAreOne) {
  using Filters = std::vector<std::string>;
  EXPECT_EQ(parse_line_filters("--f", ""), Filters());
  EXPECT_EQ(parse_line_filters("--f", "apple,or ange"),
            (Filters{"apple", "or ange"}));
  EXPECT_EQ(parse_line_filters("--f", "a,,b,c"), (Filters{"a,b", "c"}));
  EXPECT_EQ(parse_line_filters("--f", ",,"), Filters{","});
  for (const char* text : {",", "a,", ",a", "a,,,"}) {
    EXPECT_THROW(parse_line_filters("--f", text), std::invalid_argument)
        << text;
  }
}

TEST(ProcessCount, GpusAreDeviceFilesLimitedByCudaVisibleDevices) {
  std::string name = (fs::temp_directory_path() / "devices_XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  for (const char* file :
       {"nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"}) {
    std::ofstream(fs::path(name) / file);
  }
  const struct {
    const char* visible;
    int expected;
  } cases[] = {
      {"0,1,2", 3}, {"2", 1},    {"", 0},           {"-1", 0},
      {"0,7,1", 1}, {"1, 2", 2}, {"NoDevFiles", 0}, {"GPU-1f2e,GPU-3c4d", 2}};
  for (const auto& one : cases) {
    setenv("CUDA_VISIBLE_DEVICES", one.visible, 1);
    EXPECT_EQ(visible_gpus(name), one.expected) << one.visible;
  }
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(visible_gpus(name), 3);
  EXPECT_EQ(visible_gpus("/no/such/directory"), 0);
  fs::remove_all(name);
}

TEST(ProcessCount, CoresAreAtLeastOne) { EXPECT_GE(usable_cores(), 1); }

class ControlGroups : public ::testing::Test {
 protected:
  ControlGroups() {
    std::string name = (fs::temp_directory_path() / "groups_XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  ~ControlGroups() override { fs::remove_all(root_); }

  void write(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::optional<double> granted(const std::string& membership) {
    write("membership", membership);
    return granted_cores({root_, root_ / "membership"});
  }

  fs::path root_;
};

TEST_F(ControlGroups, StrictestQuotaOnTheWayToTheRootCounts) {
  write("pod/cpu.max", "250000 100000\n");
  write("pod/job/cpu.max", "max 100000\n");
  EXPECT_EQ(granted("0::/pod/job\n"), 2.5);
  write("pod/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(granted("0::/pod/job\n"), 0.5);
  EXPECT_EQ(granted("0::/elsewhere\n"), std::nullopt);
  // In a container the process's group is the root itself, but its path is the
  // host's.
  write("cpu.max", "300000 100000\n");
  EXPECT_EQ(granted("0::/../on/the/host\n"), 3);
  EXPECT_EQ(granted(""), std::nullopt);
}

TEST_F(ControlGroups, VersionOneIsReadToo) {
  write("cpu/job/cpu.cfs_quota_us", "400000\n");
  write("cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(granted("3:memory:/job\n2:cpu,cpuacct:/job\n"), 4);
  write("cpu/job/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(granted("2:cpu,cpuacct:/job\n"), std::nullopt);
}

// Does what c10d's TCPStore does: the wildcard address, SO_REUSEADDR, listen.
bool can_listen_on(int port, bool reuse_address) {
  FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = reuse_address ? 1 : 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  return ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address),
                sizeof(address)) == 0 &&
         ::listen(fd.get(), 1) == 0;
}

TEST(StorePort, IsHeldAgainstOthersAndOpenToAStore) {
  const StorePort port = StorePort::hold("127.0.0.1", 0);
  EXPECT_FALSE(can_listen_on(port.port(), false));
  EXPECT_TRUE(can_listen_on(port.port(), true));
  // The inherited descriptor itself can listen; then a store cannot bind the
  // port any more.
  ASSERT_EQ(::listen(port.fd(), 1), 0);
  EXPECT_FALSE(can_listen_on(port.port(), true));
  EXPECT_THROW(StorePort::hold("127.0.0.1", port.port()),
               std::invalid_argument);
}

TEST(StorePort, TakesNamesAndIpv6) {
  EXPECT_GT(StorePort::hold("localhost", 0).port(), 0);
  EXPECT_THROW(StorePort::hold("no-such-host.invalid", 0),
               std::invalid_argument);
  try {
    EXPECT_EQ(StorePort::hold("::1", 0).address(), "::1");
  } catch (const std::exception& error) {
    GTEST_SKIP() << "no IPv6 here: " << error.what();
  }
}

TEST(Program, NameWithoutSlashIsSearchedInPath) {
  const Program program =
      resolve_program({"sh", "-c", "true"}, ProgramKind::by_name);
  EXPECT_TRUE(program.path.ends_with("/sh"));
  EXPECT_EQ(program.arguments, (std::vector<std::string>{"sh", "-c", "true"}));
  EXPECT_THROW(resolve_program({""}, ProgramKind::by_name), ProgramError);
}

}  // namespace
}  // namespace lockstep::internal::testing
