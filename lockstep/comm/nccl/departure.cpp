#include "lockstep/comm/nccl/departure.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::internal::nccl {
namespace {

// The pause between two looks. It is well below kTellTime, within which all
// ranks are to read the notice.
constexpr std::chrono::milliseconds kPause{100};
constexpr std::chrono::seconds kTellTime{1};

constexpr const char* kLeft = "lockstep/left";
constexpr const char* kHeard = "lockstep/heard";
constexpr const char* kAllHeard = "lockstep/all_heard";

}  // namespace

Departure::Departure(const c10::intrusive_ptr<c10d::Store>& store, int size,
                     std::function<void(int rank)> on_departure)
    : store_(store->clone()),
      size_(size),
      on_departure_(std::move(on_departure)),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

Departure::~Departure() { stop(); }

void Departure::stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
}

void Departure::announce(int rank) {
  stop();
  // This rank leaves because of the other one, which is the one to be named.
  if (seen_ || size_ == 1) return;
  try {
    const auto text = std::to_string(rank);
    store_->set(kLeft, std::vector<uint8_t>(text.begin(), text.end()));
    store_->wait({kAllHeard}, kTellTime);
  } catch (const std::exception&) {
    // The store is gone, or a rank that will never read the notice.
  }
}

void Departure::watch(const std::stop_token& stop) {
  try {
    // Polls, because LibTorch prints a warning of its own when Store::wait()
    // runs out of time.
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    const auto is_over = [&stop] { return stop.stop_requested(); };
    while (!store_->check({kLeft})) {
      if (stopped.wait_for(lock, stop, kPause, is_over)) return;
    }
    seen_ = true;
    const auto text = store_->get(kLeft);
    if (store_->add(kHeard, 1) == size_ - 1) {
      store_->set(kAllHeard, std::vector<uint8_t>{1});
    }
    if (stop.stop_requested()) return;
    on_departure_(std::stoi(std::string(text.begin(), text.end())));
  } catch (const std::exception&) {
    // The store is gone, as it is at the end of every program. That is not
    // a reason to end pending operations; NCCL's own timeout remains.
  }
}

}  // namespace lockstep::internal::nccl
