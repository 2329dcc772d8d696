#pragma once

// Random numbers of the simulated devices. As on a GPU, a generator is a seed
// and an offset. Enqueuing an operation takes the offset, so that numbers do
// not depend on when it runs; they differ from those of the CPU's generator.

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace lockstep::internal::simulated_cuda {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Advances `generator`, which must be one of a device, and returns a generator
// of the CPU for one operation.
at::Generator generator_for_operation(const at::Generator& generator);

}  // namespace lockstep::internal::simulated_cuda
