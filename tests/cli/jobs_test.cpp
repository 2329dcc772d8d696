// The commands that look at running jobs: `lockstep status`, `lockstep top`,
// `lockstep profile`.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/watch/agent_socket.h"
#include "lockstep/launch/watch/job_link.h"
#include "tests/harness/asleep.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kRanks = LOCKSTEP_BIN_DIR "/tests/inspect_ranks";

class Jobs : public LauncherTest {
 protected:
  // Other tests may run jobs at the same time, so each is named.
  std::unique_ptr<RunningProgram> start_job(
      const std::string& name, std::vector<std::string> arguments) {
    std::vector<std::string> all{"--rdzv-id=" + name};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return start(all);
  }
  std::unique_ptr<RunningProgram> start_training(const std::string& name) {
    auto job = start_job(name, {"--nproc-per-node=2", kRanks, "train"});
    job->await_output("ready", 2);
    return job;
  }
  // From now on programs find what stands for NVIDIA's management library.
  void install_nvml() {
    fs::create_directories(scratch() / "lib");
    fs::create_symlink(LOCKSTEP_FAKE_NVML, scratch() / "lib/libnvidia-ml.so.1");
    set_for_all("FAKE_NVML=2 busy");
    set_for_all("LD_LIBRARY_PATH=" + (scratch() / "lib").string());
  }
  json status_of(const std::string& job) {
    const auto result = run_command({"status", "--json", job});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json::parse(result.out, nullptr, false);
  }
  // Waits until both ranks of a training have recorded steps for its first
  // profile, and have said so on the board.
  void await_recording(const std::string& job) {
    const fs::path attempt = std::string(status_of(job)["attempt_directory"]);
    const Deadline deadline = Deadline::after(seconds(60));
    // A rank makes this folder when it begins to record.
    while (!fs::exists(attempt / "profile1") && !deadline.expired()) {
      ::usleep(1000);
    }
    const int64_t steps = status_of(job)["workers"][0]["steps"];
    while (status_of(job)["workers"][1]["steps"] < steps + 5 &&
           !deadline.expired()) {
    }
    EXPECT_FALSE(deadline.expired()) << "no rank records";
  }
  static void end(RunningProgram& job) {
    job.signal(SIGTERM);
    job.finish();
  }
};

TEST_F(Jobs, WorkersThatAreNoProgramsOfLockstepHaveAState) {
  auto job = start_job("states", {"--nproc-per-node=3", "sh", "-c",
                                  "[ $RANK = 2 ] && exit; echo ready; "
                                  "exec sleep 60"});
  job->await_output("ready", 2);
  const Deadline deadline = Deadline::after(seconds(20));
  json status;
  do {
    status = status_of("states");
  } while (status["workers"][2]["state"] != "done" && !deadline.expired());
  EXPECT_EQ(status["format"], 1);
  EXPECT_EQ(status["run_id"], "states");
  EXPECT_EQ(status["state"], "running");
  EXPECT_EQ(status["world_size"], 3);
  EXPECT_EQ(status["restart"], 0);
  EXPECT_GT(status["running_seconds"], 0);
  ASSERT_EQ(status["workers"].size(), 3u);
  for (int rank = 0; rank < 2; ++rank) {
    const json& worker = status["workers"][rank];
    EXPECT_EQ(worker["rank"], rank);
    EXPECT_EQ(worker["state"], "running");
    EXPECT_TRUE(worker["exit_code"].is_null());
    EXPECT_TRUE(worker["steps"].is_null());
    EXPECT_GT(worker["resident_bytes"], 0);
    EXPECT_EQ(read_file("/proc/" + worker["pid"].dump() + "/comm"), "sleep\n");
  }
  EXPECT_EQ(status["workers"][2]["state"], "done");
  EXPECT_EQ(status["workers"][2]["exit_code"], 0);

  const auto text = run_command({"status", std::to_string(job->pid())});
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_THAT(text.out,
              AllOf(StartsWith("job states: "), HasSubstr("exec sleep 60"),
                    HasSubstr("2 of 3 workers run"), HasSubstr("done")));
  end(*job);
}

TEST_F(Jobs, RestartsAreCounted) {
  auto job = start_job("restarted",
                       {"--nproc-per-node=1", "--max-restarts=2", "sh", "-c",
                        "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; "
                        "echo ready; exec sleep 60"});
  job->await_output("ready");
  const json status = status_of("restarted");
  EXPECT_EQ(status["restart"], 1);
  EXPECT_EQ(status["max_restarts"], 2);
  EXPECT_THAT(std::string(status["attempt_directory"]),
              HasSubstr("/attempt_1"));
  end(*job);
}

TEST_F(Jobs, ATrainingSaysHowFarItHasCome) {
  auto job = start_training("training");
  const json first = status_of("training");
  const json second = status_of("training");
  for (int rank = 0; rank < 2; ++rank) {
    const json& worker = first["workers"][rank];
    EXPECT_EQ(worker["state"], "running");
    EXPECT_GT(worker["steps"], 0);
    EXPECT_GT(worker["steps_per_second"], 0);
    const double samples = worker["samples_per_second"];
    const double steps = worker["steps_per_second"];
    EXPECT_NEAR(samples / steps, 4, 0.5);
    EXPECT_GE(worker["comm_share"], 0);
    EXPECT_LE(worker["comm_share"], 1);
    EXPECT_GT(worker["cpu_share"], 0);
    EXPECT_GT(second["workers"][rank]["steps"], worker["steps"]);
  }

  // A rank that is stopped, and one that waits for it.
  const pid_t stopped = first["workers"][1]["pid"];
  kill(stopped, SIGSTOP);
  const Deadline deadline = Deadline::after(seconds(20));
  json now;
  do {
    now = status_of("training");
  } while (!(now["workers"][1]["state"] == "stopped" &&
             now["workers"][0]["steps_per_second"] == 0 &&
             now["workers"][0]["seconds_since_activity"] > 0.2) &&
           !deadline.expired());
  EXPECT_EQ(now["workers"][1]["state"], "stopped");
  EXPECT_EQ(now["workers"][0]["state"], "running");
  EXPECT_EQ(now["workers"][0]["steps_per_second"], 0);
  EXPECT_GT(now["workers"][0]["seconds_since_activity"], 0.2);
  kill(stopped, SIGCONT);
  while (status_of("training")["workers"][0]["steps_per_second"] == 0 &&
         !deadline.expired()) {
  }
  EXPECT_FALSE(deadline.expired());
  end(*job);
}

