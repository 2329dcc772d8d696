#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/kernels/dtype.h"

namespace lockstep::internal::shm {

// One side of a message, as MessageEngine keeps it. What was asked for does not
// change. Until `ended` is true, the outcome belongs to the thread that drives.
class Message {
 public:
  enum class Failure : uint8_t { none, mismatch, given_up, broken };

  bool is_send;
  int peer;  // or Group::kAnySource
  int32_t tag;
  const std::byte* from;  // of a send
  std::byte* to;          // of a receive
  size_t bytes;
  kernels::DType dtype;

  int source{-1};
  Failure failure{Failure::none};
  std::string words{};  // of the failure
  // Stored after the outcome. seq_cst: a thread that sleeps for the message
  // reads this once more after it has said that it sleeps.
  std::atomic<bool> ended{false};
};

}  // namespace lockstep::internal::shm
