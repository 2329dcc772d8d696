#include "lockstep/comm/shm/store_exchange.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

#include <c10/util/Exception.h>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::shm {
namespace {

constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{5'000};

// Waits until `key` is set; returns false if the deadline passes first. Asks
// again and again, because LibTorch prints a warning of its own if
// Store::wait() times out.
bool await_key(c10d::Store& store, const std::string& key,
               const Deadline& deadline) {
  auto pause = kFirstPause;
  while (!store.check({key})) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

}  // namespace

Exchange exchange_over(const c10::intrusive_ptr<c10d::Store>& store) {
  // The protocol knows nothing of LibTorch and would take its stack trace for a
  // part of the text.
  auto plain = [](auto&& call) {
    try {
      return call();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  };
  return {.set =
              [=](const std::string& key, const std::string& value) {
                plain([&] { store->set(key, value); });
              },
          .get =
              [=](const std::string& key, std::chrono::milliseconds allowed) {
                return plain([&] {
                  return await_key(*store, key, Deadline::after(allowed))
                             ? std::optional(store->get_to_str(key))
                             : std::nullopt;
                });
              }};
}

}  // namespace lockstep::internal::shm