// The ranks have loaded what stands for CUDA's driver; its management library
// says that each computes on one of two GPUs.
TEST_F(Jobs, FiguresOfGpusAreThoseOfEachRank) {
  install_nvml();
  {
    auto without = start_training("without_cuda");
    const json worker = status_of("without_cuda")["workers"][0];
    EXPECT_EQ(worker["gpus"], nullptr);
    EXPECT_EQ(worker["gpu_share"], nullptr);
    EXPECT_EQ(worker["gpu_memory_bytes"], nullptr);
    EXPECT_THAT(run_command({"status", "without_cuda"}).out,
                Not(HasSubstr("GPU")));
    end(*without);
  }
  auto job =
      start_job("gpus", {"--nproc-per-node=2", "env",
                         "LD_PRELOAD=" LOCKSTEP_FAKE_CUDA, kRanks, "train"});
  job->await_output("ready", 2);
  const json status = status_of("gpus");
  for (int rank = 0; rank < 2; ++rank) {
    const json& worker = status["workers"][rank];
    EXPECT_EQ(worker["gpus"], 1) << worker;
    EXPECT_EQ(worker["gpu_share"], rank == 0 ? 0.3 : 0.4);
    EXPECT_EQ(worker["gpu_memory_bytes"], (1 << 30) + rank);
    EXPECT_EQ(worker["gpu_watts"], rank == 0 ? 200.0 : 200.5);
    EXPECT_EQ(worker["gpu_celsius"], 61 - rank);
  }
  const auto text = run_command({"status", "gpus"}).out;
  EXPECT_THAT(text,
              AllOf(HasSubstr("GPU  GPU memory  power"), HasSubstr("30 %"),
                    HasSubstr("1024 MiB"), HasSubstr("200 W")));
  end(*job);
}

TEST_F(Jobs, TheRankForWhichTheOthersWaitIsNamed) {
  auto job = start_job("late", {"--nproc-per-node=3", kRanks, "late"});
  job->await_output("ready", 3);
  status_of("late");  // the first look may see how they began
  const json status = status_of("late");
  EXPECT_EQ(status["slowest_rank"], 1);
  EXPECT_LT(status["workers"][1]["comm_share"], 0.5);
  EXPECT_GT(status["workers"][0]["comm_share"], 0.5);
  const auto text = run_command({"status", "late"});
  EXPECT_THAT(text.out, HasSubstr("The other ranks wait for rank 1."));
  // Rank 0's progress bar says it, too, also when nobody else looks.
  job->await_error("it/s, waits for rank 1]");
  EXPECT_THAT(text.out, HasSubstr("it/s"));
  end(*job);
}

// `lockstep status` refused when several jobs ran, in one line of all of them.
TEST_F(Jobs, AllJobsAreListed) {
  auto one = start_job("listed_1", {"--nproc-per-node=2", "--max-restarts=3",
                                    "sh", "-c", "echo ready; exec sleep 60"});
  auto two = start_job("listed_2", {"sh", "-c", "echo ready; exec sleep 60"});
  one->await_output("ready", 2);
  two->await_output("ready");
  // Without JOB, status prints the list. Other tests' jobs may be in it, and
  // then a column of users.
  for (const char* command : {"jobs", "status"}) {
    const auto list = run_command({command});
    EXPECT_EQ(list.exit_code, 0) << list.err;
    EXPECT_THAT(
        list.out,
        ContainsRegex("^ *job +(user +)?run id +state +for +workers +restarts "
                      "+program\n"));
    EXPECT_THAT(list.out,
                ContainsRegex(" *" + std::to_string(one->pid()) +
                              " +(root +)?listed_1 +running +00:0.:.. +2 of 2 "
                              "+0 of 3 +sh -c echo ready"));
    EXPECT_THAT(list.out,
                ContainsRegex(std::to_string(two->pid()) +
                              " +(root +)?listed_2 +running .*1 of 1 +0 of 0"));
    EXPECT_THAT(list.out, Not(HasSubstr("\033")));
  }
  EXPECT_EQ(run_command({"status", "--json"}).exit_code, 2)
      << "programs expect one job";

  const json all = json::parse(run_command({"jobs", "--json"}).out);
  EXPECT_EQ(all["format"], 1);
  const auto found = std::ranges::find_if(
      all["jobs"], [](const json& job) { return job["run_id"] == "listed_1"; });
  ASSERT_NE(found, all["jobs"].end());
  EXPECT_EQ((*found)["name"], std::to_string(one->pid()));
  EXPECT_EQ((*found)["launcher_pid"], one->pid());
  EXPECT_EQ((*found)["workers"], 2);
  EXPECT_EQ((*found)["workers_running"], 2);
  EXPECT_EQ((*found)["max_restarts"], 3);
  EXPECT_EQ((*found)["program"][0], "sh");

  // A job whose agent is stopped is in the list.
  const pid_t agent = (*found)["agent_pid"];
  kill(agent, SIGSTOP);
  const auto list = run_command({"jobs"});
  kill(agent, SIGCONT);
  EXPECT_THAT(list.out, ContainsRegex("listed_1 +no answer +- .*lockstep run"));
  end(*one);
  end(*two);
  EXPECT_THAT(run_command({"jobs"}).out, Not(HasSubstr("listed_1")));
}

TEST_F(Jobs, AJobThatIsNotThereIsOneLine) {
  for (const std::string command : {"status", "profile"}) {
    const auto result = run_command({command, "no-such-job"});
    EXPECT_EQ(result.exit_code, 2) << command;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, StartsWith("lockstep " + command + ": no job"));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  }
  auto one = start_job("twice", {"sh", "-c", "echo ready; exec sleep 60"});
  auto two = start_job("twice", {"sh", "-c", "echo ready; exec sleep 60"});
  one->await_output("ready");
  two->await_output("ready");
  const auto several = run_command({"status", "twice"});
  EXPECT_EQ(several.exit_code, 2);
  EXPECT_THAT(several.err,
              AllOf(HasSubstr("several jobs are named \"twice\""),
                    HasSubstr(std::to_string(one->pid()) + " (run id twice: "
                                                           "lockstep run"),
                    HasSubstr(std::to_string(two->pid()))));
  EXPECT_EQ(run_command({"status", std::to_string(two->pid())}).exit_code, 0);
  const auto unknown = run_command({"status", "thrice"});
  EXPECT_THAT(unknown.err,
              HasSubstr("no job is named \"thrice\"; running are"));
  end(*one);
  end(*two);
}

