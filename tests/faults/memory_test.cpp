// Shared memory that is left behind, missing, or attacked by others: faults 8,
// 9 and 10 of docs/faults.md.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Returns the inodes of the shared memory that a process maps or has a
// descriptor of.
std::set<ino_t> memory_of(const fs::path& process) {
  constexpr const char* kName = "/memfd:lockstep";
  std::set<ino_t> inodes;
  for (const auto& line : lines(read_file(process / "maps"))) {
    if (line.find(kName) == line.npos) continue;
    std::istringstream words(line);
    std::string word;
    ino_t inode = 0;
    words >> word >> word >> word >> word >> inode;
    inodes.insert(inode);
  }
  std::error_code gone;
  for (const auto& file : fs::directory_iterator(process / "fd", gone)) {
    struct stat status {};
    if (fs::read_symlink(file.path(), gone).string().starts_with(kName) &&
        ::stat(file.path().c_str(), &status) == 0) {
      inodes.insert(status.st_ino);
    }
  }
  return inodes;
}

std::set<ino_t> memory_of(const RunningProgram& rank) {
  return memory_of("/proc/" + std::to_string(rank.pid()));
}

// Returns those of `wanted` that some process of this host still holds.
std::set<ino_t> still_held(const std::set<ino_t>& wanted) {
  std::set<ino_t> held;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    if (entry.path().filename().string().find_first_not_of("0123456789") !=
        std::string::npos) {
      continue;
    }
    for (const auto inode : memory_of(entry.path())) {
      if (wanted.contains(inode)) held.insert(inode);
    }
  }
  return held;
}

std::set<std::string> names_in_dev_shm() {
  std::set<std::string> names;
  for (const auto& file : fs::directory_iterator("/dev/shm")) {
    const auto name = file.path().filename().string();
    if (name.find("lockstep") != name.npos) names.insert(name);
  }
  return names;
}

class Leftovers : public WaysTest {};
using LeftoversOfOne = FaultsTest;

TEST_F(LeftoversOfOne, AreNoneOnceTheOthersHaveLeft) {
  const auto names = names_in_dev_shm();
  auto& job = make_job(kTwoHosts, 4);
  job.start("loop", {"leave=1"});
  job.await("ready");
  std::set<ino_t> used;
  for (int rank = 0; rank < job.size(); ++rank) {
    const auto own = memory_of(job.rank(rank));
    EXPECT_THAT(own, Not(IsEmpty())) << "rank " << rank << " shares nothing";
    used.insert(own.begin(), own.end());
  }
  EXPECT_EQ(used.size(), 2u);
  EXPECT_EQ(names_in_dev_shm(), names);
  job.rank(3).signal(SIGKILL);
  job.await("left", 3);
  EXPECT_THAT(still_held(used), IsEmpty());
}

TEST_P(Leftovers, OfAJobThatIsKilledAsAWholeAreNone) {
  const auto names = names_in_dev_shm();
  auto& job = make_job(GetParam(), 4);
  job.start("loop");
  job.await("ready");
  const auto used = memory_of(job.rank(0));
  ASSERT_THAT(used, Not(IsEmpty()));
  for (int rank = 0; rank < job.size(); ++rank) {
    job.rank(rank).signal(SIGKILL);
  }
  for (int rank = 0; rank < job.size(); ++rank) job.rank(rank).finish();
  EXPECT_THAT(still_held(used), IsEmpty());
  EXPECT_EQ(names_in_dev_shm(), names);
}

INSTANTIATE_TEST_SUITE_P(Ways, Leftovers,
                         ::testing::Values(kOneHost, kTwoHosts), way_name);

class NoMemory : public FaultsTest {
 protected:
  // Starts two ranks with a limit of `kib` on the size of files, which also
  // limits shared memory; on rank `only`, or on both.
  Job& start(Way way, int kib, int only, std::vector<std::string> arguments) {
    auto& job = make_job(way, 2);
    job.prefix = [kib, only](int rank) -> std::vector<std::string> {
      if (only >= 0 && rank != only) return {};
      return {"/bin/bash", "-c",
              "ulimit -f " + std::to_string(kib) + "; exec \"$0\" \"$@\""};
    };
    job.start("shared", arguments);
    return job;
  }
};

constexpr Way kShm{"Shm", "shm"};

TEST_F(NoMemory, OnAnyRankIsGlooWithOneWarning) {
  // The limit on rank 1 alone has no effect: it only maps rank 0's segment.
  for (const int only : {-1, 0, 1}) {
    SCOPED_TRACE(only);
    auto& job = start(kOneHost, 100, only, {"end=1", "leave=1"});
    std::string warnings;
    for (int rank = 0; rank < 2; ++rank) {
      const auto result = job.rank(rank).finish();
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
      EXPECT_EQ(count(result.out, "done "), 1);
      warnings += result.err;
    }
    EXPECT_EQ(count(warnings, "cannot share memory"), only == 1 ? 0 : 1)
        << warnings;
    if (only == 1) continue;
    EXPECT_THAT(warnings, AllOf(HasSubstr("ranks 0 1"), HasSubstr("Gloo"),
                                HasSubstr("ulimit -f")));
  }
}

