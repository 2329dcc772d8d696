#pragma once

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/comm/launcher_store.h"

namespace lockstep::internal {

// In a job of several nodes, ends the collectives in which this rank waits for
// ranks of a host that was lost: if it has no power, the connections to it stay
// open until a collective's timeout. Once the next generation is announced, all
// groups are aborted, in a thread of this object. The destructor and that of
// Collectives block while it does so; the destructor also while it asks the
// store, which may take 20 s. For the thread that trains.
class GenerationWatch {
 public:
  explicit GenerationWatch(c10::intrusive_ptr<LauncherStore> store);
  GenerationWatch(const GenerationWatch&) = delete;
  GenerationWatch& operator=(const GenerationWatch&) = delete;
  ~GenerationWatch();

  // As long as it lives, the thread that trains makes collectives, and
  // `generation` is the next one.
  class Collectives {
   public:
    // `watch` may hold nothing.
    Collectives(std::optional<GenerationWatch>& watch, int generation);
    Collectives(const Collectives&) = delete;
    Collectives& operator=(const Collectives&) = delete;
    ~Collectives();

   private:
    std::optional<GenerationWatch>& watch_;
  };

 private:
  void work();
  void set_next(std::optional<int> generation);

  const c10::intrusive_ptr<LauncherStore> store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<int> next_{};  // while there are collectives to end
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep::internal