// Fault 32: containers with one network and PID namespaces of their own, in
// which the agents have the same process ids. A bug: the names of their sockets
// collided, and the second job ended.
TEST_F(Jobs, ContainersThatShareANetworkDoNotCollide) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root makes PID namespaces";
  const std::vector<std::string> command{
      "/bin/sh",
      "-c",
      "exec unshare --pid --fork --kill-child --mount-proc -- \"$0\" \"$@\"",
      LOCKSTEP_BIN_DIR "/lockstep",
      "run",
      "--rdzv-id=contained",
      "sh",
      "-c",
      "echo agent $PPID; exec sleep 60"};
  auto one = start_program(command);
  auto two = start_program(command);
  one->await_output("agent ");
  two->await_output("agent ");
  EXPECT_EQ(one->out(), two->out()) << "they have one process id";
  const auto several = run_command({"status", "contained"});
  EXPECT_EQ(several.exit_code, 2);
  EXPECT_THAT(several.err, HasSubstr("several jobs are named"));
  std::vector<pid_t> launchers;
  for (const RunningJob& job : running_jobs()) {
    if (job.run_id != "contained") continue;
    launchers.push_back(job.launcher_pid);
    for (const std::string& name :
         {std::to_string(job.launcher_pid), job.mark}) {
      EXPECT_EQ(status_of(name)["run_id"], "contained") << name;
    }
  }
  ASSERT_EQ(launchers.size(), 2u);
  EXPECT_NE(launchers[0], launchers[1]) << "as they are numbered here";
  for (const pid_t launcher : launchers) kill(launcher, SIGTERM);
  one->finish();
  two->finish();
}

