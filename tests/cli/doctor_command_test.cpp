// `lockstep doctor` as a whole, on this machine and in odd surroundings.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kCommand = LOCKSTEP_BIN_DIR "/lockstep";

class Doctor : public LauncherTest {
 protected:
  // Runs `lockstep doctor --json` by a script of the shell, where $0 is
  // lockstep, and returns its checks by name.
  std::map<std::string, json> examine(const std::string& script,
                                      const std::string& lockstep = kCommand,
                                      ProgramSetup setup = {}) {
    const auto result = run_program({"/bin/sh", "-c", script, lockstep},
                                    std::move(setup), std::chrono::seconds(90));
    EXPECT_EQ(result.err, "");
    document_ = json::parse(result.out, nullptr, false);
    if (!document_.is_object()) {
      ADD_FAILURE() << result.out;
      return {};
    }
    EXPECT_EQ(result.exit_code, document_["health"] == "fail" ? 1 : 0);
    std::map<std::string, json> checks;
    for (const auto& check : document_["checks"]) {
      checks[check["name"]] = check;
      if (check["health"] != "ok") {
        EXPECT_NE(check["advice"], "") << check;
      }
      EXPECT_NE(check["found"], "") << check;
    }
    return checks;
  }

  // Returns the path of a lockstep without the programs that link LibTorch.
  std::string lockstep_alone() {
    fs::create_directories(scratch() / "bin");
    const fs::path alone = scratch() / "bin/lockstep";
    fs::copy_file(kCommand, alone);
    return alone;
  }

  // Returns whether this process may make such namespaces.
  bool makes_namespaces(const std::string& options) {
    return run_program({"/bin/sh", "-c", "unshare " + options + " true"})
               .exit_code == 0;
  }

