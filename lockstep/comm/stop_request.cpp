#include "lockstep/comm/stop_request.h"

#include <ATen/ATen.h>

#include <atomic>
#include <csignal>

#include "lockstep/base/signals.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/worker/stop_signals.h"

namespace lockstep {
namespace {

// The signal for which all ranks stop; 0 if there is none.
std::atomic<int> agreed_stop{0};

}  // namespace

bool stop_requested() {
  static const internal::StopSignals signals = [] {
    auto ending = internal::ending_signals();
    ending.insert(SIGTERM);  // request_stop() is one
    return internal::StopSignals({ending.begin(), ending.end()});
  }();
  if (agreed_stop.load() != 0) return true;
  int stop = signals.highest();
  if (is_initialized()) {
    const internal::UserFunction function("stop_requested()");
    const auto highest =
        at::full({1}, stop,
                 at::dtype(at::kInt).device(default_group()->control_device()));
    all_reduce(highest, {.op = ReduceOp::MAX});
    stop = highest.item<int>();
  }
  agreed_stop = stop;
  return stop != 0;
}

void request_stop() noexcept { internal::StopSignals::notice(SIGTERM); }

int stop_exit_code() noexcept {
  const int signal = agreed_stop.load();
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace lockstep
