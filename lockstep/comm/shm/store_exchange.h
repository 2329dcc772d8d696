#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/shm/protocol/handshake.h"

// Lets ranks that are about to meet use c10d's store.
namespace lockstep::internal::shm {

// Returns what meet() needs. Keeps the store alive.
Exchange exchange_over(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace lockstep::internal::shm
