#include "lockstep/comm/shm/store_exchange.h"

#include <chrono>
#include <optional>
#include <stdexcept>

#include <c10/util/Exception.h>

#include "lockstep/comm/gather_texts.h"

namespace lockstep::internal::shm {

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
                  return poll_store(Deadline::after(allowed),
                                    [&] { return store->check({key}); })
                             ? std::optional(store->get_to_str(key))
                             : std::nullopt;
                });
              }};
}

}  // namespace lockstep::internal::shm
