#include "lockstep/base/interruption.h"

#include <atomic>

namespace lockstep::internal {
namespace {

std::atomic<InterruptionCheck> interruption_check{nullptr};

}  // namespace

void set_interruption_check(InterruptionCheck check) noexcept {
  interruption_check.store(check, std::memory_order_release);
}

void check_interruption() {
  // Pairs with the release above: the function sees what was written before.
  if (auto* const check = interruption_check.load(std::memory_order_acquire)) {
    check();
  }
}

}  // namespace lockstep::internal
