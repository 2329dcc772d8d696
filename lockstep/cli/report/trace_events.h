#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// Sets of moments, and their arithmetic. All functions are pure.

// The moments from `begin` up to, but without, `end`, in nanoseconds. The end
// is never before the begin.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t length() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// A set of moments: intervals that are sorted, not empty, and apart from each
// other.
using Intervals = std::vector<Interval>;

// Returns the moments that are in at least one of `parts`, which may be in any
// order, overlap, or be empty.
Intervals united(std::vector<Interval> parts);

// Returns the moments of `a` or `b`, of `a` and `b`, of `a` but not `b`.
Intervals unite(const Intervals& a, const Intervals& b);
Intervals intersect(const Intervals& a, const Intervals& b);
Intervals subtract(const Intervals& a, const Intervals& b);

// Returns the moments of `set` that lie in `window`. Takes time for these only.
Intervals clip(const Intervals& set, Interval window);

int64_t total_length(const Intervals& set);

// The activity of a thread, or of a stream of a GPU, that an event of a trace
// shows.
enum class Activity {
  none,     // nothing that the report counts
  compute,  // an operator of LibTorch that waits for no other rank, or a kernel
  // Any other operator, or what holds operators, such as a node of backward:
  // its hooks may wait for other ranks.
  operators,
  // Communication in which the thread or stream is busy, or waits.
  communication,
  // Communication that may go on after the call: its thread may compute
  // meanwhile.
  communication_in_flight,
  // A call that starts communication. Beside the kernels of a GPU it does not
  // count: the communication is a kernel.
  communication_call,
  optimizer,
  loader,
  snapshot,
  // Work that a thread does beside the training: preparing or writing. Its
  // operators are not the training's, and nobody waits for it.
  background,
  step,  // one iteration, from ProfilerStep#N
};

// Returns the activity of an event by its name and category, as Kineto and
// Lockstep's profiler write them. trace_events.cpp has the table.
Activity activity_of(std::string_view name, std::string_view category);

// Returns whether events of this category are of a GPU and not of the host.
bool is_device_category(std::string_view category);

// An operator's inputs, as a trace has them ("Input Dims" and "Concrete
// Inputs" of Kineto): the sizes of each tensor, and the text of each other
// value, in the order of the operator's arguments.
struct OperatorInputs {
  std::vector<std::vector<double>> sizes{};
  std::vector<std::string> values{};
};

// Returns the floating-point operations of a matrix product (aten::mm, addmm,
// bmm, baddbmm) or of a convolution and its backward (aten::convolution,
// convolution_backward), counting a multiplication and an addition as two.
// Returns 0 for other operators, and if the inputs do not tell.
double operator_flops(std::string_view name, const OperatorInputs& inputs);

// Whether operator_flops() counts operators of this name as convolutions.
bool is_convolution(std::string_view name);

}  // namespace lockstep::internal
