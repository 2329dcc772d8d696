#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/handshake.h"

// Lets ranks that are about to meet use c10d's store.
namespace lockstep::shm {

// Waits until `key` is there; returns false if the deadline passes first. Asks
// again and again, because LibTorch prints a warning of its own if
// Store::wait() times out.
bool await_key(c10d::Store& store, const std::string& key,
               const Deadline& deadline);

void set_text(c10d::Store& store, const std::string& key,
              const std::string& text);
std::string get_text(c10d::Store& store, const std::string& key);

// Returns what meet() needs. Keeps the store alive.
Exchange exchange_over(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace lockstep::shm