TEST_F(NoMemory, IsAnErrorOnEveryRankWhereNothingElseWillDo) {
  for (const int only : {-1, 0}) {
    SCOPED_TRACE(only);
    auto& job = start(kShm, 100, only, {"timeout=10000"});
    job.await("refused");
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_THAT(job.said(rank, "refused"),
                  AllOf(HasSubstr("rank 0"), HasSubstr("shared memory"),
                        HasSubstr("ulimit -f")));
    }
  }
}

TEST_F(NoMemory, ForATensorMakesItAnOrdinaryOne) {
  auto& job = start(kOneHost, 48 << 10, 1, {"mebibytes=64"});
  job.await("done");
  EXPECT_EQ(job.said(0, "shared"), "1");
  EXPECT_EQ(job.said(1, "shared"), "0");
}

// Another user of this host, with an ordinary user's rights. Connects `NUMBER`
// times to each abstract socket, sends something, and waits to be dropped.
constexpr const char* kStranger =
    "import socket, sys\n"
    "held = []\n"
    "for name in sys.argv[2:]:\n"
    "    for i in range(int(sys.argv[1])):\n"
    "        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    "        one.settimeout(20)\n"
    "        one.connect('\\0' + name)\n"
    "        try:\n"
    "            one.send(b'x' * (1 << (i % 16)))\n"
    "        except OSError:\n"
    "            pass\n"
    "        held.append(one)\n"
    "for one in held:\n"
    "    try:\n"
    "        assert one.recv(65536) == b'', 'was answered'\n"
    "    except (ConnectionResetError, BrokenPipeError):\n"
    "        pass\n"
    "print('dropped', len(held))\n";

class Strangers : public FaultsTest {
 protected:
  // Returns the names of the abstract sockets that a process has.
  static std::vector<std::string> abstract_sockets(pid_t pid) {
    std::set<std::string> own;
    std::error_code gone;
    for (const auto& file :
         fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", gone)) {
      const auto target = fs::read_symlink(file.path(), gone).string();
      if (target.starts_with("socket:[")) {
        own.insert(target.substr(8, target.size() - 9));
      }
    }
    std::set<std::string> names;
    for (const auto& line : lines(read_file("/proc/net/unix"))) {
      std::istringstream words(line);
      std::string word;
      std::string type;
      std::string inode;
      std::string name;
      for (int i = 0; i < 4; ++i) words >> word;
      words >> type >> word >> inode >> name;
      // Skips its life sign, a datagram socket on which nobody listens.
      if (type != "0002" && own.contains(inode) && name.starts_with("@")) {
        names.insert(name.substr(1));
      }
    }
    return {names.begin(), names.end()};
  }

  void expect_dropped(const std::vector<std::string>& prefix) {
    const auto store = (scratch() / "store").string();
    auto& job = make_job(kOneHost, 2);
    job.environment = [&](int) {
      return std::vector<std::string>{"LOCKSTEP_TEST_STORE=" + store};
    };
    job.start("held", {"end=1"});
    job.rank(1).await_output("holding 1");
    const auto names = abstract_sockets(job.rank(0).pid());
    ASSERT_FALSE(names.empty());

    auto command = prefix;
    for (const char* word :
         {"/usr/bin/env", "python3", "-c", kStranger, "300"}) {
      command.push_back(word);
    }
    command.insert(command.end(), names.begin(), names.end());
    const auto stranger = run_program(command);
    EXPECT_EQ(stranger.exit_code, 0) << stranger.err;
    EXPECT_EQ(stranger.out,
              "dropped " + std::to_string(300 * names.size()) + "\n");

    std::ofstream(store + ".go") << "1";
    for (int rank = 0; rank < 2; ++rank) {
      const auto result = job.rank(rank).finish();
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
      EXPECT_THAT(result.out,
                  HasSubstr("shared " + std::to_string(rank) + " 1"));
    }
  }
};

TEST_F(Strangers, OfAnotherUserAreDropped) {
  if (::geteuid() != 0) GTEST_SKIP() << "no right to be another user";
  expect_dropped({"/bin/sh", "-c", "exec \"$0\" \"$@\"", "setpriv",
                  "--reuid=65534", "--regid=65534", "--clear-groups"});
}

TEST_F(Strangers, WithoutTheSecretAreDropped) { expect_dropped({}); }

}  // namespace
}  // namespace lockstep::internal::testing