  // Waits until `doctor` has a child of this name and returns its number; 0 if
  // there is none in time.
  pid_t await_child(const RunningProgram& doctor, const std::string& name) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while (!deadline.expired()) {
      for (const pid_t pid : marked_processes()) {
        const fs::path comm = "/proc/" + std::to_string(pid) + "/comm";
        if (pid != doctor.pid() && read_file(comm) == name + "\n") return pid;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
  }

  const json& document() const { return document_; }

 private:
  json document_;
};

TEST_F(Doctor, EveryCheckIsInTheDocument) {
  const auto checks = examine("exec $0 doctor --json");
  EXPECT_EQ(document()["format"], 1);
  EXPECT_NE(document()["host"], "");
  for (const char* name :
       {"cores",         "memory",    "NUMA",          "huge pages",
        "shared memory", "/dev/shm",  "TMPDIR",        "open files",
        "processes",     "file size", "locked memory", "core files",
        "GPUs",          "LibTorch",  "backends",      "network",
        "nonlocal bind", "Gloo",      "NCCL",          "clock",
        "all_reduce"}) {
    EXPECT_EQ(checks.count(name), 1u) << name;
  }
  EXPECT_GT(checks.at("cores")["values"]["usable"], 0);
  EXPECT_GT(checks.at("memory")["values"]["total_bytes"], 1 << 20);
  EXPECT_EQ(checks.at("shared memory")["health"], "ok");
  EXPECT_NE(checks.at("LibTorch")["health"], "fail");
  EXPECT_EQ(checks.at("backends")["values"]["lockstep"], nullptr);
  EXPECT_EQ(checks.at("Gloo")["values"]["one_host"], "lo");
  EXPECT_NE(checks.at("all_reduce")["health"], "fail");
  EXPECT_GT(checks.at("all_reduce")["values"]["latency_us"], 0);
  EXPECT_GT(checks.at("all_reduce")["values"]["bus_bandwidth_gbps"], 0);
}

TEST_F(Doctor, EveryCheckIsALineForPeople) {
  const auto result =
      run_program({kCommand, "doctor"}, {}, std::chrono::seconds(90));
  const auto all = lines(result.out);
  ASSERT_GT(all.size(), 20u);
  EXPECT_THAT(all.front(), AllOf(HasSubstr("cores"), HasSubstr("may be used")));
  EXPECT_THAT(all.back(), HasSubstr(" warning"));
  int checks = 0;
  for (const auto& line : all) {
    checks += line.starts_with("ok ") || line.starts_with("warn ") ||
              line.starts_with("fail ");
  }
  EXPECT_GE(checks, 21);
  EXPECT_EQ(result.exit_code, count(result.out, "\nfail  ") > 0 ? 1 : 0);
}

TEST_F(Doctor, LimitsAreThoseThatAJobWouldInherit) {
  auto checks =
      examine("ulimit -n 200; exec $0 doctor --json", lockstep_alone());
  EXPECT_EQ(checks["open files"]["health"], "warn");
  EXPECT_EQ(checks["open files"]["values"]["hard_limit"], 200);
  EXPECT_THAT(std::string(checks["open files"]["advice"]),
              HasSubstr("only root raises that"));
}

TEST_F(Doctor, ASmallDevShmIsAWarning) {
  if (!makes_namespaces("--user --map-root-user --mount")) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  auto checks = examine(
      "exec unshare --user --map-root-user --mount sh -c 'mount -t tmpfs -o "
      "size=64m tmpfs /dev/shm && exec $0 doctor --json' $0");
  EXPECT_EQ(checks["/dev/shm"]["health"], "warn");
  EXPECT_EQ(checks["/dev/shm"]["values"]["size_bytes"], 64 << 20);
  EXPECT_THAT(std::string(checks["/dev/shm"]["advice"]),
              HasSubstr("--shm-size"));
  // Lockstep itself does not need it.
  EXPECT_NE(checks["all_reduce"]["health"], "fail");
}

// Fault 32: in each case lockstep run writes elsewhere.
TEST_F(Doctor, ATmpdirThatCannotBeWrittenIsAWarning) {
  const std::string in_namespace = "unshare --user --map-root-user --mount ";
  if (!makes_namespaces("--user --map-root-user --mount")) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  const std::string lockstep = lockstep_alone();
  const std::string folder = (scratch() / "files").string();
  fs::create_directories(folder);
  struct Case {
    std::string prepare;
    std::string tmpdir;
    std::string found;
  };
  const std::vector<Case> cases{
      {":", folder + "/missing", "No such file or directory"},
      {":", lockstep, "Not a directory"},
      {"mount -t tmpfs -o ro tmpfs " + folder, folder, "Read-only file system"},
      {"mount -t tmpfs -o size=4k tmpfs " + folder +
           "; head -c 8192 /dev/zero "
           "> " +
           folder + "/full 2> /dev/null",
       folder, "No space left on device"}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.found);
    auto checks = examine("exec " + in_namespace + "sh -c '" + one.prepare +
                              "; export "
                              "TMPDIR=" +
                              one.tmpdir + "; exec $0 doctor --json' $0",
                          lockstep);
    const json& check = checks["TMPDIR"];
    EXPECT_EQ(check["health"], "warn");
    EXPECT_THAT(std::string(check["found"]),
                AllOf(HasSubstr(one.found), HasSubstr(one.tmpdir),
                      HasSubstr("go to ")));
  }
  auto checks = examine(
      "cd " + scratch().string() + "; TMPDIR=files exec $0 doctor --json",
      lockstep);
  EXPECT_EQ(checks["TMPDIR"]["health"], "warn");
  EXPECT_EQ(checks["TMPDIR"]["values"]["folder"], folder);
  EXPECT_THAT(std::string(checks["TMPDIR"]["advice"]),
              HasSubstr("give an absolute path"));
}

