#include "lockstep/cli/report/trace_events.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

namespace lockstep::internal {
namespace {

// Appends `next`, which begins at or after the last interval of `set` does.
void append(Intervals& set, Interval next) {
  if (next.begin >= next.end) return;
  if (!set.empty() && next.begin <= set.back().end) {
    set.back().end = std::max(set.back().end, next.end);
  } else {
    set.push_back(next);
  }
}

}  // namespace

Intervals united(std::vector<Interval> parts) {
  std::ranges::sort(parts, {}, &Interval::begin);
  Intervals set;
  for (const Interval& part : parts) append(set, part);
  return set;
}

Intervals unite(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto one = a.begin();
  auto other = b.begin();
  while (one != a.end() || other != b.end()) {
    const bool take_one =
        other == b.end() || (one != a.end() && one->begin <= other->begin);
    append(set, take_one ? *one++ : *other++);
  }
  return set;
}

Intervals intersect(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto one = a.begin();
  auto other = b.begin();
  while (one != a.end() && other != b.end()) {
    append(set, {std::max(one->begin, other->begin),
                 std::min(one->end, other->end)});
    // The one that ends first cannot meet anything that comes later.
    if (one->end < other->end) {
      ++one;
    } else {
      ++other;
    }
  }
  return set;
}

Intervals subtract(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto other = b.begin();
  for (const Interval& one : a) {
    int64_t begin = one.begin;
    while (other != b.end() && other->end <= begin) ++other;
    for (auto hole = other; hole != b.end() && hole->begin < one.end; ++hole) {
      append(set, {begin, hole->begin});
      begin = hole->end;
    }
    append(set, {begin, one.end});
  }
  return set;
}

Intervals clip(const Intervals& set, Interval window) {
  Intervals inside;
  auto one = std::ranges::upper_bound(set, window.begin, {}, &Interval::end);
  for (; one != set.end() && one->begin < window.end; ++one) {
    append(inside, {std::max(one->begin, window.begin),
                    std::min(one->end, window.end)});
  }
  return inside;
}

int64_t total_length(const Intervals& set) {
  int64_t length = 0;
  for (const Interval& one : set) length += one.length();
  return length;
}

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

namespace {

using Sizes = std::vector<double>;

double product_of(const Sizes& sizes, size_t first = 0) {
  double product = 1;
  for (size_t i = first; i < sizes.size(); ++i) product *= sizes[i];
  return product;
}

// Returns the numbers in a text such as "[2, 2]".
Sizes numbers_in(const std::string& text) {
  Sizes numbers;
  for (size_t at = 0;
       (at = text.find_first_of("0123456789", at)) != text.npos;) {
    char* end = nullptr;
    numbers.push_back(std::strtod(text.c_str() + at, &end));
    at = static_cast<size_t>(end - text.c_str());
  }
  return numbers;
}

double product_flops(bool is_added, const std::vector<Sizes>& sizes) {
  const size_t left = is_added ? 1 : 0;
  if (sizes.size() < left + 2) return 0;
  const Sizes& a = sizes[left];
  const Sizes& b = sizes[left + 1];
  if (a.size() != b.size() || a.size() < 2 || a.size() > 3) return 0;
  return 2 * b.back() * product_of(a);
}

// Each place of the output, or if it is transposed of the input, meets each
// weight of its group once.
double one_convolution(const Sizes& places, const Sizes& weight) {
  return 2 * product_of(places) * product_of(weight, 1);
}

// aten::convolution(input, weight, bias, stride, padding, dilation, transposed,
// output_padding, groups).
double convolution_flops(const OperatorInputs& inputs) {
  if (inputs.sizes.size() < 2 || inputs.values.size() < 7) return 0;
  const Sizes& input = inputs.sizes[0];
  const Sizes& weight = inputs.sizes[1];
  if (input.size() < 3 || weight.size() != input.size()) return 0;
  if (inputs.values[6] == "True") return one_convolution(input, weight);
  const auto per_dimension = [&](size_t argument) {
    Sizes numbers = numbers_in(inputs.values[argument]);
    // One number stands for all dimensions.
    if (numbers.size() == 1) numbers.resize(input.size() - 2, numbers[0]);
    return numbers;
  };
  const Sizes stride = per_dimension(3);
  const Sizes padding = per_dimension(4);
  const Sizes dilation = per_dimension(5);
  Sizes output{input[0], weight[0]};
  for (size_t i = 2; i < input.size(); ++i) {
    const size_t at = i - 2;
    if (at >= std::min({stride.size(), padding.size(), dilation.size()}) ||
        stride[at] == 0) {
      return 0;
    }
    output.push_back(std::floor((input[i] + 2 * padding[at] -
                                 dilation[at] * (weight[i] - 1) - 1) /
                                stride[at]) +
                     1);
  }
  return one_convolution(output, weight);
}

// aten::convolution_backward(grad_output, input, weight, bias_sizes, stride,
// padding, dilation, transposed, output_padding, groups, output_mask): the
// gradients of the input and of the weight, if they are wanted, cost as much as
// the convolution each.
double backward_flops(const OperatorInputs& inputs) {
  if (inputs.sizes.size() < 3 || inputs.values.size() < 11) return 0;
  const Sizes& weight = inputs.sizes[2];
  if (weight.size() < 3) return 0;
  const std::string& mask = inputs.values[10];
  const size_t second = mask.find(',');
  if (second == mask.npos) return 0;
  const bool of_input = mask.find("True") < second;
  const bool of_weight = mask.find("True", second) < mask.find(',', second + 1);
  const bool is_transposed = inputs.values[7] == "True";
  return (of_input + of_weight) *
         one_convolution(inputs.sizes[is_transposed ? 1 : 0], weight);
}

}  // namespace

double operator_flops(std::string_view name, const OperatorInputs& inputs) {
  if (name == "aten::mm" || name == "aten::bmm") {
    return product_flops(false, inputs.sizes);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return product_flops(true, inputs.sizes);
  }
  if (name == "aten::convolution") return convolution_flops(inputs);
  if (name == "aten::convolution_backward") return backward_flops(inputs);
  return 0;
}

bool is_convolution(std::string_view name) {
  return name == "aten::convolution" || name == "aten::convolution_backward";
}

}  // namespace lockstep::internal