TEST_F(Jobs, AJobWithALongNameOfAnyCharactersIsFound) {
  const std::string name =
      "a name/with \"other\" characters, " + std::string(50, 'x');
  auto job = start_job(name, {"sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready");
  EXPECT_EQ(status_of(name)["state"], "running");
  end(*job);
}

// A bug: an answer had to fit into one packet.
TEST_F(Jobs, ALongCommandLineHasAStatus) {
  std::vector<std::string> command{"sh", "-c", "echo ready; exec sleep 60"};
  for (int i = 0; i < 4; ++i) command.push_back(std::string(100'000, 'x'));
  auto job = start_job("long", command);
  job->await_output("ready");
  const json status = status_of("long");
  ASSERT_EQ(status["program"].size(), command.size());
  EXPECT_EQ(status["program"].back(), command.back());
  end(*job);
}

TEST_F(Jobs, AnAgentThatIsStoppedIsOneLine) {
  auto job = start_job("asleep", {"sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready");
  const pid_t agent = status_of("asleep")["agent_pid"];
  kill(agent, SIGSTOP);
  const auto result = run_command({"status", "asleep"});
  kill(agent, SIGCONT);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              HasSubstr("its agent, process " + std::to_string(agent) +
                        ", may be stopped"));
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  end(*job);
}

TEST_F(Jobs, AnotherUserGetsNoAnswer) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  auto job = start_job("private", {"sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready");
  const RunningJob found = find_job("private");
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(9);
    const FileDescriptor socket = connect_to(found.socket);
    if (!socket) _exit(8);
    const std::string question = R"({"question": "watch", "milliseconds": 1})";
    send_packet(socket, std::as_bytes(std::span(question)));
    pollfd entry{socket.get(), POLLIN, 0};
    poll(&entry, 1, 20'000);
    std::array<std::byte, 100> bytes;
    const Packet answer = receive_packet(socket, bytes);
    _exit(answer.state == Packet::State::hung_up ? 0 : 7);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  // The agent goes on.
  EXPECT_EQ(status_of("private")["state"], "running");
  end(*job);
}

TEST_F(Jobs, TheAgentOutlivesEveryQuestion) {
  auto job = start_job("robust", {"sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready");
  const RunningJob found = find_job("robust");
  for (const std::string question :
       {"", "{", "[]", "null", "{}", "{\"question\": 3}",
        "{\"question\": \"attach\"}",
        "{\"question\": \"attach\", \"local_rank\": -1}",
        "{\"question\": \"attach\", \"local_rank\": 1}",
        "{\"question\": \"attach\", \"local_rank\": \"0\"}",
        "{\"question\": \"watch\"}", "{\"question\": \"stop_profile\"}",
        "{\"question\": \"watch\", \"milliseconds\": -5}",
        "{\"question\": \"watch\", \"milliseconds\": 1e300}",
        "{\"question\": \"profile\", \"milliseconds\": 0}"}) {
    const FileDescriptor socket = connect_to(found.socket);
    ASSERT_TRUE(socket);
    send_packet(socket, std::as_bytes(std::span(question)));
    pollfd entry{socket.get(), POLLIN, 0};
    poll(&entry, 1, 20'000);
    std::array<std::byte, 200> bytes;
    const Packet answer = receive_packet(socket, bytes);
    const std::string words(reinterpret_cast<const char*>(bytes.data()),
                            answer.bytes);
    EXPECT_FALSE(answer.descriptor) << question;
    if (!question.empty()) {
      EXPECT_THAT(words, HasSubstr("refused")) << question;
    }
  }
  const FileDescriptor long_question = connect_to(found.socket);
  const std::string many(20'000, 'x');
  send_packet(long_question, std::as_bytes(std::span(many)));
  // More connections that ask nothing than an agent keeps.
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 600; ++i) {
    if (auto socket = connect_to(found.socket)) {
      silent.push_back(std::move(socket));
    }
  }
  EXPECT_EQ(status_of("robust")["state"], "running");
  end(*job);
}

TEST_F(Jobs, AProcessThatAsksForThePlaceOfALivingOneIsRefused) {
  auto job = start_training("claimed");
  const RunningJob found = find_job("claimed");
  status_of("claimed");  // both publish
  const FileDescriptor socket = connect_to(found.socket);
  const std::string question = R"({"question": "attach", "local_rank": 0})";
  send_packet(socket, std::as_bytes(std::span(question)));
  pollfd entry{socket.get(), POLLIN, 0};
  poll(&entry, 1, 20'000);
  std::array<std::byte, 200> bytes;
  EXPECT_FALSE(receive_packet(socket, bytes).descriptor);
  end(*job);
}

TEST_F(Jobs, AProfileIsOneTraceOfEachRankAndAReport) {
  auto job = start_training("profiled");
  const auto result =
      run_command({"profile", "profiled", "--seconds=0.3", "--output",
                   (scratch() / "traces").string()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("goodput"), HasSubstr("exposed"),
                                HasSubstr((scratch() / "traces").string())));
  // Both recorded the same steps.
  EXPECT_THAT(result.err, Not(HasSubstr("warning")));
  int files = 0;
  for (const auto& file : fs::directory_iterator(scratch() / "traces")) {
    ++files;
    EXPECT_THAT(file.path().string(), EndsWith(".trace.json.gz"));
    const json trace = json::parse(
        run_program({"/bin/gzip", "-dc", file.path().string()}).out);
    int steps = 0;
    int products = 0;
    int spans = 0;
    for (const json& event : trace.at("traceEvents")) {
      const std::string name = event.value("name", "");
      if (name.starts_with("ProfilerStep#")) ++steps;
      if (name == "aten::addmm") ++products;
      if (name.starts_with("lockstep::")) ++spans;
    }
    EXPECT_GT(steps, 2);
    EXPECT_EQ(products, steps);
    EXPECT_GT(spans, steps);
  }
  EXPECT_EQ(files, 2);
  // The job goes on, and can be profiled again.
  const auto full = run_command({"profile", "profiled", "--seconds=0.1",
                                 "--output", (scratch() / "traces").string()});
  EXPECT_EQ(full.exit_code, 2);
  EXPECT_THAT(full.err, HasSubstr("is not an empty folder"));
  const auto again = run_command({"profile", "profiled", "--seconds=0.1",
                                  "--output", (scratch() / "more").string()});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  const fs::path attempt =
      std::string(status_of("profiled")["attempt_directory"]);
  for (const auto& file : fs::directory_iterator(attempt)) {
    EXPECT_THAT(file.path().filename().string(), Not(StartsWith("profile")));
  }
  end(*job);
}

TEST_F(Jobs, ARankThatCannotBeProfiledIsNamedAndSaysWhy) {
  auto job = start_job("unprofiled", {"--nproc-per-node=2", "sh", "-c",
                                      "echo ready; exec sleep 60"});
  job->await_output("ready", 2);
  const auto result =
      run_command({"profile", "unprofiled", "--seconds=0.1", "--wait=0.3"},
                  {.folder = scratch()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 0 wrote no trace: it says nothing"),
                    HasSubstr("rank 1 wrote no trace: it says nothing")));
  EXPECT_TRUE(fs::is_empty(scratch()));
  end(*job);
}

// Ctrl-C lost what the ranks had recorded.
TEST_F(Jobs, AProfileThatIsEndedEarlyKeepsWhatItHas) {
  auto job = start_training("interrupted");
  const fs::path attempt =
      std::string(status_of("interrupted")["attempt_directory"]);
  RunningProgram profile(
      {LOCKSTEP_BIN_DIR "/lockstep", "profile", "interrupted", "--seconds=3600",
       "--output", (scratch() / "traces").string()},
      {});
  await_recording("interrupted");
  profile.signal(SIGINT);
  const auto result = profile.finish(seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the ranks write what they have recorded"));
  EXPECT_THAT(result.out, HasSubstr("goodput"));
  int files = 0;
  for (const auto& file : fs::directory_iterator(scratch() / "traces")) {
    EXPECT_GT(fs::file_size(file), 0u);
    ++files;
  }
  EXPECT_EQ(files, 2);
  EXPECT_FALSE(fs::exists(attempt / "profile1"));
  end(*job);
}

TEST_F(Jobs, OneProfileIsRecordedAtATime) {
  auto job = start_training("wanted");
  const auto profile = [&](const char* time, const char* folder) {
    return std::vector<std::string>{
        LOCKSTEP_BIN_DIR "/lockstep", "profile", "wanted", time, "--output",
        (scratch() / folder).string()};
  };
  RunningProgram first(profile("--seconds=3600", "one"), {});
  await_recording("wanted");
  const auto second =
      RunningProgram(profile("--seconds=0.1", "two"), {}).finish();
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.err, HasSubstr("records a profile already"));
  EXPECT_FALSE(fs::exists(scratch() / "two"));
  first.signal(SIGINT);
  EXPECT_EQ(first.finish(seconds(60)).exit_code, 0);
  end(*job);
}

TEST_F(Jobs, AProfileThatAnotherReplacesSaysSo) {
  auto job = start_training("waiting");
  const pid_t stopped = status_of("waiting")["workers"][0]["pid"];
  kill(stopped, SIGSTOP);  // no rank makes a step
  const auto profile = [&](const char* wait, const char* folder) {
    return std::vector<std::string>{LOCKSTEP_BIN_DIR "/lockstep",
                                    "profile",
                                    "waiting",
                                    "--seconds=0.1",
                                    wait,
                                    "--output",
                                    (scratch() / folder).string()};
  };
  RunningProgram first(profile("--wait=3600", "one"), {});
  for (int i = 0; i < 1000 && !fs::exists(scratch() / "one"); ++i) {
    ::usleep(10'000);
  }
  // After making the folder it sleeps only when it has asked the ranks.
  EXPECT_TRUE(await_asleep(first.pid()));
  const auto second = RunningProgram(profile("--wait=0.5", "two"), {}).finish();
  EXPECT_THAT(second.err, HasSubstr("rank 1 wrote no trace: it made no step"));
  EXPECT_THAT(first.finish(seconds(20)).err,
              HasSubstr("rank 1 wrote no trace: another lockstep profile of "
                        "this job took its place"));
  kill(stopped, SIGCONT);
  end(*job);
}

TEST_F(Jobs, ATrainingThatStandsStillHasNoProfile) {
  auto job = start_training("standing");
  const json status = status_of("standing");
  const pid_t stopped = status["workers"][0]["pid"];
  kill(stopped, SIGSTOP);
  const auto result =
      run_command({"profile", "standing", "--seconds=0.1", "--wait=0.5",
                   "--output", (scratch() / "traces").string()});
  kill(stopped, SIGCONT);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 0 wrote no trace: it does not answer"),
                    HasSubstr("rank 1 wrote no trace: it made no step")));
  end(*job);
}

TEST_F(Jobs, StacksOfAllThreadsSayWhereARankIs) {
  auto job = start_job("stuck", {"--nproc-per-node=3", kRanks, "stuck"});
  job->await_output("ready", 1);
  // Until the others are in the operation.
  const Deadline deadline = Deadline::after(seconds(20));
  while (status_of("stuck")["workers"][2]["operation"].is_null() &&
         !deadline.expired()) {
  }
  const auto result = run_command({"stacks", "--json", "stuck"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json all = json::parse(result.out);
  EXPECT_EQ(all["format"], 1);
  ASSERT_EQ(all["ranks"].size(), 3u);
  for (const json& rank : all["ranks"]) {
    const bool waits = rank["rank"] != 1;
    EXPECT_EQ(rank["operation"].is_string(), waits);
    std::string main_thread;
    for (const json& thread : rank["threads"]) {
      EXPECT_EQ(thread["missing"], "");
      if (thread["thread"] == rank["pid"]) {
        main_thread = thread["frames"].dump();
      }
    }
    EXPECT_THAT(main_thread, HasSubstr("main +"));
    EXPECT_THAT(main_thread,
                HasSubstr(waits ? "lockstep::all_reduce(at::Tensor const&"
                                : "nanosleep"));
    EXPECT_GT(rank["threads"].size(), 2u);
  }
  for (const json& rank : all["ranks"]) {
    const json record = json::parse(
        read_file(std::string(rank["flight_record"])), nullptr, false);
    EXPECT_EQ(record["rank"], rank["rank"]);
  }
  const fs::path folder = std::string(status_of("stuck")["attempt_directory"]);
  for (const auto& file : fs::directory_iterator(folder)) {
    EXPECT_THAT(file.path().filename().string(), Not(StartsWith("stacks")));
  }
  const auto text = run_command({"stacks", "stuck"});
  EXPECT_THAT(text.out, AllOf(HasSubstr("rank 0, process "),
                              HasSubstr(", in all_reduce 2 (default_pg)\n")));
  end(*job);
}

TEST_F(Jobs, ARankThatIsBusyOrStoppedHasStacksOrSaysWhy) {
  auto job = start_training("busy");
  const pid_t stopped = status_of("busy")["workers"][1]["pid"];
  kill(stopped, SIGSTOP);
  const Deadline stopping = Deadline::after(seconds(20));
  while (status_of("busy")["workers"][1]["state"] != "stopped" &&
         !stopping.expired()) {
  }
  const auto result = run_command({"stacks", "busy"});
  kill(stopped, SIGCONT);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("it is stopped by a signal"));
  EXPECT_THAT(result.out, HasSubstr("    main +"));
  // Nobody is disturbed.
  const int64_t steps = status_of("busy")["workers"][0]["steps"];
  const Deadline deadline = Deadline::after(seconds(20));
  while (status_of("busy")["workers"][0]["steps"] <= steps &&
         !deadline.expired()) {
  }
  EXPECT_FALSE(deadline.expired());
  end(*job);
}

class Metrics : public Jobs {
 protected:
  void start_with_metrics(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "--metrics-port=0");
    job_ = start_job("metrics", std::move(arguments));
    job_->await_error("/metrics");
    const std::string err = job_->err();
    const std::string place = err.substr(0, err.find("/metrics"));
    port_ = std::stoi(place.substr(place.rfind(':') + 1));
  }
  FileDescriptor connect() const {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(
        ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                  sizeof address),
        0);
    return socket;
  }
  // Returns all that comes until the server closes the connection.
  static std::string response(const FileDescriptor& socket) {
    std::string all;
    char bytes[4096];
    pollfd entry{socket.get(), POLLIN, 0};
    while (poll(&entry, 1, 20'000) > 0) {
      const ssize_t count = read(socket.get(), bytes, sizeof bytes);
      if (count <= 0) break;
      all.append(bytes, static_cast<size_t>(count));
    }
    return all;
  }
  std::string ask(const std::string& request) const {
    const FileDescriptor socket = connect();
    EXPECT_EQ(send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    return response(socket);
  }
  std::string metrics(const std::string& headers = "") const {
    return ask("GET /metrics HTTP/1.1\r\n" + headers + "\r\n");
  }

  std::unique_ptr<RunningProgram> job_;
  int port_ = 0;
};

TEST_F(Metrics, AreServedWhileTheJobRunsAndItsWorkersEnd) {
  start_with_metrics({"--nproc-per-node=2", "--max-restarts=1", "sh", "-c",
                      "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; "
                      "echo again; exec sleep 60"});
  job_->await_output("again", 2);
  const Deadline deadline = Deadline::after(seconds(20));
  while (metrics().find("lockstep_restarts_total{run_id=\"metrics\","
                        "node_rank=\"0\"} 1\n") == std::string::npos) {
    ASSERT_FALSE(deadline.expired());
  }
  EXPECT_THAT(metrics(),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/plain; "
                               "version=0.0.4; charset=utf-8\r\n"),
                    HasSubstr("# TYPE lockstep_worker_up gauge\n"),
                    HasSubstr("lockstep_worker_up{run_id=\"metrics\",node_rank="
                              "\"0\",rank=\"1\"} 1\n"),
                    Not(HasSubstr("lockstep_steps_total"))));
  end(*job_);
}

TEST_F(Metrics, EveryRequestHasAnAnswerAndDelaysNobody) {
  start_with_metrics({"sh", "-c", "echo ready; exec sleep 60"});
  job_->await_output("ready");
  EXPECT_THAT(ask("GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(ask("GET /metrics?name=x HTTP/1.0\r\nA: b\r\n\r\n"),
              StartsWith("HTTP/1.1 200 "));
  const std::string head = ask("HEAD /metrics HTTP/1.1\r\n\r\n");
  EXPECT_THAT(head, AllOf(StartsWith("HTTP/1.1 200 "), EndsWith("\r\n\r\n")));
  EXPECT_THAT(ask("POST /metrics HTTP/1.1\r\n\r\n"),
              StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(ask("nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(ask("GET /" + std::string(9'000, 'x')),
              StartsWith("HTTP/1.1 431 "));
  // Clients that ask nothing, half a request, or do not read.
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(connect());
  const FileDescriptor half = connect();
  ASSERT_GT(send(half.get(), "GET /met", 8, 0), 0);
  { const FileDescriptor gone = connect(); }
  EXPECT_THAT(metrics(), HasSubstr("lockstep_world_size"));
  ASSERT_GT(send(half.get(), "rics HTTP/1.1\r\n\r\n", 17, 0), 0);
  EXPECT_THAT(response(half), StartsWith("HTTP/1.1 200 "));
  end(*job_);
}

TEST_F(Metrics, APortThatCannotBeHadIsOneLine) {
  start_with_metrics({"sh", "-c", "echo ready; exec sleep 60"});
  job_->await_output("ready");
  const auto taken =
      run({"--metrics-port=" + std::to_string(port_), "echo", "started"});
  EXPECT_EQ(taken.exit_code, 2);
  EXPECT_EQ(taken.out, "");
  EXPECT_EQ(taken.err, "lockstep run: --metrics-port " + std::to_string(port_) +
                           " is in use; give another, or 0 for a free one\n");
  const auto wrong = run({"--metrics-port=70000", "echo", "started"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--metrics-port"));
  end(*job_);
}

// Metrics were served on the loopback interface only, so a Prometheus on
// another host had none.
TEST_F(Metrics, OtherHostsReadThemWithATokenOfTheJobsSecret) {
  const std::string secret = "metrics-metrics-metrics-";
  set_for_all("LOCKSTEP_JOB_SECRET=" + secret);
  start_with_metrics(
      {"--metrics-address=0.0.0.0", "sh", "-c", "echo ready; exec sleep 60"});
  job_->await_output("ready");
  EXPECT_THAT(job_->err(), HasSubstr(" with the token of the job's secret\n"));
  // The command of docs/watching.md.
  const auto hash = start_program({"/bin/sh", "-c",
                                   "printf 'lockstep metrics %s' "
                                   "\"$LOCKSTEP_JOB_SECRET\" | sha256sum | "
                                   "cut -d' ' -f1"})
                        ->finish();
  const std::string token = hash.out.substr(0, hash.out.find('\n'));
  ASSERT_EQ(token.size(), 64u) << hash.err;
  for (const std::string& headers :
       {std::string(), std::string("Authorization: Bearer \r\n"),
        "Authorization: Bearer " + secret + "\r\n",
        "Authorization: Bearer " + token + "0\r\n",
        "Authorization: Basic " + token + "\r\n",
        "X-Authorization: Bearer " + token + "\r\n"}) {
    EXPECT_THAT(metrics(headers),
                AllOf(StartsWith("HTTP/1.1 401 "),
                      HasSubstr("\r\nWWW-Authenticate: Bearer\r\n"),
                      Not(HasSubstr("lockstep_world_size"))))
        << headers;
  }
  for (const std::string& headers :
       {"Host: a\r\nAuthorization: Bearer " + token + "\r\n",
        "authorization:  bearer " + token + " \r\nAccept: */*\r\n"}) {
    EXPECT_THAT(metrics(headers), AllOf(StartsWith("HTTP/1.1 200 "),
                                        HasSubstr("lockstep_world_size")));
  }
  end(*job_);
}

TEST_F(Metrics, OtherHostsReadThemWithoutATokenIfThatIsSaid) {
  start_with_metrics({"--metrics-address=0.0.0.0", "--metrics-insecure", "sh",
                      "-c", "echo ready; exec sleep 60"});
  job_->await_output("ready");
  EXPECT_THAT(job_->err(), Not(HasSubstr("token")));
  EXPECT_THAT(metrics(), StartsWith("HTTP/1.1 200 "));
  end(*job_);
}

TEST_F(Metrics, AnAddressThatCannotBeServedIsOneLine) {
  const auto error_of = [&](std::vector<std::string> options) {
    options.insert(options.end(), {"echo", "started"});
    const auto result = run(options);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    return result.err;
  };
  EXPECT_THAT(
      error_of({"--metrics-port=0", "--metrics-address=0.0.0.0"}),
      AllOf(HasSubstr("LOCKSTEP_JOB_SECRET"), HasSubstr("--metrics-insecure")));
  EXPECT_THAT(error_of({"--metrics-address=0.0.0.0"}),
              HasSubstr("are for --metrics-port"));
  EXPECT_THAT(error_of({"--metrics-insecure"}),
              HasSubstr("are for --metrics-port"));
  EXPECT_THAT(error_of({"--metrics-port=0", "--metrics-address=192.0.2.1",
                        "--metrics-insecure"}),
              HasSubstr("--metrics-address 192.0.2.1 is not an address of this "
                        "host"));
  EXPECT_THAT(error_of({"--metrics-port=0", "--metrics-address=no host"}),
              HasSubstr("no host"));
}

TEST_F(Metrics, FiguresOfGpusAreThereOnceARankHasThem) {
  install_nvml();
  start_with_metrics({"--nproc-per-node=2", "env",
                      "LD_PRELOAD=" LOCKSTEP_FAKE_CUDA, kRanks, "train"});
  job_->await_output("ready", 2);
  const std::string memory =
      "lockstep_gpu_memory_bytes{run_id=\"metrics\",node_rank=\"0\",rank=\"1\"}"
      " "
      "1073741825\n";
  const Deadline deadline = Deadline::after(seconds(20));
  std::string text;
  while (text.find(memory) == text.npos && !deadline.expired()) {
    text = metrics();
  }
  EXPECT_THAT(
      text,
      AllOf(HasSubstr(memory), HasSubstr("lockstep_gpu_utilization_ratio{"),
            HasSubstr("rank=\"1\"} 0.4\n"), HasSubstr("rank=\"1\"} 200.5\n"),
            HasSubstr("rank=\"1\"} 60\n")));
  end(*job_);
}

class Crashes : public Jobs {
 protected:
  // Returns what the launcher says after rank 1 has ended so, and the report.
  std::string said_after(const std::string& how, int exit_code) {
    const auto result = run({"--nproc-per-node=3", kRanks, "crash", how});
    EXPECT_EQ(result.exit_code, exit_code);
    for (const auto& line : lines(result.err)) {
      constexpr std::string_view kReport = "  report: ";
      if (!line.starts_with(kReport)) continue;
      const fs::path report = line.substr(kReport.size());
      report_ = read_file(report);
      // It is kept after the job.
      fs::remove_all(report.parent_path().parent_path());
    }
    return result.err;
  }
  std::string report_;
};

TEST_F(Crashes, AFatalSignalLeavesAStackAndAReport) {
  const std::string said = said_after("segv", 139);
  EXPECT_THAT(said, AllOf(HasSubstr("rank 1 failed: killed by SIGSEGV"),
                          HasSubstr("  SIGSEGV at address 0x0\n"
                                    "  in crash_here +0x"),
                          HasSubstr(" in inspect_ranks\n  in main +")));
  EXPECT_THAT(report_, AllOf(HasSubstr("first, rank 1 failed"),
                             HasSubstr("    crash_here +0x"),
                             HasSubstr("crash segv\n")));
}

TEST_F(Crashes, EveryKindOfEndHasItsWords) {
  EXPECT_THAT(said_after("abort", 134),
              AllOf(HasSubstr("  SIGABRT\n  in "), HasSubstr("\n  in main +0x"),
                    Not(HasSubstr("in abort"))));
  EXPECT_THAT(said_after("overflow", 139), HasSubstr("in overflow_here +0x"));
  EXPECT_THAT(said_after("thread", 139), HasSubstr("  in crash_here +0x"));
  EXPECT_THAT(said_after("throw", 134),
              AllOf(HasSubstr("rank 1 failed: std::runtime_error: thrown by "
                              "rank 1\n"),
                    HasSubstr("\n  killed by SIGABRT (exit code 134)\n  in "),
                    Not(HasSubstr("in abort"))));
  EXPECT_THAT(report_, HasSubstr("thrown by rank 1"));
}

TEST_F(Crashes, AReportHasTheLastLinesOfALog) {
  const auto result =
      run({"--log-dir=" + (scratch() / "logs").string(), "--redirects=3", "sh",
           "-c", "seq 100; echo last words >&2; exit 3"});
  EXPECT_EQ(result.exit_code, 3);
  ASSERT_THAT(result.err,
              AllOf(HasSubstr("  report: "), Not(HasSubstr("inspect flight"))));
  const std::string path =
      result.err.substr(result.err.find("  report: ") + 10,
                        result.err.find('\n', result.err.find("  report: ")) -
                            result.err.find("  report: ") - 10);
  const std::string report = read_file(path);
  EXPECT_THAT(report, AllOf(HasSubstr("stderr.log:\n    last words\n"),
                            HasSubstr("stdout.log:\n    71\n    72\n"),
                            HasSubstr("    100\n")));
}

TEST_F(Crashes, AProgramThatOnlyFailsHasNoReport) {
  const auto result = run({"sh", "-c", "exit 3"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, Not(HasSubstr("report")));
}

// The ranges of a training that Nsight Systems sees (nvtx_injection.cpp).
TEST_F(Jobs, SpansAreNvtxRangesIfAToolIsThere) {
#ifdef LOCKSTEP_NVTX_INJECTION
  const fs::path file = scratch() / "ranges";
  auto job =
      start({"--nproc-per-node=1", kRanks, "train"},
            {.environment = {"NVTX_INJECTION64_PATH=" LOCKSTEP_NVTX_INJECTION,
                             "NVTX_TEST_FILE=" + file.string()}});
  job->await_output("ready");
  end(*job);
  std::map<std::string, std::vector<std::string>> open;  // by thread
  std::map<std::string, int> seen;
  bool has_domain = false;
  for (const auto& line : lines(read_file(file))) {
    std::istringstream words(line);
    std::string kind;
    std::string thread;
    std::string name;
    words >> kind >> thread >> name;
    has_domain = has_domain || line == "domain lockstep";
    if (kind == "push") {
      open[thread].push_back(name);
      ++seen[name];
    } else if (kind == "pop") {
      ASSERT_FALSE(open[thread].empty()) << line;
      open[thread].pop_back();
    }
  }
  EXPECT_TRUE(has_domain);
  EXPECT_GT(seen["data::wait"], 10);
  EXPECT_GT(seen["ddp::wait"] + seen["ddp::publish_bucket"], 10);
#else
  GTEST_SKIP() << "NVTX's headers were missing when this was built";
#endif
}

// A program on a terminal of its own.
class OnTerminal {
 public:
  OnTerminal(const std::vector<std::string>& command, int rows, int columns) {
    winsize size{};
    size.ws_row = static_cast<unsigned short>(rows);
    size.ws_col = static_cast<unsigned short>(columns);
    int terminal = -1;
    pid_ = forkpty(&terminal, nullptr, nullptr, &size);
    if (pid_ == 0) {
      std::vector<char*> arguments;
      for (const auto& one : command) {
        arguments.push_back(const_cast<char*>(one.c_str()));
      }
      arguments.push_back(nullptr);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
    terminal_ = FileDescriptor(terminal);
  }
  ~OnTerminal() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  OnTerminal(const OnTerminal&) = delete;
  OnTerminal& operator=(const OnTerminal&) = delete;

  bool await_text(const std::string& text) {
    const Deadline deadline = Deadline::after(seconds(20));
    while (shown_.find(text) == std::string::npos && !deadline.expired()) {
      pollfd entry{terminal_.get(), POLLIN, 0};
      if (poll(&entry, 1, 100) <= 0) continue;
      char bytes[4096];
      const ssize_t count = read(terminal_.get(), bytes, sizeof bytes);
      if (count <= 0) return shown_.find(text) != std::string::npos;
      shown_.append(bytes, static_cast<size_t>(count));
    }
    return shown_.find(text) != std::string::npos;
  }
  void forget() { shown_.clear(); }
  void type(const std::string& keys) {
    EXPECT_EQ(write(terminal_.get(), keys.data(), keys.size()),
              static_cast<ssize_t>(keys.size()));
  }
  void resize(int rows, int columns) {
    winsize size{};
    size.ws_row = static_cast<unsigned short>(rows);
    size.ws_col = static_cast<unsigned short>(columns);
    ioctl(terminal_.get(), TIOCSWINSZ, &size);
  }
  bool echoes() const {
    termios settings{};
    tcgetattr(terminal_.get(), &settings);
    return (settings.c_lflag & ECHO) != 0;
  }
  int finish() {
    while (await_text("no such text")) {
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  const std::string& shown() const { return shown_; }

 private:
  pid_t pid_ = -1;
  FileDescriptor terminal_;
  std::string shown_;
};

TEST_F(Jobs, TopShowsPicturesUntilTheUserEndsIt) {
  auto job = start_training("shown");
  const std::vector<std::string> command{LOCKSTEP_BIN_DIR "/lockstep", "top",
                                         "--interval=100", "shown"};
  {
    OnTerminal top(command, 20, 100);
    ASSERT_TRUE(top.await_text("samples/s")) << top.shown();
    EXPECT_THAT(top.shown(), HasSubstr("\033[?1049h"));
    EXPECT_TRUE(top.await_text("q or Ctrl-C: end"));
    EXPECT_FALSE(top.echoes());
    top.forget();
    EXPECT_TRUE(top.await_text("steps/s"));  // the next picture
    // A terminal of three lines shows the first three, cut.
    top.resize(3, 20);
    top.forget();
    ASSERT_TRUE(top.await_text("\033[J"));
    top.forget();
    ASSERT_TRUE(top.await_text("\033[J"));
    EXPECT_THAT(top.shown(), Not(HasSubstr("samples/s")));
    top.type("q");
    EXPECT_EQ(top.finish(), 0);
    EXPECT_THAT(top.shown(), HasSubstr("\033[?1049l"));
    EXPECT_TRUE(top.echoes());
  }
  {
    OnTerminal top(command, 20, 100);
    ASSERT_TRUE(top.await_text("samples/s"));
    top.type("\003");  // Ctrl-C
    EXPECT_EQ(top.finish(), 0);
    EXPECT_THAT(top.shown(), HasSubstr("\033[?1049l"));
  }
  {
    OnTerminal top(command, 20, 100);
    ASSERT_TRUE(top.await_text("samples/s"));
    end(*job);
    EXPECT_EQ(top.finish(), 0);
    EXPECT_THAT(top.shown(), AllOf(HasSubstr("\033[?1049l"),
                                   HasSubstr("lockstep top: the job"),
                                   HasSubstr("SIGTERM ended the job")));
  }
}

TEST_F(Jobs, TopGivesTheTerminalBackWhileItIsStopped) {
  auto job = start_job("paused", {"sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready");
  OnTerminal shell(
      {"/bin/bash", "-mc",
       LOCKSTEP_BIN_DIR "/lockstep top --interval=100 paused; "
                        "echo stopped by $?; read line; fg; echo ended by $?"},
      20, 100);
  ASSERT_TRUE(shell.await_text("samples/s")) << shell.shown();
  EXPECT_FALSE(shell.echoes());
  shell.type("\032");  // Ctrl-Z
  ASSERT_TRUE(shell.await_text("stopped by 148")) << shell.shown();
  EXPECT_THAT(shell.shown(), HasSubstr("\033[?25h\033[?1049l"));
  EXPECT_TRUE(shell.echoes());
  shell.forget();
  shell.type("\n");
  ASSERT_TRUE(shell.await_text("samples/s")) << shell.shown();
  EXPECT_THAT(shell.shown(), HasSubstr("\033[?1049h"));
  EXPECT_FALSE(shell.echoes());
  shell.type("q");
  EXPECT_TRUE(shell.await_text("ended by 0")) << shell.shown();
  EXPECT_TRUE(shell.echoes());
  end(*job);
}

TEST_F(Jobs, TopScrollsAndSorts) {
  auto job = start_job(
      "many", {"--nproc-per-node=12", "sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready", 12);
  OnTerminal top({"/usr/bin/env", "TERM=xterm", LOCKSTEP_BIN_DIR "/lockstep",
                  "top", "--interval=100", "many"},
                 13, 80);
  ASSERT_TRUE(top.await_text("workers 1 to 5 of 12")) << top.shown();
  EXPECT_THAT(top.shown(), HasSubstr("\033[1mrank"))
      << "a terminal has colours";
  top.type("j");
  EXPECT_TRUE(top.await_text("workers 2 to 6 of 12"));
  top.type("\033[6~");  // page down
  EXPECT_TRUE(top.await_text("workers 7 to 11 of 12"));
  top.type("\033[B");
  EXPECT_TRUE(top.await_text("workers 8 to 12 of 12"));
  top.type("\033[B");  // the last one stays at the end
  top.forget();
  top.type("g");
  EXPECT_TRUE(top.await_text("workers 1 to 5 of 12"));
  top.type("jj");  // two keys at once
  EXPECT_TRUE(top.await_text("workers 3 to 7 of 12"));
  top.type("g");
  top.forget();
  top.type("r");
  EXPECT_TRUE(top.await_text("\r\n  11  ")) << top.shown();
  top.type("s");
  EXPECT_TRUE(top.await_text("s: sort (now by pid)"));
  top.type("q");
  EXPECT_EQ(top.finish(), 0);
  end(*job);
}

TEST_F(Jobs, TopSaysWhatHappensAndWhatEndedTheJob) {
  ASSERT_EQ(mkfifo((scratch() / "code").c_str(), 0600), 0);
  const FileDescriptor codes(open((scratch() / "code").c_str(), O_RDWR));
  const auto fail = [&](std::string_view code) {
    EXPECT_EQ(write(codes.get(), code.data(), code.size()),
              static_cast<ssize_t>(code.size()));
  };
  auto job = start_job(
      "eventful",
      {"--nproc-per-node=2", "--max-restarts=1", "sh", "-c",
       "echo ready; [ $RANK = 1 ] && read -r code < " +
           (scratch() / "code").string() + " && exit $code; exec sleep 60"});
  job->await_output("ready", 2);
  OnTerminal top(
      {"/usr/bin/env", "NO_COLOR=1", "TERM=xterm", LOCKSTEP_BIN_DIR "/lockstep",
       "top", "--interval=100", "eventful"},
      24, 100);
  ASSERT_TRUE(top.await_text("rank  ")) << top.shown();
  EXPECT_THAT(top.shown(), Not(HasSubstr("\033[1m")));
  const pid_t worker = status_of("eventful")["workers"][0]["pid"];
  kill(worker, SIGSTOP);
  EXPECT_TRUE(top.await_text("rank 0: stopped (was running)")) << top.shown();
  kill(worker, SIGCONT);
  EXPECT_TRUE(top.await_text("rank 0: running (was stopped)"));
  fail("3\n");
  EXPECT_TRUE(top.await_text("rank 1 failed")) << top.shown();
  EXPECT_TRUE(top.await_text("restart 1 of 1"));
  job->await_output("ready", 4);
  fail("4\n");
  EXPECT_EQ(top.finish(), 0);
  const std::string end = top.shown().substr(top.shown().rfind("lockstep top"));
  EXPECT_THAT(end, AllOf(HasSubstr("(run id eventful) has ended: "),
                         HasSubstr("rank 1 failed"), HasSubstr("4")));
  EXPECT_EQ(job->finish().exit_code, 4);
}

TEST_F(Jobs, TopNeedsATerminal) {
  auto job = start_job("piped", {"sh", "-c", "echo ready; exec sleep 60"});
  job->await_output("ready");
  const auto result = run_command({"top", "piped"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err,
            "lockstep top: stdout is not a terminal; lockstep status prints "
            "the same once\n");
  const auto often = run_command({"top", "--interval=5", "piped"});
  EXPECT_EQ(often.exit_code, 2);
  EXPECT_THAT(often.err, HasSubstr("--interval"));
  end(*job);
}

}  // namespace
}  // namespace lockstep::internal::testing
