#include "tests/simulated_cuda/device_interface.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>

#include "tests/simulated_cuda/device_memory.h"
#include "tests/simulated_cuda/scheduler.h"
#include "tests/simulated_cuda/settings.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal::simulated_cuda {
namespace {

// Pools as c10::cuda has: the streams 1 to 32 of a device have the normal
// priority, those after them a high one. 0 is the default stream.
constexpr int kStreamsOfPool = 32;

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kMostDevices> streams_of_thread{};

struct StreamPool {
  std::atomic<unsigned> next{0};
};
// Each device has one for normal and one for high priority.
std::array<std::array<StreamPool, 2>, kMostDevices> pools;

struct Event {
  c10::DeviceIndex device;
  StreamPoint point;
  // When the stream reached the event, if it measures time.
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? checked_index(device.index()) : current_device();
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kDeviceType, device_of_thread};
  }
  void setDevice(c10::Device device) const override {
    device_of_thread = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device,
                                      bool high_priority) const override {
    const c10::DeviceIndex index = index_of(device);
    const unsigned number =
        pools[static_cast<size_t>(index)][high_priority ? 1 : 0].next++ %
        kStreamsOfPool;
    return stream_of(index, 1 + number + (high_priority ? kStreamsOfPool : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams_of_thread[static_cast<size_t>(stream.device_index())] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Scheduler::get().has_reached(Scheduler::get().end_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Scheduler::get().wait_for(Scheduler::get().end_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Scheduler::get().wait_for_device(checked_index(device));
  }

  void record(void** handle, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(),
                "Event device ", int{device},
                " does not match recording stream's device ",
                int{stream.device_index()});
    auto*& event = reinterpret_cast<Event*&>(*handle);  // NOLINT
    if (!event) event = new Event{};
    event->device = stream.device_index();
    event->time.reset();
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      event->time = std::make_shared<std::chrono::steady_clock::time_point>();
      event->point = Scheduler::get().enqueue(stream, [time = event->time] {
        *time = std::chrono::steady_clock::now();
      });
    } else {
      event->point = Scheduler::get().end_of(stream);
    }
  }
  void block(void* handle, const c10::Stream& stream) const override {
    if (!handle) return;
    Scheduler::get().enqueue_wait(stream, static_cast<Event*>(handle)->point);
  }
  bool queryEvent(void* handle) const override {
    return !handle ||
           Scheduler::get().has_reached(static_cast<Event*>(handle)->point);
  }
  void synchronizeEvent(void* handle) const override {
    if (!handle) return;
    Scheduler::get().wait_for(static_cast<Event*>(handle)->point);
  }
  void destroyEvent(void* handle,
                    c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(handle);
  }
  double elapsedTime(void* first, void* second,
                     c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(first && second && queryEvent(first) && queryEvent(second),
                "both events must be completed before the time between them "
                "is known");
    const auto* const begin = static_cast<Event*>(first)->time.get();
    const auto* const end = static_cast<Event*>(second)->time.get();
    TORCH_CHECK(begin && end, "both events must measure time");
    return std::chrono::duration<double, std::milli>(*end - *begin).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory,
                             const c10::Stream& stream) const override {
    device_allocator().recordStream(memory, stream);
  }
};

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex device) {
  device_of_thread = checked_index(device);
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), id);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, streams_of_thread[static_cast<size_t>(device)]);
}

void reset_stream_pools() {
  for (auto& of_device : pools) {
    for (StreamPool& pool : of_device) pool.next = 0;
  }
}

// The functions of simulated_cuda.h that are about all devices.

void synchronize() {
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    Scheduler::get().wait_for_device(device);
  }
}

void restart(uint64_t seed) {
  synchronize();
  device_allocator().emptyCache();
  Scheduler::get().set_seed(seed);
  reset_stream_pools();
}

Counters counters() {
  const LiveMemory live = live_memory();
  return {.operations = Scheduler::get().tasks_run(),
          .host_waits = Scheduler::get().host_waits(),
          .live_blocks = live.blocks,
          .live_bytes = live.bytes};
}

void enqueue(const c10::Stream& stream, std::function<void()> task) {
  Scheduler::get().enqueue(stream, std::move(task));
}

}  // namespace lockstep::internal::simulated_cuda

namespace {

const c10::impl::DeviceGuardImplRegistrar guard_registrar(
    lockstep::internal::simulated_cuda::kDeviceType,
    new lockstep::internal::simulated_cuda::DeviceGuard);

const c10::AllocatorRegisterer<lockstep::internal::simulated_cuda::kDeviceType>
    allocator_registrar(
        &lockstep::internal::simulated_cuda::device_allocator());

}  // namespace