TEST_F(Doctor, ADevShmThatCannotBeWrittenIsAWarning) {
  if (!makes_namespaces("--user --map-root-user --mount")) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  auto checks = examine(
      "exec unshare --user --map-root-user --mount sh -c 'mount -t tmpfs -o ro "
      "tmpfs /dev/shm && exec $0 doctor --json' $0",
      lockstep_alone());
  EXPECT_EQ(checks["/dev/shm"]["health"], "warn");
  EXPECT_THAT(std::string(checks["/dev/shm"]["found"]),
              HasSubstr("cannot be written: Read-only file system"));
}

TEST_F(Doctor, BindingOfOtherHostsAddressesIsTold) {
  if (!makes_namespaces("--user --map-root-user --net")) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  auto checks = examine(
      "exec unshare --user --map-root-user --net sh -c 'ip link set lo up; "
      "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind; exec $0 doctor --json' $0",
      lockstep_alone());
  EXPECT_EQ(checks["nonlocal bind"]["values"]["ipv4"], true);
  EXPECT_THAT(std::string(checks["nonlocal bind"]["advice"]),
              HasSubstr("sysctl net.ipv4.ip_nonlocal_bind=0"));
}

TEST_F(Doctor, AnEndpointWhosePortIsInUseIsNamed) {
  const std::string lockstep = lockstep_alone();
  const FileDescriptor other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress any = resolve({"127.0.0.1", 0}).front();
  ASSERT_EQ(::bind(other.get(), any.get(), any.length()), 0);
  const std::string port = std::to_string(bound_address(other.get()).port());
  const std::string at = " --rdzv-endpoint 127.0.0.1:" + port;
  auto checks = examine("exec $0 doctor --json" + at, lockstep);
  EXPECT_EQ(checks["endpoint"]["health"], "fail");
  EXPECT_THAT(std::string(checks["endpoint"]["found"]),
              HasSubstr("127.0.0.1:" + port + ": Address already in use"));
  EXPECT_THAT(std::string(checks["endpoint"]["advice"]),
              HasSubstr("sport = :" + port));
  ASSERT_EQ(::listen(other.get(), 1), 0);
  checks = examine("exec $0 doctor --json" + at, lockstep);
  EXPECT_EQ(checks["endpoint"]["health"], "warn");
  checks =
      examine("exec $0 doctor --json --rdzv-endpoint localhost:0", lockstep);
  EXPECT_EQ(checks["endpoint"]["health"], "ok");
  checks =
      examine("exec $0 doctor --json --rdzv-endpoint 203.0.113.1", lockstep);
  EXPECT_EQ(checks["endpoint"]["found"],
            "203.0.113.1:29500 is on another host");
}

TEST_F(Doctor, ANetworkWithoutLoopbackIsAFailure) {
  if (!makes_namespaces("--user --map-root-user --net")) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  auto checks =
      examine("exec unshare --user --map-root-user --net $0 doctor --json",
              lockstep_alone());
  EXPECT_EQ(checks["network"]["health"], "fail");
  EXPECT_THAT(std::string(checks["network"]["advice"]),
              HasSubstr("ip link set lo up"));
  EXPECT_EQ(document()["health"], "fail");
}

TEST_F(Doctor, TheVariablesOfTheJobCount) {
  auto checks = examine(
      "exec $0 doctor --json", lockstep_alone(),
      {.environment = {"GLOO_SOCKET_IFNAME=no_such0", "NCCL_SOCKET_IFNAME=lo",
                       "MASTER_ADDR=127.0.0.1"}});
  EXPECT_EQ(checks["Gloo"]["health"], "fail");
  EXPECT_THAT(std::string(checks["Gloo"]["advice"]),
              HasSubstr("no interface of that name"));
  EXPECT_EQ(checks["NCCL"]["values"]["interfaces"], json::array({"lo"}));
}

TEST_F(Doctor, WithoutTheProgramsOfLibexecTheRestIsExamined) {
  auto checks = examine("exec $0 doctor --json", lockstep_alone());
  EXPECT_EQ(checks["LibTorch"]["health"], "warn");
  EXPECT_EQ(checks["all_reduce"]["health"], "warn");
  EXPECT_EQ(checks.count("backends"), 0u);
  EXPECT_EQ(checks.count("cores"), 1u);
}

