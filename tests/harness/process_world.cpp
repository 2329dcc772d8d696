#include "tests/harness/process_world.h"

#include <arpa/inet.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "tests/harness/rank_process.h"

namespace lockstep::testing {
namespace {

using nlohmann::json;

std::map<std::string, WorldTestBody>& bodies() {
  static std::map<std::string, WorldTestBody> all;
  return all;
}

// A loopback port that stays this world's: bound, never listening, so that
// only rank 0's store (which reuses addresses) can take it.
class HeldPort {
 public:
  HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    int on = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    if (::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on,
                     sizeof(on)) != 0 ||
        ::bind(socket_.get(), raw, size) != 0 ||
        ::getsockname(socket_.get(), raw, &size) != 0) {
      throw_errno("bind");
    }
    port_ = ntohs(address.sin_port);
  }
  int port() const { return port_; }

 private:
  FileDescriptor socket_;
  int port_;
};

class RunningWorld {
 public:
  explicit RunningWorld(int size) {
    auto pattern =
        (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX")
            .string();
    if (::mkdtemp(pattern.data()) == nullptr) throw_errno("mkdtemp");
    folder_ = pattern;
    auto count = std::to_string(size);
    for (int rank = 0; rank < size; ++rank) {
      auto number = std::to_string(rank);
      ranks_.emplace_back(
          rank,
          std::vector<std::string>{
              "RANK=" + number, "LOCAL_RANK=" + number, "WORLD_SIZE=" + count,
              "LOCAL_WORLD_SIZE=" + count, "MASTER_ADDR=127.0.0.1",
              "MASTER_PORT=" + std::to_string(port_.port()),
              "OMP_NUM_THREADS=1", "LOCKSTEP_TEST_FOLDER=" + folder_.string(),
              "LOCKSTEP_FLIGHT_DIR=" + (folder_ / "flight").string()});
    }
  }
  RunningWorld(const RunningWorld&) = delete;
  RunningWorld& operator=(const RunningWorld&) = delete;
  ~RunningWorld() {
    ranks_.clear();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // Runs one case over all ranks; its failures become the current test's.
  // False if the world is of no use any more.
  bool run(const std::string& name) {
    std::vector<bool> answered(ranks_.size(), false);
    for (auto& rank : ranks_) rank.send({{"run", name}});
    size_t left = ranks_.size();
    bool healthy = true;
    Deadline deadline = Deadline::after(kCaseDeadline);
    while (left > 0 && !deadline.expired()) {
      std::vector<pollfd> waits;
      for (auto& rank : ranks_) {
        waits.push_back(
            {answered[rank.rank()] ? -1 : rank.socket(), POLLIN, 0});
      }
      ::poll(waits.data(), waits.size(),
             static_cast<int>(deadline.remaining().count()));
      for (size_t i = 0; i < waits.size(); ++i) {
        if (waits[i].revents == 0) continue;
        answered[i] = true;
        --left;
        if (take_answer(ranks_[i])) continue;
        if (healthy) {
          deadline = Deadline::after(std::min<std::chrono::milliseconds>(
              kAfterFailureDeadline, deadline.remaining()));
        }
        healthy = false;
      }
    }
    for (size_t i = 0; i < answered.size(); ++i) {
      if (answered[i]) continue;
      ADD_FAILURE() << "rank " << i << " of " << ranks_.size()
                    << (healthy ? " did not end within "
                                : " was still in the case ")
                    << deadline.allowed().count()
                    << (healthy ? " ms" : " ms after another failed");
    }
    return healthy && left == 0;
  }

 private:
  bool take_answer(RankProcess& rank) {
    auto title = "rank " + std::to_string(rank.rank()) + " of " +
                 std::to_string(ranks_.size());
    auto answer = rank.receive();
    if (!answer) {
      ADD_FAILURE() << title << " " << rank.describe_end();
      return false;
    }
    for (auto& failure : (*answer)["failures"]) {
      ADD_FAILURE_AT(failure["file"].get<std::string>().c_str(),
                     failure["line"].get<int>())
          << title << ": " << failure["message"].get<std::string>();
    }
    if (answer->contains("skipped")) {
      [&] { GTEST_SKIP() << (*answer)["skipped"].get<std::string>(); }();
    }
    return (*answer)["failures"].empty();
  }

  HeldPort port_;
  std::filesystem::path folder_;
  std::vector<RankProcess> ranks_;
};

// Ends with the test program: a world must not outlive main().
class Worlds : public ::testing::Environment {
 public:
  void run(int size, const std::string& name) {
    auto& world = running_[size];
    if (!world) world = std::make_unique<RunningWorld>(size);
    if (!world->run(name)) world.reset();
  }
  void TearDown() override { running_.clear(); }

 private:
  std::map<int, std::unique_ptr<RunningWorld>> running_;
};

Worlds* worlds = nullptr;  // owned by GoogleTest

class WorldCase : public ::testing::Test {
 public:
  WorldCase(int size, std::string name) : size_(size), name_(std::move(name)) {}
  void TestBody() override { worlds->run(size_, name_); }

 private:
  int size_;
  std::string name_;
};

json run_body(const WorldTestBody& body, const World& world) {
  json answer{{"failures", json::array()}};
  ::testing::TestPartResultArray results;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS,
        &results);
    try {
      body(world);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "threw " << error.what();
    } catch (...) {
      ADD_FAILURE() << "threw something that is no std::exception";
    }
  }
  for (int i = 0; i < results.size() && i < 20; ++i) {
    const auto& result = results.GetTestPartResult(i);
    if (result.skipped()) answer["skipped"] = result.message();
    if (!result.failed()) continue;
    answer["failures"].push_back(
        {{"file", result.file_name() != nullptr ? result.file_name() : ""},
         {"line", result.line_number()},
         {"message", std::string(result.message()).substr(0, 4000)}});
  }
  return answer;
}

int run_rank(int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  World world{.rank = std::stoi(std::getenv("RANK")),
              .size = std::stoi(std::getenv("WORLD_SIZE")),
              .folder = std::getenv("LOCKSTEP_TEST_FOLDER")};
  while (auto message = receive_message(socket)) {
    const auto& body = bodies().at((*message)["run"].get<std::string>());
    send_message(socket, run_body(body, world));
  }
  // The test program is gone or done; groups and threads need no goodbye.
  ::_exit(0);
}

}  // namespace

bool register_world_test(const std::string& suite, const std::string& name,
                         const std::vector<int>& sizes, WorldTestBody body,
                         const char* file, int line) {
  std::string key = suite + "." + name;
  bodies()[key] = std::move(body);
  for (int size : sizes) {
    ::testing::RegisterTest(
        suite.c_str(), (name + "/" + std::to_string(size)).c_str(), nullptr,
        nullptr, file, line,
        [size, key]() -> ::testing::Test* { return new WorldCase(size, key); });
  }
  return true;
}

int run_tests(int argc, char** argv) {
  if (auto socket = inherited_control_socket()) return run_rank(*socket);
  ::testing::InitGoogleTest(&argc, argv);
  worlds = new Worlds;
  ::testing::AddGlobalTestEnvironment(worlds);
  return RUN_ALL_TESTS();
}

}  // namespace lockstep::testing
