#include "benchmarks/plain_peers/reduction_case.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::bench {
namespace {

using kernels::DType;
using kernels::ReduceOp;

// This many elements are made or compared at a time.
constexpr size_t kChunk = size_t{1} << 16;

// The numbers are hashed, so that an element in a wrong place is not right by
// chance. For products they are ones and twos, whose products stay finite.
uint64_t number_at(int rank, size_t index, ReduceOp op) {
  uint64_t hashed =
      (index + uint64_t{977} * (static_cast<uint64_t>(rank) + 1)) * 2654435761;
  hashed = (hashed ^ hashed >> 32) >> 16;
  return op == ReduceOp::product ? (hashed & 1) + 1 : hashed & 3;
}

template <typename Element>
void write(std::byte* to, size_t index, Element value) {
  std::memcpy(to + index * sizeof(value), &value, sizeof(value));
}

// The numbers 0 to 3 as the 16-bit types write them.
constexpr std::array<uint16_t, 4> kFloat16{0x0000, 0x3C00, 0x4000, 0x4200};
constexpr std::array<uint16_t, 4> kBFloat16{0x0000, 0x3F80, 0x4000, 0x4040};

void write_number(std::byte* to, size_t index, uint64_t number, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return write(to, index, static_cast<float>(number));
    case DType::float64:
      return write(to, index, static_cast<double>(number));
    case DType::float16:
      return write(to, index, kFloat16[number]);
    case DType::bfloat16:
      return write(to, index, kBFloat16[number]);
    case DType::int32:
      return write(to, index, static_cast<uint32_t>(number));
    case DType::int64:
      return write(to, index, number);
    case DType::boolean:
      return write(to, index, static_cast<uint8_t>(number & 1));
    default:
      return write(to, index, static_cast<uint8_t>(number));
  }
}

void write_numbers(std::byte* to, int rank, size_t begin, size_t count,
                   DType dtype, ReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    write_number(to, i, number_at(rank, begin + i, op), dtype);
  }
}

std::string hexadecimal(const std::byte* element, size_t bytes) {
  std::string text = "0x";
  for (size_t i = bytes; i-- > 0;) {
    const auto value = std::to_integer<unsigned>(element[i]);
    text += "0123456789abcdef"[value >> 4];
    text += "0123456789abcdef"[value & 15];
  }
  return text;
}

}  // namespace

ReductionCase::ReductionCase(Reducer& reducer, size_t count, DType dtype,
                             ReduceOp op)
    : reducer_(reducer), count_(count), dtype_(dtype), op_(op) {
  const std::string refusal = reducer.refusal(count, dtype, op);
  if (!refusal.empty()) throw std::invalid_argument(refusal);
  data_ = static_cast<std::byte*>(
      reducer_.allocate(count * kernels::size_of(dtype)));
}

ReductionCase::~ReductionCase() { reducer_.release(data_); }

void ReductionCase::fill() {
  write_numbers(data_, reducer_.rank(), 0, count_, dtype_, op_);
}

void ReductionCase::clear() {
  std::memset(data_, 0, count_ * kernels::size_of(dtype_));
}

int64_t ReductionCase::count_wrong(std::string& first) const {
  const size_t element = kernels::size_of(dtype_);
  const auto ranks = static_cast<size_t>(reducer_.size());
  std::vector<std::vector<std::byte>> inputs(ranks);
  std::vector<std::byte> expected(kChunk * element);
  int64_t wrong = 0;
  for (size_t begin = 0; begin < count_; begin += kChunk) {
    const size_t count = std::min(kChunk, count_ - begin);
    std::vector<const void*> sources;
    for (size_t rank = 0; rank < ranks; ++rank) {
      inputs[rank].resize(kChunk * element);
      write_numbers(inputs[rank].data(), static_cast<int>(rank), begin, count,
                    dtype_, op_);
      sources.push_back(inputs[rank].data());
    }
    void* const destination = expected.data();
    kernels::reduce_scalar({&destination, 1}, sources, count, dtype_, op_);
    for (size_t i = 0; i < count; ++i) {
      const std::byte* got = data_ + (begin + i) * element;
      const std::byte* want = expected.data() + i * element;
      if (std::memcmp(got, want, element) == 0) continue;
      if (wrong++ == 0) {
        first = "element " + std::to_string(begin + i) + " is " +
                hexadecimal(got, element) + ", not " +
                hexadecimal(want, element);
      }
    }
  }
  return wrong;
}

}  // namespace lockstep::internal::bench
