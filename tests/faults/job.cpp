#include "tests/faults/job.h"

#include <algorithm>
#include <cstdlib>
#include <ostream>
#include <random>
#include <utility>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::testing {
namespace {

uint32_t choose_seed() {
  const char* given = std::getenv("LOCKSTEP_TEST_SEED");
  return given ? static_cast<uint32_t>(std::stoul(given))
               : std::random_device()() % 1'000'000;
}

}  // namespace

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

std::string way_name(const ::testing::TestParamInfo<Way>& info) {
  return info.param.name;
}

Job::Job(Starter starter, Way way, int size, int port)
    : starter_(std::move(starter)), way_(way), size_(size), port_(port) {}

void Job::start(const std::string& scenario,
                const std::vector<std::string>& arguments) {
  for (int rank = 0; rank < size_; ++rank) {
    start_rank(rank, scenario, arguments);
  }
}

void Job::start_rank(int rank, const std::string& scenario,
                     const std::vector<std::string>& arguments) {
  const auto number = std::to_string(rank);
  ProgramSetup setup{.environment = environment ? environment(rank)
                                                : std::vector<std::string>{}};
  std::vector<std::string> usual{
      "RANK=" + number,        "LOCAL_RANK=" + number,
      "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(port_),
      "OMP_NUM_THREADS=1",     "WORLD_SIZE=" + std::to_string(size_)};
  if (way_.hosts > 1) {
    usual.push_back("LOCKSTEP_HOST_ID=" + std::to_string(host_of(rank)));
  }
  if (way_.detail) usual.push_back("TORCH_DISTRIBUTED_DEBUG=DETAIL");
  // If a variable is given twice, a shell in between would take the last one.
  for (const auto& variable : usual) {
    const auto name = variable.substr(0, variable.find('=') + 1);
    if (std::ranges::none_of(setup.environment, [&](const auto& given) {
          return given.starts_with(name);
        })) {
      setup.environment.push_back(variable);
    }
  }
  auto command = prefix ? prefix(rank) : std::vector<std::string>{};
  for (const auto& word : {LOCKSTEP_BIN_DIR "/tests/" + program, scenario,
                           std::string(way_.backend)}) {
    command.push_back(word);
  }
  command.insert(command.end(), arguments.begin(), arguments.end());
  ranks_.push_back(starter_(command, std::move(setup)));
}

void Job::await(const std::string& word, int except,
                std::chrono::seconds allowed) {
  const Deadline deadline = Deadline::after(allowed);
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == except) continue;
    SCOPED_TRACE("rank " + std::to_string(rank));
    ranks_[rank]->await_output(word + " " + std::to_string(rank), 1,
                               deadline.remaining());
  }
}

std::string Job::said(int rank, const std::string& word) const {
  const auto all = all_said(rank, word);
  return all.empty() ? "" : all.front();
}

std::vector<std::string> Job::all_said(int rank,
                                       const std::string& word) const {
  const auto begin = word + " " + std::to_string(rank) + " ";
  std::vector<std::string> all;
  for (const auto& line : lines(ranks_.at(rank)->out())) {
    if (line.starts_with(begin)) all.push_back(line.substr(begin.size()));
  }
  return all;
}

FaultsTest::FaultsTest()
    : seed_(choose_seed()),
      trace_(__FILE__, __LINE__,
             "LOCKSTEP_TEST_SEED=" + std::to_string(seed_)) {}

void FaultsTest::TearDown() {
  jobs_.clear();
  NodesTest::TearDown();
}

Job& FaultsTest::make_job(Way way, int size) {
  jobs_.push_back(std::make_unique<Job>(
      [this](const std::vector<std::string>& command, ProgramSetup setup) {
        return start_program(command, std::move(setup));
      },
      way, size, jobs_.empty() ? port() : free_port()));
  return *jobs_.back();
}

}  // namespace lockstep::internal::testing
