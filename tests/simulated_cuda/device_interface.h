#pragma once

// The current device and stream of each thread. device_interface.cpp tells
// LibTorch of the guard of the simulated devices (devices, streams, events).

#include <c10/core/Stream.h>

namespace lockstep::internal::simulated_cuda {

c10::DeviceIndex current_device();
// Throws c10::Error if there is no such device.
void set_current_device(c10::DeviceIndex device);
// Returns the current stream of this thread on `device`.
c10::Stream current_stream(c10::DeviceIndex device);
// Returns the stream of this number.
c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
// Makes the pools of all devices begin again with their first stream.
void reset_stream_pools();

}  // namespace lockstep::internal::simulated_cuda
