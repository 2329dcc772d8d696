#include "lockstep/cli/report/activity.h"

#include <algorithm>
#include <array>

namespace lockstep::internal {
namespace {

struct Rule {
  std::string_view name;      // what the name begins with
  std::string_view category;  // empty means any
  Activity activity;
};

// The first rule that fits counts. A name that begins with "lockstep::" and
// fits none is a span around other things, such as an action of a pipeline.
constexpr std::array kRules{
    // torch.profiler marks a step of the host on the GPU's time line, too.
    Rule{"ProfilerStep#", "gpu_user_annotation", Activity::none},
    Rule{"ProfilerStep#", "", Activity::step},

    // Lockstep's spans are "lockstep::PART::NAME", each within its thread.
    Rule{"lockstep::data::fetch", "", Activity::background},
    Rule{"lockstep::data::", "", Activity::loader},
    Rule{"lockstep::snapshot::write", "", Activity::background},
    Rule{"lockstep::snapshot::", "", Activity::snapshot},
    Rule{"lockstep::optim::", "", Activity::optimizer},
    Rule{"lockstep::zero::step", "", Activity::optimizer},
    Rule{"lockstep::zero::", "", Activity::communication},
    Rule{"lockstep::ddp::publish_bucket", "", Activity::communication},
    Rule{"lockstep::ddp::wait", "", Activity::communication},
    Rule{"lockstep::fsdp::", "", Activity::communication},
    Rule{"lockstep::comm::", "", Activity::communication},
    Rule{"lockstep::comm_thread::", "", Activity::communication},
    Rule{"lockstep::", "", Activity::none},

    Rule{"enumerate(DataLoader)#", "", Activity::loader},
    Rule{"Optimizer.", "", Activity::optimizer},  // step#, zero_grad#

    // c10d's events begin in the thread of the call and end with the work.
    Rule{"gloo:", "", Activity::communication_in_flight},
    Rule{"mpi:", "", Activity::communication_in_flight},
    Rule{"ucc:", "", Activity::communication_in_flight},
    // NCCL's work is the kernel; on the host these only start it.
    Rule{"nccl:", "", Activity::none},
    Rule{"c10d::", "", Activity::communication_call},
    Rule{"record_param_comms", "", Activity::communication_call},
    Rule{"ncclKernel", "kernel", Activity::communication},
    Rule{"ncclDevKernel", "kernel", Activity::communication},

    Rule{"aten::", "cpu_op", Activity::compute},
    Rule{"", "cpu_op", Activity::operators},
    Rule{"", "kernel", Activity::compute},
    Rule{"", "gpu_memcpy", Activity::compute},
    Rule{"", "gpu_memset", Activity::compute},
};

}  // namespace

Activity activity_of(std::string_view name, std::string_view category) {
  const auto* rule = std::ranges::find_if(kRules, [&](const Rule& each) {
    return name.starts_with(each.name) &&
           (each.category.empty() || each.category == category);
  });
  return rule == kRules.end() ? Activity::none : rule->activity;
}

bool is_device_category(std::string_view category) {
  return category == "kernel" || category == "gpu_memcpy" ||
         category == "gpu_memset" || category == "gpu_user_annotation";
}

}  // namespace lockstep::internal
