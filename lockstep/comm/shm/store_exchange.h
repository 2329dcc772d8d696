#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/handshake.h"

// c10d's store as ranks use it that are about to meet.
namespace lockstep::shm {

// Until `key` is there; false if the time is over. Asks again and again, as
// LibTorch prints a warning of its own when Store::wait() runs out of time.
bool await_key(c10d::Store& store, const std::string& key,
               const Deadline& deadline);

void set_text(c10d::Store& store, const std::string& key,
              const std::string& text);
std::string get_text(c10d::Store& store, const std::string& key);

// For meet(). Keeps the store alive.
Exchange exchange_over(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace lockstep::shm
