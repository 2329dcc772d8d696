#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "lockstep/kernels/dtype.h"

// Arrays of any element type, for the tests of the kernels.
namespace lockstep::internal::kernels {

inline const std::vector<DType> kDTypes = {
    DType::float32,  DType::float64, DType::float16,
    DType::bfloat16, DType::int8,    DType::uint8,
    DType::int32,    DType::int64,   DType::boolean};
inline const std::vector<ReduceOp> kReduceOps = {
    ReduceOp::sum, ReduceOp::avg,  ReduceOp::product, ReduceOp::min,
    ReduceOp::max, ReduceOp::band, ReduceOp::bor,     ReduceOp::bxor};

// `size` bytes that begin `offset` bytes after a 64-byte boundary and end at
// the end of the allocation, so that AddressSanitizer sees a read past it.
class Bytes {
 public:
  Bytes(size_t size, size_t offset, uint8_t fill = 0xa5)
      : storage_(static_cast<uint8_t*>(
            ::operator new(offset + size, std::align_val_t(64)))),
        size_(size),
        begin_(offset) {
    std::memset(storage_.get(), fill, offset + size);
  }
  uint8_t* data() { return storage_.get() + begin_; }
  const uint8_t* data() const { return storage_.get() + begin_; }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* storage) const {
      ::operator delete(storage, std::align_val_t(64));
    }
  };
  std::unique_ptr<uint8_t, Free> storage_;
  size_t size_;
  size_t begin_;
};

// A third of the elements are special (zeros, infinities, NaN, subnormals,
// the largest), a third have random bits, a third are ordinary numbers.
inline void fill(void* data, size_t count, DType dtype, std::mt19937_64& rng) {
  const auto put = [&](size_t i, auto value) {
    std::memcpy(static_cast<uint8_t*>(data) + i * sizeof(value), &value,
                sizeof(value));
  };
  const auto special = [&]<typename T>(std::vector<T> values) {
    return values[rng() % values.size()];
  };
  for (size_t i = 0; i < count; ++i) {
    const uint64_t kind = rng() % 3;
    const uint64_t bits = rng();
    const double number = static_cast<double>(bits % 20001) / 1000 - 10;
    switch (dtype) {
      case DType::float32:
        put(i,
            kind == 0   ? special(std::vector<uint32_t>{
                            0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                            0xffffffff, 1, 0x807fffff, 0x7f7fffff, 0xff7fffff})
            : kind == 1 ? static_cast<uint32_t>(bits)
                        : std::bit_cast<uint32_t>(static_cast<float>(number)));
        break;
      case DType::float64:
        put(i, kind == 0
                   ? special(std::vector<uint64_t>{
                         0, 1ull << 63, 0x7ffull << 52, 0xfffull << 52,
                         0x7ff8ull << 48, ~0ull, 1, 0x7fefffffffffffffull})
               : kind == 1 ? bits
                           : std::bit_cast<uint64_t>(number));
        break;
      case DType::float16:
        put(i, kind == 0   ? special(std::vector<uint16_t>{
                               0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0xffff, 1,
                               0x83ff, 0x7bff, 0xfbff})
               : kind == 1 ? static_cast<uint16_t>(bits)
                           : static_cast<uint16_t>(0x3c00 + bits % 0x800));
        break;
      case DType::bfloat16:
        put(i, kind == 0   ? special(std::vector<uint16_t>{
                               0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffff, 1,
                               0x807f, 0x7f7f, 0xff7f})
               : kind == 1 ? static_cast<uint16_t>(bits)
                           : static_cast<uint16_t>(0x3f80 + bits % 0x100));
        break;
      case DType::int8:
      case DType::uint8:
        put(i, static_cast<uint8_t>(bits));
        break;
      case DType::int32:
        put(i, static_cast<int32_t>(kind == 0 ? bits % 5 : bits));
        break;
      case DType::int64:
        put(i, static_cast<int64_t>(kind == 0 ? bits % 5 : bits));
        break;
      case DType::boolean:
        put(i, static_cast<uint8_t>(bits & 1));
        break;
    }
  }
}

// Returns whether element i is a NaN.
inline bool is_nan(const void* data, size_t i, DType dtype) {
  const auto above = [&]<typename T>(T infinity) {
    T bits;
    std::memcpy(&bits, static_cast<const uint8_t*>(data) + i * sizeof(T),
                sizeof(T));
    const T magnitude = bits & static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
    return magnitude > infinity;
  };
  switch (dtype) {
    case DType::float32:
      return above(uint32_t{0x7f800000});
    case DType::float64:
      return above(uint64_t{0x7ffull << 52});
    case DType::float16:
      return above(uint16_t{0x7c00});
    case DType::bfloat16:
      return above(uint16_t{0x7f80});
    default:
      return false;
  }
}

// Compares bits; any two NaNs are equal.
inline testing::AssertionResult same_elements(const void* actual,
                                              const void* expected,
                                              size_t count, DType dtype) {
  const size_t size = size_of(dtype);
  const auto* a = static_cast<const uint8_t*>(actual);
  const auto* e = static_cast<const uint8_t*>(expected);
  if (count == 0 || std::memcmp(a, e, count * size) == 0) {
    return testing::AssertionSuccess();
  }
  for (size_t i = 0; i < count; ++i) {
    if (std::memcmp(a + i * size, e + i * size, size) != 0 &&
        !(is_nan(actual, i, dtype) && is_nan(expected, i, dtype))) {
      uint64_t got = 0;
      uint64_t want = 0;
      std::memcpy(&got, a + i * size, size);
      std::memcpy(&want, e + i * size, size);
      return testing::AssertionFailure()
             << "element " << i << " of " << count << " has the bits "
             << std::hex << got << " instead of " << want;
    }
  }
  return testing::AssertionSuccess();
}

// Returns the name of a test that runs for every target.
inline std::string name_of_target(
    const testing::TestParamInfo<std::string>& target) {
  return target.param;
}

}  // namespace lockstep::internal::kernels
