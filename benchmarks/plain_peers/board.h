#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::internal::bench {

// Keys and values that processes share if they were forked after the board was
// made. Ranks of one host use the board to meet if there is no store. Keys are
// never forgotten; there is room for 16,384 of them. Each of the processes may
// use the board, with one thread.
class Board {
 public:
  // Throws std::system_error.
  Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  ~Board();

  // Returns an exchange for one meeting. The board must outlive it.
  shm::Exchange exchange();

 private:
  struct Page;
  void set(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds allowed);

  Page* page_;
};

}  // namespace lockstep::internal::bench
