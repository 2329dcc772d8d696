#include "lockstep/comm/nccl/departure.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "lockstep/comm/last_words.h"

namespace lockstep::internal::nccl {
namespace {

// The pause between two looks. It is well below the second within which all
// ranks are to read the notice (LastWords::await_heard).
constexpr std::chrono::milliseconds kPause{100};

constexpr const char* kLeft = "lockstep/left";

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
    const LastWords left(*store_, kLeft);
    left.say(std::to_string(rank));
    left.await_heard(size_);
  } catch (const std::exception&) {
    // The store is gone, or a rank that will never read the notice.
  }
}

// The process may end in on_departure_, and the store with it.
void Departure::let_all_hear() {
  try {
    LastWords(*store_, kLeft).await_heard(size_);
  } catch (const std::exception&) {
    // The store is gone already.
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
    std::optional<std::string> left;
    while (!(left = LastWords(*store_, kLeft).heard())) {
      if (stopped.wait_for(lock, stop, kPause, is_over)) return;
    }
    seen_ = true;
    if (stop.stop_requested()) return;
    let_all_hear();
    on_departure_(std::stoi(*left));
  } catch (const std::exception&) {
    // The store is gone, as it is at the end of every program. That is not
    // a reason to end pending operations; NCCL's own timeout remains.
  }
}

}  // namespace lockstep::internal::nccl
