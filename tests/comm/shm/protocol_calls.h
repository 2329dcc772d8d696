#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/group.h"

// Collectives for tests, with data that every rank can compute for all ranks.
// So each rank checks every bit that it has.
namespace lockstep::internal::shm::testing {

// Returns a good hash of the numbers, the same on every machine.
uint64_t mixed(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);

// Random values of each dtype. Floating point values are finite, of both signs
// and 8 exponents, so that sums depend on their order. The data of one rank at
// one step is a window of the values.
class Values {
 public:
  // The windows have at most `bytes`.
  Values(uint64_t seed, size_t bytes);
  const std::byte* window(DType dtype, uint64_t step, uint64_t stream) const;

 private:
  uint64_t seed_;
  std::array<std::vector<uint64_t>, kernels::kDTypeCount> tables_;
};

enum class Operation {
  barrier,
  all_reduce,
  reduce,
  reduce_scatter,
  broadcast,
  all_gather,
  gather,
  scatter,
  all_to_all,
};
inline constexpr int kOperationCount = 9;
bool reduces(Operation operation);

// Must be the same on all ranks.
struct Call {
  Operation operation;
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  // Elements of each piece. If `uneven`, each piece has at most as many, and
  // often none. all_reduce, reduce and broadcast have one piece.
  size_t count = 0;
  bool uneven = false;
  uint64_t step = 0;  // selects the data
};
std::string describe(const Call& call, int size);

// Runs the calls of one rank.
class Caller {
 public:
  Caller(Group& group, const Values& values, milliseconds timeout)
      : group_(group), values_(values), timeout_(timeout) {}

  // Returns the bytes that run() needs at most.
  static size_t room(const Call& call, int size);

  // Places data in `room` after `shift` elements, calls, and compares every
  // byte: the outputs, the inputs, and the bytes around them. Then overwrites
  // all of them at once. Throws std::runtime_error that names the first wrong
  // byte. With `in_place` a reduce_scatter writes over its own input.
  void run(const Call& call, std::byte* room, size_t shift = 0,
           bool in_place = false);

 private:
  struct Piece {
    size_t offset;
    size_t bytes;
  };
  Piece add(size_t elements);
  void fill(Piece piece, const void* values);
  void expect(Piece piece, const void* values);
  void* at(Piece piece) const { return room_ + piece.offset; }
  Bytes bytes(Piece piece) const {
    return {.data = at(piece), .size = piece.bytes};
  }
  const std::byte* values(uint64_t from, uint64_t to) const;
  size_t elements(int from, int to) const;
  // Returns the reduction of all ranks' data for rank `to`.
  const std::byte* reduced(int to, size_t elements);
  void blank();
  void compare() const;

  void run_one_piece();
  void run_reduce_scatter(bool in_place);
  void run_gather(bool all);
  void run_scatter();
  void run_all_to_all();

  Group& group_;
  const Values& values_;
  milliseconds timeout_;

  Call call_{};
  std::byte* room_ = nullptr;
  size_t used_ = 0;
  std::vector<std::byte> expected_;  // of the whole room
  std::vector<std::byte> result_;
};

}  // namespace lockstep::internal::shm::testing
