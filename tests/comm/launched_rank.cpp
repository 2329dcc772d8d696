// A rank for launched_store_test.cpp, which `lockstep run` starts:
// `comm_launched_rank SCENARIO BACKEND NAME=N ...`. It prints lines as
// described in tests/faults/rank_report.h:
//
//   port R WORDS   whether a process listens at MASTER_PORT
//   sum R is N     the sum of all ranks
//   done R         its part of the scenario went well
//   failed R TEXT  an operation threw
//   refused R TEXT init_process_group() threw
//
//   sum      joins `joins` times (once), each time with a group more
//   stopped  the rank `odd` stops itself (SIGSTOP); the others call
//            monitored_barrier(), new_group() and leave, and end with code 3
//   elsewhere  has a MASTER_PORT of its own
//   restarts   the rank `odd` dies in the first attempt
//
// The rank `odd` has a world size or a rank of its own if `size` or `rank` is
// given.
#include <ATen/ATen.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/faults/rank_report.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;

// Whether a socket of this host listens at MASTER_PORT.
bool port_listens() {
  std::ostringstream port;
  port << ":" << std::uppercase << std::hex;
  port.width(4);
  port.fill('0');
  port << std::stoi(std::getenv("MASTER_PORT"));
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(file);
    for (std::string line; std::getline(table, line);) {
      std::istringstream words(line);
      std::string number;
      std::string local;
      std::string remote;
      std::string state;
      words >> number >> local >> remote >> state;
      if (local.ends_with(port.str()) && state == "0A") return true;
    }
  }
  return false;
}

void say_sum(const ProcessGroupPtr& group) {
  auto sum = at::full({1}, get_rank(group), at::kLong);
  all_reduce(sum, {.group = group});
  say("sum", "is " + std::to_string(sum.item<int64_t>()));
}

InitProcessGroupOptions options_of(const Arguments& given, bool odd) {
  InitProcessGroupOptions options{
      .timeout = milliseconds(given.get("timeout", 300'000))};
  if (odd) {
    options.world_size = given.get("size", -1);
    options.rank = given.get("rank", -1);
  }
  return options;
}

int stop_or_go_on(bool odd) {
  barrier();
  if (odd) {
    say("stopping");
    ::raise(SIGSTOP);
  }
  try {
    monitored_barrier({.timeout = milliseconds(1500)});
  } catch (const std::exception& error) {
    say("failed", one_line(error));
  }
  try {
    new_group({}, {.timeout = milliseconds(1500)});
  } catch (const std::exception& error) {
    say("failed", one_line(error));
  }
  destroy_process_group();
  say("done");
  return 3;
}

}  // namespace

int run(const std::string& scenario, const std::string& backend,
        const Arguments& given) {
  const bool odd = own_rank() == given.get("odd", -1);
  if (scenario == "elsewhere") {
    ::setenv("MASTER_PORT", std::to_string(given.get("port")).c_str(), 1);
  }
  if (scenario == "uncaught") {
    auto group = init_process_group(backend, options_of(given, odd));
  }
  try {
    for (int join = given.get("joins", 1); join > 0; --join) {
      auto group = init_process_group(backend, options_of(given, odd));
      say("port", port_listens() ? "listens" : "is silent");
      say_sum(group);
      if (scenario == "stopped") return stop_or_go_on(odd);
      if (scenario == "restarts" && odd &&
          std::string(std::getenv("TORCHELASTIC_RESTART_COUNT")) == "0") {
        ::raise(SIGKILL);
      }
      say_sum(new_group());
      barrier();
    }
    say("done");
    return 0;
  } catch (const std::exception& error) {
    say("refused", one_line(error));
    return 1;
  }
}

}  // namespace lockstep::internal::testing
