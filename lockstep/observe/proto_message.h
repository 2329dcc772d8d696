#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// One message of Protocol Buffers in its wire format (Protocol Buffers
// documentation, "Encoding"), written field by field. Readers accept fields in
// any order; Google's libraries write them in the order of their numbers. A
// field of proto3 that has its default (0 or empty) is left out by them, unless
// it belongs to a `oneof` or is an element of a list; the caller decides.
class ProtoMessage {
 public:
  const std::string& bytes() const { return bytes_; }

  // int32, int64 and enumerations.
  void add_integer(int field, int64_t value) {
    add_key(field, 0);
    add_varint(static_cast<uint64_t>(value));
  }
  void add_double(int field, double value) {
    add_key(field, 1);
    add_little_endian(std::bit_cast<uint64_t>(value), 8);
  }
  void add_float(int field, float value) {
    add_key(field, 5);
    add_little_endian(std::bit_cast<uint32_t>(value), 4);
  }
  // string, bytes, and messages that are encoded already.
  void add_bytes(int field, std::string_view value) {
    add_key(field, 2);
    add_varint(value.size());
    bytes_ += value;
  }
  void add_message(int field, const ProtoMessage& message) {
    add_bytes(field, message.bytes_);
  }
  // A packed list.
  void add_doubles(int field, const std::vector<double>& values) {
    add_key(field, 2);
    add_varint(values.size() * 8);
    for (const double value : values) {
      add_little_endian(std::bit_cast<uint64_t>(value), 8);
    }
  }

 private:
  void add_key(int field, int wire_type) {
    add_varint(static_cast<uint64_t>(field) << 3 |
               static_cast<uint64_t>(wire_type));
  }
  void add_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_ += static_cast<char>(value | 0x80);
    }
    bytes_ += static_cast<char>(value);
  }
  void add_little_endian(uint64_t value, int count) {
    for (; count > 0; --count, value >>= 8) {
      bytes_ += static_cast<char>(value);
    }
  }

  std::string bytes_;
};

}  // namespace lockstep::internal
