#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lockstep::internal {

// FNV-1a over 64 bits (Fowler, Noll, Vo; RFC 9923). Unlike std::hash it is the
// same on every platform. It tells two files or two models apart; it does not
// protect against forgery.
class Digest {
 public:
  void add(std::string_view bytes) {
    for (const char byte : bytes) {
      value_ = (value_ ^ static_cast<uint8_t>(byte)) * 0x100000001b3ULL;
    }
  }
  void add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      value_ = (value_ ^ (number >> shift & 0xff)) * 0x100000001b3ULL;
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace lockstep::internal
