#include "tests/harness/process_world.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "tests/harness/all_tests.h"
#include "tests/harness/rank_world.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;

std::map<std::string, WorldTestBody>& bodies() {
  static std::map<std::string, WorldTestBody> all;
  return all;
}

class RunningWorld {
 public:
  explicit RunningWorld(int size) : world_(size), ranks_(world_.ranks()) {}

  // Runs one case over all ranks; its failures become the current test's.
  // Returns false if the world cannot be used any more.
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

  RankWorld world_;
  std::vector<RankProcess>& ranks_;  // of world_
};

// Holds the worlds and ends them at the end of the test program: a world must
// not outlive main().
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
      ADD_FAILURE() << "threw something that is not a std::exception";
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
  // The test program has ended or no longer needs this rank; groups and threads
  // need not be ended in order.
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
  return run_all_tests();
}

}  // namespace lockstep::internal::testing
