// A worker for tests/cli/hostile_jobs_test.cpp that lies to those who look at
// its job: hostile_worker SECRET KIND. Asked for a profile, it says that its
// trace is SECRET; with KIND "link", it makes a link to it where its trace
// should be, with "huge", an empty file of 5 GiB, and with "trace", a trace.
// Asked for stacks, it leaves a pipe (KIND "pipe"), or frames in the module
// SECRET and escape sequences; with KIND "newer" it says that it has answered a
// later request, too. Prints "ready" once it publishes, and ends with
// its launcher.
//
// hostile_worker USER agent: an agent that says by its socket's name that it is
// USER's, and answers with a worker that has no place on its board.
//
// hostile_worker USER silent: twelve agents of USER that never answer.
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/watch/agent_socket.h"
#include "lockstep/launch/watch/job_status.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {
namespace {

constexpr std::string_view kEscapes = "\033]0;owned\007\033[2Jhidden";

constexpr const char* kTrace =
    R"({"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [)"
    R"({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1,)"
    R"("ts": 10, "dur": 80}]})";

struct Agent {
  std::string folder;  // of the attempt
  StatusBoard board;
};

Agent attach() {
  const FileDescriptor socket = connect_to(std::getenv("LOCKSTEP_AGENT"));
  const std::string question = R"({"question": "attach", "local_rank": 0})";
  send_packet(socket, std::as_bytes(std::span(question)));
  std::array<std::byte, 1024> bytes;
  Packet answer;
  while ((answer = receive_packet(socket, bytes)).state ==
         Packet::State::none) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return {{reinterpret_cast<const char*>(bytes.data()), answer.bytes},
          StatusBoard::map(std::move(answer.descriptor))};
}

void leave_stacks(const std::string& file, const std::string& module) {
  std::string frames;
  for (int place = 0x1000; place < 0x3000; place += 16) {
    char frame[32];
    std::snprintf(frame, sizeof frame, "(+0x%x) [0x%x]", place, place);
    frames += (frames.empty() ? "\"" : ", \"") + module + frame + "\"";
  }
  std::ofstream(file) << R"({"flight_record": "/tmp/a b\u001b[2J;touch x",)"
                      << R"("threads": [{"thread": 1, "missing": "",)"
                      << R"("name": "\u001b[2J\u009b31m", "frames": [)"
                      << frames << "]}]}";
}

void lie(const std::string& secret, const std::string& kind) {
  Agent agent = attach();
  RankStatus status;
  status.pid = ::getpid();
  status.steps = 1;
  status.progress.set(kEscapes);
  status.current_operation.set(kEscapes);
  status.current_since_ns = 1;
  int32_t answered = 0;  // the last request of stacks
  std::puts("ready");
  std::fflush(stdout);
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
    const int64_t profile = agent.board.last_profile().number;
    if (profile != status.profile) {
      status.profile = profile;
      status.profile_state = ProfileState::written;
      std::string name = secret;
      if (kind != "path") {
        name = "rank0.json";
        const auto folder = agent.folder + "/profile" + std::to_string(profile);
        const std::string trace = folder + "/" + name;
        std::filesystem::create_directory(folder);
        if (kind == "link") {
          std::filesystem::create_symlink(secret, trace);
        } else {
          std::ofstream(trace) << kTrace;
        }
        if (kind == "huge") {
          std::filesystem::resize_file(trace, std::uintmax_t{5} << 30);
        }
      }
      status.profile_words.set(name);
    }
    const int32_t stacks = agent.board.last_stacks();
    if (stacks != answered) {
      answered = stacks;
      status.stacks = kind == "newer" ? stacks + 1 : stacks;
      const std::string file =
          agent.folder + "/" + StatusBoard::stacks_file(stacks, 0);
      if (kind == "pipe") {
        ::mkfifo(file.c_str(), 0600);
      } else {
        leave_stacks(file, secret);
      }
    }
    status.published_ns = steady_ns();
    agent.board.publish(0, status);
  }
}

// Returns the first packet that comes.
std::string question_of(const FileDescriptor& asker) {
  std::array<std::byte, AgentSocket::kQuestionBytes> bytes;
  Packet packet;
  while ((packet = receive_packet(asker, bytes)).state == Packet::State::none) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return {reinterpret_cast<const char*>(bytes.data()), packet.bytes};
}

void be_agent(const std::string& user) {
  const StatusBoard board = StatusBoard::create(1);
  const std::string status =
      to_json({.run_id = "hostile",
               .state = JobStatus::State::running,
               .workers = {{.local_rank = 1'000'000, .pid = ::getpid()}}});
  const FileDescriptor listener =
      listen_at(std::string(AgentSocket::kPrefix) + user + "/1/mark/hostile");
  std::puts("ready");
  std::fflush(stdout);
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    const FileDescriptor asker = accept_from(listener);
    if (!asker) continue;
    const std::string question = question_of(asker);
    const bool watches = question.find("watch") != question.npos;
    const std::string answer = watches ? status : "1";
    send_packet(asker, std::as_bytes(std::span(answer)),
                watches ? board.descriptor() : -1);
  }
}

void be_silent(const std::string& user) {
  std::vector<FileDescriptor> listeners;
  for (int number = 0; number < 12; ++number) {
    listeners.push_back(listen_at(std::string(AgentSocket::kPrefix) + user +
                                  "/1/" + std::to_string(number) + "/silent"));
  }
  std::puts("ready");
  std::fflush(stdout);
  ::pause();
}

}  // namespace
}  // namespace lockstep::internal

int main(int, char** argv) {
  using namespace lockstep::internal;
  const std::string kind = argv[2];
  if (kind == "agent") {
    be_agent(argv[1]);
  } else if (kind == "silent") {
    be_silent(argv[1]);
  } else {
    lie(argv[1], kind);
  }
}
