// The recipe for ssh in docs/clusters.md, with an sshd that runs as this user
// on a port of its own. A bug: the page said that jobs end with the connection,
// and they went on.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

constexpr const char* kServer = "/usr/sbin/sshd";

class Ssh : public NodesTest {
 protected:
  void SetUp() override {
    for (const char* program :
         {kServer, "/usr/bin/ssh", "/usr/bin/ssh-keygen"}) {
      if (!fs::exists(program)) {
        GTEST_SKIP() << program << " is missing; Debian: openssh-server";
      }
    }
    fs::create_directories(scratch());
    for (const char* key : {"host", "user"}) {
      ASSERT_EQ(run_program({"/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N",
                             "", "-f", scratch() / key})
                    .exit_code,
                0);
    }
    const std::string port = std::to_string(free_port());
    write("sshd_config",
          "Port " + port + "\nListenAddress 127.0.0.1\nHostKey " +
              (scratch() / "host").string() + "\nAuthorizedKeysFile " +
              (scratch() / "user.pub").string() +
              "\nStrictModes no\nUsePAM no\nPidFile none\n"
              "PermitRootLogin yes\n");
    write("ssh_config",
          "Host *\nHostName 127.0.0.1\nPort " + port + "\nIdentityFile " +
              (scratch() / "user").string() +
              "\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\n"
              "LogLevel ERROR\n");
    // A server that root starts wants this folder, which is made at boot.
    server_ = start_program(
        {"/bin/sh", "-c",
         std::string(::geteuid() == 0
                         ? "exec unshare --mount sh -c 'mount -t tmpfs tmpfs "
                           "/run && mkdir /run/sshd && exec $0 \"$@\"' "
                         : "exec ") +
             kServer + " -D -e -f " + (scratch() / "sshd_config").string()});
    await_store("127.0.0.1:" + port);
    write("bin/ssh", "#!/bin/sh\nexec /usr/bin/ssh -F " +
                         (scratch() / "ssh_config").string() + " \"$@\"\n");
    write("train",
          "#!/bin/sh\necho $$ > rank.$RANK\nmv rank.$RANK pid.$RANK\n"
          "exec sleep 300\n");
  }

  void write(const std::string& name, const std::string& text) {
    const fs::path path = scratch() / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
    fs::permissions(path, fs::perms::owner_all);
  }

  // Returns the recipe with what is of this machine.
  std::string recipe() const {
    std::string page = read_file(LOCKSTEP_CLUSTERS_PAGE);
    page.erase(0, page.find("```sh\n", page.find("## Shell")) + 6);
    page.resize(page.find("```"));
    const auto replace = [&](const std::string& what, const std::string& by) {
      const size_t at = page.find(what);
      ASSERT_NE(at, page.npos) << what << " is not in the recipe: " << page;
      page.replace(at, what.size(), by);
    };
    replace("lockstep run", LOCKSTEP_BIN_DIR "/lockstep run");
    replace("--nproc-per-node=8", "--nproc-per-node=1");
    replace("node0:29500", endpoint());
    return page;
  }

  // Waits until a rank runs, and returns its process.
  pid_t await_rank(int rank) const {
    const fs::path file = scratch() / ("pid." + std::to_string(rank));
    const Deadline deadline = Deadline::after(seconds(60));
    while (!fs::exists(file) && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    pid_t pid = 0;
    std::ifstream(file) >> pid;
    fs::remove(file);
    EXPECT_GT(pid, 1) << "rank " << rank << " did not start";
    return pid;
  }

  static bool await_end(pid_t pid) {
    const Deadline deadline = Deadline::after(seconds(60));
    while (::kill(pid, 0) == 0 && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return ::kill(pid, 0) != 0;
  }

  std::unique_ptr<RunningProgram> server_;
};

TEST_F(Ssh, JobsEndWithTheConnections) {
  for (const bool killed : {true, false}) {
    SCOPED_TRACE(killed ? "ssh is killed" : "the script is stopped");
    write("recipe", recipe());
    auto script = start_program({"/bin/sh", "-c",
                                 "cd " + scratch().string() +
                                     " && PATH=" + scratch().string() +
                                     "/bin:$PATH exec sh recipe"});
    const pid_t ranks[] = {await_rank(0), await_rank(1)};
    if (killed) {
      for (const pid_t pid : marked_processes()) {
        if (fs::path(read_file("/proc/" + std::to_string(pid) + "/cmdline")
                         .c_str()) == "/usr/bin/ssh") {
          ::kill(pid, SIGKILL);
        }
      }
    } else {
      script->signal(SIGTERM);
    }
    for (const pid_t pid : ranks) EXPECT_TRUE(await_end(pid)) << script->err();
    script->finish(seconds(60));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
