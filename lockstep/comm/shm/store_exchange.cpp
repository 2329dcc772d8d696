#include "lockstep/comm/shm/store_exchange.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <c10/util/Exception.h>

namespace lockstep::shm {
namespace {

constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{5'000};

}  // namespace

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

void set_text(c10d::Store& store, const std::string& key,
              const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

std::string get_text(c10d::Store& store, const std::string& key) {
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

Exchange exchange_over(const c10::intrusive_ptr<c10d::Store>& store) {
  return {
      .set = [store](
                 const std::string& key,
                 const std::string& value) { set_text(*store, key, value); },
      .get =
          [store](const std::string& key, std::chrono::milliseconds allowed) {
            if (!await_key(*store, key, Deadline::after(allowed))) {
              throw c10::DistBackendError(
                  {__func__, __FILE__, __LINE__},
                  c10::str("\"", key, "\" was not in the store within ",
                           allowed.count(), " ms"));
            }
            return get_text(*store, key);
          }};
}

}  // namespace lockstep::shm
