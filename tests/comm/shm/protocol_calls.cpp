#include "tests/comm/shm/protocol_calls.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm::testing {
namespace {

// Lies before the first piece and after each piece; must not be written.
constexpr size_t kGuard = 64;
constexpr int kBlank = 0xa5;
constexpr size_t kWindows = size_t{1} << 18;  // bytes in which windows begin

uint64_t fitting(DType dtype, uint64_t bits) {
  switch (dtype) {
    case DType::float32:  // exponents 120 to 127; similar for the other dtypes
      return (bits & 0x83ffffff'83ffffff) | 0x3c000000'3c000000;
    case DType::float64:
      return (bits & 0x807fffff'ffffffff) | 0x3f800000'00000000;
    case DType::float16:
      return (bits & 0x9fff'9fff'9fff'9fff) | 0x2000'2000'2000'2000;
    case DType::bfloat16:
      return (bits & 0x83ff'83ff'83ff'83ff) | 0x3c00'3c00'3c00'3c00;
    case DType::boolean:
      return bits & 0x01010101'01010101;
    default:
      return bits;
  }
}

const char* name_of(Operation operation) {
  constexpr const char* kNames[] = {
      "barrier",    "all_reduce", "reduce",  "reduce_scatter", "broadcast",
      "all_gather", "gather",     "scatter", "all_to_all"};
  return kNames[static_cast<int>(operation)];
}

}  // namespace

uint64_t mixed(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  // The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable
  // Pseudorandom Number Generators, 2014), over all numbers in turn.
  uint64_t state = 0;
  for (uint64_t number : {a, b, c, d}) {
    state += number + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
  return state;
}

bool reduces(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce ||
         operation == Operation::reduce_scatter;
}

Values::Values(uint64_t seed, size_t bytes) : seed_(seed) {
  for (int t = 0; t < kernels::kDTypeCount; ++t) {
    const auto dtype = static_cast<DType>(t);
    auto& table = tables_[t];
    table.resize((bytes + kWindows) / sizeof(uint64_t) + 1);
    for (size_t i = 0; i < table.size(); ++i) {
      table[i] = fitting(dtype, mixed(seed, t, i));
    }
  }
}

const std::byte* Values::window(DType dtype, uint64_t step,
                                uint64_t stream) const {
  const size_t element = kernels::size_of(dtype);
  const auto& table = tables_[static_cast<int>(dtype)];
  return reinterpret_cast<const std::byte*>(table.data()) +
         mixed(seed_, step, stream) % (kWindows / element) * element;
}

std::string describe(const Call& call, int size) {
  return std::string(name_of(call.operation)) + " of " +
         kernels::name_of(call.dtype) + ", " +
         (reduces(call.operation) ? kernels::name_of(call.op) : "no op") +
         ", root " + std::to_string(call.root) + ", " +
         std::to_string(call.count) +
         (call.uneven ? " elements at most" : " elements") + ", step " +
         std::to_string(call.step) + ", " + std::to_string(size) + " ranks";
}

size_t Caller::room(const Call& call, int size) {
  const size_t element = kernels::size_of(call.dtype);
  return (2 * size_t(size) + 1) * (call.count * element + kGuard) +
         16 * element;
}

Caller::Piece Caller::add(size_t elements) {
  const Piece piece{.offset = used_,
                    .bytes = elements * kernels::size_of(call_.dtype)};
  used_ += piece.bytes + kGuard;
  return piece;
}

void Caller::fill(Piece piece, const void* values) {
  if (piece.bytes == 0) return;
  std::memcpy(at(piece), values, piece.bytes);
  expect(piece, values);
}

void Caller::expect(Piece piece, const void* values) {
  if (piece.bytes == 0) return;
  std::memcpy(expected_.data() + piece.offset, values, piece.bytes);
}

const std::byte* Caller::values(uint64_t from, uint64_t to) const {
  return values_.window(call_.dtype, call_.step, from * kMaxRanks + to);
}

size_t Caller::elements(int from, int to) const {
  if (!call_.uneven) return call_.count;
  const uint64_t chance = mixed(call_.step, from, to, 7);
  return chance % 4 == 0 ? 0 : chance / 4 % (call_.count + 1);
}

const std::byte* Caller::reduced(int to, size_t elements) {
  result_.resize(elements * kernels::size_of(call_.dtype));
  if (elements == 0) return result_.data();
  std::vector<const void*> sources;
  for (int rank = 0; rank < group_.size(); ++rank) {
    sources.push_back(values(rank, to));
  }
  void* const destination = result_.data();
  kernels::reduce_scalar({&destination, 1}, sources, elements, call_.dtype,
                         call_.op);
  return result_.data();
}

void Caller::blank() {
  if (expected_.size() < used_) expected_.resize(used_);
  std::memset(expected_.data(), kBlank, used_);
  std::memset(room_, kBlank, used_);
}

void Caller::compare() const {
  if (std::memcmp(room_, expected_.data(), used_) == 0) return;
  const auto* wrong =
      std::mismatch(room_, room_ + used_, expected_.data()).first;
  throw std::runtime_error(
      describe(call_, group_.size()) + ": rank " +
      std::to_string(group_.rank()) + " has a wrong byte at " +
      std::to_string(wrong - room_) + " of " + std::to_string(used_) +
      ", counted with what surrounds the data");
}

void Caller::run(const Call& call, std::byte* room, size_t shift,
                 bool in_place) {
  call_ = call;
  room_ = room;
  used_ = kGuard + shift * kernels::size_of(call.dtype);
  switch (call.operation) {
    case Operation::barrier:
      group_.barrier(timeout_);
      return;
    case Operation::all_reduce:
    case Operation::reduce:
    case Operation::broadcast:
      run_one_piece();
      break;
    case Operation::reduce_scatter:
      run_reduce_scatter(in_place);
      break;
    case Operation::all_gather:
      run_gather(true);
      break;
    case Operation::gather:
      run_gather(false);
      break;
    case Operation::scatter:
      run_scatter();
      break;
    case Operation::all_to_all:
      run_all_to_all();
      break;
  }
  compare();
  // Overwrites the data, so a peer that reads it after our call has ended gets
  // wrong numbers.
  std::memset(room_, ~kBlank, used_);
}

void Caller::run_one_piece() {
  const Piece data = add(call_.count);
  blank();
  fill(data, values(group_.rank(), 0));
  const bool root = group_.rank() == call_.root;
  switch (call_.operation) {
    case Operation::all_reduce:
      expect(data, reduced(0, call_.count));
      group_.all_reduce(at(data), call_.count, call_.dtype, call_.op, timeout_);
      break;
    case Operation::reduce:
      if (root) expect(data, reduced(0, call_.count));
      group_.reduce(at(data), call_.count, call_.dtype, call_.op, call_.root,
                    timeout_);
      break;
    default:
      expect(data, values(call_.root, 0));
      group_.broadcast(bytes(data), call_.root, call_.dtype, timeout_);
  }
}

void Caller::run_reduce_scatter(bool in_place) {
  const int size = group_.size();
  std::vector<size_t> counts;
  std::vector<Piece> pieces;
  for (int rank = 0; rank < size; ++rank) {
    counts.push_back(elements(0, rank));
    pieces.push_back(add(counts.back()));
  }
  const size_t own = counts[group_.rank()];
  const Piece output = in_place ? pieces[group_.rank()] : add(own);
  blank();
  std::vector<const void*> inputs;
  for (int rank = 0; rank < size; ++rank) {
    fill(pieces[rank], values(group_.rank(), rank));
    inputs.push_back(at(pieces[rank]));
  }
  expect(output, reduced(group_.rank(), own));
  group_.reduce_scatter(at(output), inputs, counts, call_.dtype, call_.op,
                        timeout_);
}

void Caller::run_gather(bool all) {
  const bool takes = all || group_.rank() == call_.root;
  const Piece input = add(elements(group_.rank(), 0));
  std::vector<Piece> pieces;
  for (int rank = 0; takes && rank < group_.size(); ++rank) {
    pieces.push_back(add(elements(rank, 0)));
  }
  blank();
  fill(input, values(group_.rank(), 0));
  std::vector<Bytes> outputs;
  for (size_t rank = 0; rank < pieces.size(); ++rank) {
    expect(pieces[rank], values(rank, 0));
    outputs.push_back(bytes(pieces[rank]));
  }
  const ConstBytes own{.data = at(input), .size = input.bytes};
  if (all) {
    group_.all_gather(outputs, own, call_.dtype, timeout_);
  } else {
    group_.gather(outputs, own, call_.root, call_.dtype, timeout_);
  }
}

void Caller::run_scatter() {
  const Piece output = add(elements(0, group_.rank()));
  const bool gives = group_.rank() == call_.root;
  std::vector<Piece> pieces;
  for (int rank = 0; gives && rank < group_.size(); ++rank) {
    pieces.push_back(add(elements(0, rank)));
  }
  blank();
  std::vector<ConstBytes> inputs;
  for (size_t rank = 0; rank < pieces.size(); ++rank) {
    fill(pieces[rank], values(call_.root, rank));
    inputs.push_back({.data = at(pieces[rank]), .size = pieces[rank].bytes});
  }
  expect(output, values(call_.root, group_.rank()));
  group_.scatter(bytes(output), inputs, call_.root, call_.dtype, timeout_);
}

void Caller::run_all_to_all() {
  const int size = group_.size();
  const int own = group_.rank();
  std::vector<Piece> sent;
  std::vector<Piece> received;
  for (int rank = 0; rank < size; ++rank) {
    sent.push_back(add(elements(own, rank)));
    received.push_back(add(elements(rank, own)));
  }
  blank();
  std::vector<ConstBytes> inputs;
  std::vector<Bytes> outputs;
  for (int rank = 0; rank < size; ++rank) {
    fill(sent[rank], values(own, rank));
    expect(received[rank], values(rank, own));
    inputs.push_back({.data = at(sent[rank]), .size = sent[rank].bytes});
    outputs.push_back(bytes(received[rank]));
  }
  group_.all_to_all(outputs, inputs, call_.dtype, timeout_);
}

}  // namespace lockstep::internal::shm::testing
