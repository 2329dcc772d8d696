// One rank of a job whose ranks die and are replaced:
//
//   comm_reconfigure_rank BACKEND RANK SIZE STORE [ARGUMENT]
//
// The ranks meet in the file STORE. STORE.generation holds the number of the
// generation that the test has announced; LOCKSTEP_GENERATION makes this a
// process that takes a place. Each rank makes two groups and all_reduces in
// them for ever. It prints, each with its rank:
//
//   ready R     it has made its groups
//   failed R    an operation has failed
//   healed R G  its groups are those of generation G, and right
//   refused R TEXT  reconfigure() threw std::invalid_argument; it ends
//
// and ends when STORE.end exists. ARGUMENT: "other" makes other groups;
// "dies=N" kills the process when it writes to the store for the Nth time in
// reconfigure(), and "reads=N" when it reads a value.

#include <ATen/ATen.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal::testing {
namespace {

// A store whose process dies in one of its calls.
class DeadlyStore final : public c10d::FileStore {
 public:
  using FileStore::FileStore;
  using FileStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (--writes_left == 0) ::kill(::getpid(), SIGKILL);
    FileStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    if (--reads_left == 0) ::kill(::getpid(), SIGKILL);
    return FileStore::get(key);
  }
  int writes_left = 0;
  int reads_left = 0;
};

struct NextGeneration {
  int number;
};

class Rank {
 public:
  Rank(const std::string& backend, int rank, int size, std::string file,
       const std::string& argument)
      : file_(std::move(file)),
        size_(size),
        generation_(generation_joined()),
        store_(c10::make_intrusive<DeadlyStore>(file_, -1)),
        world_(init_process_group(backend, {.timeout = std::chrono::seconds(60),
                                            .world_size = size,
                                            .rank = rank,
                                            .store = store_})) {
    ends_ = new_group({0, size - 1});
    all_ = argument == "other" ? new_group({0, 1}) : new_group();
    if (argument.starts_with("dies=")) {
      writes_left_ = std::stoi(argument.substr(5));
    } else if (argument.starts_with("reads=")) {
      reads_left_ = std::stoi(argument.substr(6));
    }
    say("ready");
  }

  // Returns the exit code.
  int run() {
    if (generation_ > 0) {
      if (const int code = heal(); code != 0) return code;
    }
    while (true) {
      try {
        while (!ends()) step();
        return 0;
      } catch (const c10::Error&) {
        say("failed");
      }
      while (announced() <= generation_) {
        if (std::filesystem::exists(file_ + ".end")) ::_exit(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (const int code = heal(); code != 0) return code;
    }
  }

 private:
  void say(const std::string& word, const std::string& more = {}) const {
    std::cout << word << ' ' << world_->rank() << (more.empty() ? "" : " ")
              << more << std::endl;
  }

  int announced() const {
    int number = 0;
    std::ifstream(file_ + ".generation") >> number;
    return number;
  }

  // All ranks agree on whether the test is over.
  bool ends() const {
    const auto end =
        at::full({1}, std::filesystem::exists(file_ + ".end") ? 1 : 0);
    all_reduce(end, {.op = ReduceOp::MAX});
    return end.item<int>() != 0;
  }

  void step() const {
    for (const ProcessGroupPtr& group : {world_.get(), ends_, all_}) {
      if (!group) continue;
      const auto ones = at::ones({1000});
      all_reduce(ones, {.group = group});
      if (ones[999].item<int>() != group->size()) ::_exit(7);
    }
  }

  int heal() {
    while (true) {
      generation_ = std::max(generation_, announced());
      store_->writes_left = writes_left_;
      store_->reads_left = reads_left_;
      try {
        reconfigure({.uuid = std::to_string(generation_),
                     .store = store_,
                     .look = [this] {
                       if (announced() > generation_) {
                         throw NextGeneration{announced()};
                       }
                     }});
        step();
        say("healed", std::to_string(generation_));
        return 0;
      } catch (const std::invalid_argument& error) {
        say("refused", error.what());
        return 3;
      } catch (const NextGeneration&) {
        continue;
      } catch (const c10::Error&) {
        say("failed");
      }
      while (announced() <= generation_) {
        if (std::filesystem::exists(file_ + ".end")) ::_exit(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
  }

  const std::string file_;
  const int size_;
  int generation_;
  int writes_left_ = -1;
  int reads_left_ = -1;
  const c10::intrusive_ptr<DeadlyStore> store_;
  const ProcessGroupGuard world_;
  ProcessGroupPtr ends_;
  ProcessGroupPtr all_;
};

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  return lockstep::internal::testing::Rank(argv[1], std::stoi(argv[2]),
                                           std::stoi(argv[3]), argv[4],
                                           argc > 5 ? argv[5] : "")
      .run();
}
