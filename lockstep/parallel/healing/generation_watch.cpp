#include "lockstep/parallel/healing/generation_watch.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <utility>

#include "lockstep/base/signals.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal {
namespace {

// Hosts without power are lost after half a minute, and all others are noticed
// by their connections.
constexpr std::chrono::seconds kWatchEvery{1};

}  // namespace

GenerationWatch::GenerationWatch(c10::intrusive_ptr<LauncherStore> store)
    : store_(std::move(store)), thread_(quiet_thread([this] { work(); })) {}

GenerationWatch::~GenerationWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

GenerationWatch::Collectives::Collectives(std::optional<GenerationWatch>& watch,
                                          int generation)
    : watch_(watch) {
  if (watch_) watch_->set_next(generation);
}

GenerationWatch::Collectives::~Collectives() {
  if (watch_) watch_->set_next(std::nullopt);
}

void GenerationWatch::set_next(std::optional<int> generation) {
  const std::lock_guard lock(mutex_);
  next_ = generation;
}

void GenerationWatch::work() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kWatchEvery, [this] { return stop_; })) {
    const auto next = next_;
    if (!next) continue;
    lock.unlock();
    bool announced = false;
    try {
      announced = store_->check({generation_key(*next)});
    } catch (const c10::DistError&) {
      // The launcher has gone.
    }
    lock.lock();
    if (!announced || next_ != next) continue;
    next_.reset();
    // ~Collectives waits for the mutex, so nobody makes the groups anew now.
    for (const auto& group : existing_groups().groups) {
      try {
        group->abort("a rank was lost, and the job goes on without it");
      } catch (const std::exception&) {
        // A connection of a backend is broken already.
      }
    }
  }
}

}  // namespace lockstep::internal
