#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {

// How the ranks of a job are connected.
struct Way {
  const char* name;     // names the test's instance
  const char* backend;  // for init_process_group()
  // The ranks are spread evenly over as many hosts, which differ only by
  // LOCKSTEP_HOST_ID.
  int hosts = 1;
  bool detail = false;  // TORCH_DISTRIBUTED_DEBUG=DETAIL: calls are compared
};
void PrintTo(const Way& way, std::ostream* out);

inline constexpr Way kOneHost{"OneHost", "lockstep"};
inline constexpr Way kOneHostDetail{"OneHostDetail", "lockstep", 1, true};
inline constexpr Way kTwoHosts{"TwoHosts", "lockstep", 2};
inline constexpr Way kTwoHostsDetail{"TwoHostsDetail", "lockstep", 2, true};
inline constexpr Way kGloo{"Gloo", "gloo"};
inline constexpr Way kGlooDetail{"GlooDetail", "gloo", 1, true};

// A job of real processes without a launcher, which would stop the peers of a
// rank that fails: so all that the peers see comes from the backend.
class Job {
 public:
  using Starter = std::function<std::unique_ptr<RunningProgram>(
      const std::vector<std::string>& command, ProgramSetup setup)>;

  Job(Starter starter, Way way, int size, int port);

  // The test program that every rank runs.
  std::string program{"faults_rank"};
  // The beginning of a rank's command, and variables that precede its
  // environment.
  std::function<std::vector<std::string>(int rank)> prefix{};
  std::function<std::vector<std::string>(int rank)> environment{};

  // Starts `program SCENARIO BACKEND ARGUMENTS` as every rank, or as one.
  void start(const std::string& scenario,
             const std::vector<std::string>& arguments = {});
  void start_rank(int rank, const std::string& scenario,
                  const std::vector<std::string>& arguments = {});

  int size() const { return static_cast<int>(ranks_.size()); }
  // Returns a rank, by the order of the starts.
  RunningProgram& rank(int rank) { return *ranks_.at(rank); }
  int host_of(int rank) const { return rank * way_.hosts / size_; }

  // Waits until every rank but `except` has printed `word`; fails the test if
  // this takes longer than `allowed` for all of them together.
  void await(const std::string& word, int except = -1,
             std::chrono::seconds allowed = std::chrono::seconds(30));
  // Returns the text after the first "word RANK " of a rank.
  std::string said(int rank, const std::string& word) const;
  // Returns the text of every such line.
  std::vector<std::string> all_said(int rank, const std::string& word) const;

 private:
  Starter starter_;
  Way way_;
  int size_;
  int port_;
  std::vector<std::unique_ptr<RunningProgram>> ranks_;
};

class FaultsTest : public NodesTest {
 protected:
  FaultsTest();
  void TearDown() override;

  Job& make_job(Way way, int size);

  // Seeds all random choices; LOCKSTEP_TEST_SEED repeats one. A failing test
  // prints it.
  uint32_t seed() const { return seed_; }

 private:
  uint32_t seed_;
  ::testing::ScopedTrace trace_;
  std::vector<std::unique_ptr<Job>> jobs_;
};

class WaysTest : public FaultsTest,
                 public ::testing::WithParamInterface<Way> {};

std::string way_name(const ::testing::TestParamInfo<Way>& info);

}  // namespace lockstep::internal::testing
