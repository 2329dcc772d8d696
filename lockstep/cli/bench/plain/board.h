#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::bench {

// Keys and values between processes that were forked after it was made: what
// ranks on one host need to meet, where there is no store. Keys are never
// forgotten; there is room for 16,384 of them. Any process of them, one thread
// each.
class Board {
 public:
  // Throws std::system_error.
  Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  ~Board();

  // For one meeting. The board must outlive it.
  shm::Exchange exchange();

 private:
  struct Page;
  void set(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds allowed);

  Page* page_;
};

}  // namespace lockstep::bench