TEST_F(Doctor, AProgramOfLibexecThatCannotStartIsAFailure) {
  const std::string alone = lockstep_alone();
  fs::create_directories(scratch() / "libexec/lockstep");
  for (const char* program : {"lockstep-doctor-torch", "lockstep-bench"}) {
    const fs::path path = scratch() / "libexec/lockstep" / program;
    std::ofstream(path) << "#!/bin/sh\necho libtorch.so: not there >&2\n"
                           "exit 127\n";
    fs::permissions(path, fs::perms::owner_all);
  }
  auto checks = examine("exec $0 doctor --json", alone);
  EXPECT_EQ(checks["LibTorch"]["health"], "fail");
  EXPECT_THAT(std::string(checks["LibTorch"]["found"]),
              HasSubstr("127: libtorch.so: not there"));
  EXPECT_EQ(checks["all_reduce"]["health"], "fail");
  // Not a program at all.
  const fs::path empty = scratch() / "libexec/lockstep/lockstep-bench";
  fs::permissions(empty, fs::perms::owner_read);
  if (geteuid() != 0 || access(empty.c_str(), X_OK) != 0) {
    checks = examine("exec $0 doctor --json", alone);
    EXPECT_THAT(std::string(checks["all_reduce"]["found"]),
                HasSubstr("Permission denied"));
  }
}

TEST_F(Doctor, TheHelpHasExamplesAndMisuseIsOneLine) {
  const auto help = run_command({"doctor", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out,
              AllOf(HasSubstr("\nUsage: lockstep doctor [--json] [--nnodes "),
                    HasSubstr("Examples:\n  lockstep doctor\n"),
                    HasSubstr("Exit code 0")));
  EXPECT_EQ(run_command({"help", "doctor"}).out, help.out);
  EXPECT_EQ(run_command({"help", "bench"}).out,
            run_command({"bench", "--help"}).out);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"doctor", "--jsn"},
        std::vector<std::string>{"doctor", "please"}}) {
    const auto misuse = run_command(words);
    EXPECT_EQ(misuse.exit_code, 2);
    EXPECT_EQ(misuse.out, "");
    EXPECT_EQ(count(misuse.err, "\n"), 1) << misuse.err;
  }
}

// The ranks of the all-reduce are children of a child.
TEST_F(Doctor, NothingIsLeftIfItIsKilled) {
  auto doctor = start_program({kCommand, "doctor"});
  const pid_t bench = await_child(*doctor, "lockstep-bench");
  ASSERT_GT(bench, 0);
  kill(bench, SIGSTOP);  // it must be killed, not end by itself
  doctor->signal(SIGKILL);
  doctor->finish();
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

TEST_F(Doctor, AHangingDriverIsNotLeftIfItIsKilled) {
  fs::create_directories(scratch() / "lib");
  fs::create_symlink(LOCKSTEP_FAKE_NVML, scratch() / "lib/libnvidia-ml.so.1");
  auto doctor = start_program(
      {kCommand, "doctor"},
      {.environment = {"FAKE_NVML=silent",
                       "LD_LIBRARY_PATH=" + (scratch() / "lib").string()}});
  ASSERT_GT(await_child(*doctor, "lockstep"), 0);
  doctor->signal(SIGKILL);
  doctor->finish();
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

// One descriptor is free, whatever this process has inherited: nothing that
// needs two works.
TEST_F(Doctor, ACheckThatThrowsDoesNotDiscardTheOthers) {
  auto checks = examine("exec 3>&-; ulimit -n 4; exec $0 doctor --json",
                        lockstep_alone());
  EXPECT_EQ(checks["open files"]["health"], "fail");
  EXPECT_EQ(checks.count("cores"), 1u);
  EXPECT_EQ(checks.count("all_reduce"), 1u);
}

}  // namespace
}  // namespace lockstep::internal::testing
