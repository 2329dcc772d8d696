#include "tests/launch/standby_job.h"

#include <signal.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::testing {

using nlohmann::json;

std::vector<std::string> stat_fields(pid_t pid) {
  std::istringstream stat(read_file("/proc/" + std::to_string(pid) + "/stat"));
  return {std::istream_iterator<std::string>(stat), {}};
}

std::unique_ptr<RunningProgram> StandbyJob::start_job(
    const std::string& program, const std::string& scenario,
    std::vector<std::string> options, const std::string& input) {
  options.insert(options.begin(),
                 {"--rdzv-id=" + name(), "--nproc-per-node=2"});
  options.insert(options.end(), {program, scenario, scratch().string()});
  return start(options, {.environment = {"OMP_NUM_THREADS=1"}, .input = input});
}

std::string StandbyJob::name() {
  const std::string whole =
      ::testing::UnitTest::GetInstance()->current_test_info()->name();
  return whole.substr(0, 40);
}

json StandbyJob::status() {
  const auto result = run_command({"status", "--json", name()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json all = json::parse(result.out);
  return all.is_array() ? all.at(0) : all;
}

pid_t StandbyJob::pid_of(int local_rank) {
  return status()["workers"][local_rank]["pid"];
}

void StandbyJob::await_standby(int count, int restarts) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  json now;
  while (!deadline.expired()) {
    now = status();
    if (now["standby"] == count && now["restart"] == restarts) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  FAIL() << now.dump(2);
}

void StandbyJob::kill_worker(int local_rank) {
  ASSERT_EQ(::kill(pid_of(local_rank), SIGKILL), 0);
}

void StandbyJob::stop() { std::ofstream(scratch() / "stop") << "now\n"; }

}  // namespace lockstep::internal::testing
