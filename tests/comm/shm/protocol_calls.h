#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/group.h"

// Collectives of tests, with data that every rank can compute for all ranks:
// so each checks every bit of what it has.
namespace lockstep::shm::testing {

// A good hash of numbers, the same on every machine.
uint64_t mixed(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);

// Random values of each dtype. Floating point ones are finite, of both signs
// and 8 exponents, so that sums depend on their order. The data of one rank at
// one step is a window of them.
class Values {
 public:
  // Windows of up to `bytes`.
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

// The same on all ranks.
struct Call {
  Operation operation;
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  // Elements: of each piece, or at most of each where they are uneven (often
  // none then). One piece for all_reduce, reduce and broadcast.
  size_t count = 0;
  bool uneven = false;
  uint64_t step = 0;  // what the data is a function of
};
std::string describe(const Call& call, int size);

// Runs calls of one rank.
class Caller {
 public:
  Caller(Group& group, const Values& values, milliseconds timeout)
      : group_(group), values_(values), timeout_(timeout) {}

  // Bytes that run() needs at most.
  static size_t room(const Call& call, int size);

  // Lays data out in `room` behind `shift` elements, calls, and compares every
  // byte: the outputs, the inputs, and those around them. Overwrites all at
  // once afterwards. Throws std::runtime_error with the first wrong byte.
  // `in_place`: a reduce_scatter writes over its own input.
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
  // Of all ranks' data that goes to `to`.
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
  std::vector<std::byte> expected_;  // of the room
  std::vector<std::byte> result_;
};

}  // namespace lockstep::shm::testing
