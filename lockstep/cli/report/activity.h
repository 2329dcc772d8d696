#pragma once

#include <string_view>

namespace lockstep::internal {

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
// Lockstep's profiler write them. activity.cpp has the table.
Activity activity_of(std::string_view name, std::string_view category);

// Returns whether events of this category are of a GPU and not of the host.
bool is_device_category(std::string_view category);

}  // namespace lockstep::internal
