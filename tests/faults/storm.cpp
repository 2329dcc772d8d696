#include "tests/faults/storm.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"

namespace lockstep::internal::testing {
namespace {

constexpr int64_t kMostElements = 300'000;
// The rows of several ranks together are slightly larger than one count.
constexpr int64_t kTableElements = 2 * kMostElements + 64;
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kInt,
                                     at::kLong, at::kBFloat16};
constexpr const char* kKinds[] = {"all_reduce", "reduce",         "broadcast",
                                  "all_gather", "reduce_scatter", "all_to_all",
                                  "send, recv", "barrier"};

// The operations of all ranks in one turn.
struct Turn {
  int kind;
  at::ScalarType dtype;
  int64_t count;   // elements; of each rank's row if there are several
  int64_t offset;  // into the tables
  int root;
  bool max;
  bool async_op;
};

class Runner {
 public:
  explicit Runner(const Storm& storm)
      : storm_(storm), plan_(storm.seed), own_(storm.seed + 1 + rank_) {}

  void run() {
    for (int number = 0; number < storm_.turns; ++number) {
      const Turn turn = next();
      delay();
      take(number, turn);
    }
  }

 private:
  int below(std::mt19937& random, int64_t end) {
    return static_cast<int>(
        std::uniform_int_distribution<int64_t>(0, end - 1)(random));
  }

  Turn next() {
    const double share = std::uniform_real_distribution<>(0, 1)(plan_);
    const auto count =
        static_cast<int64_t>(std::pow(double{kMostElements}, share));
    return {.kind = below(plan_, std::size(kKinds)),
            .dtype = kTypes[below(plan_, std::size(kTypes))],
            .count = std::max<int64_t>(count, 1),
            .offset = below(plan_, kMostElements),
            .root = below(plan_, size_),
            .max = below(plan_, 4) == 0,
            .async_op = below(plan_, 4) == 0};
  }

  // Waits only sometimes, so that operations also follow without a pause.
  void delay() {
    if (below(own_, 50) != 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(below(own_, 2000)));
  }

  const at::Tensor& table(int rank, at::ScalarType dtype) {
    auto& table = tables_[{rank, dtype}];
    if (!table.defined()) {
      auto random = at::make_generator<at::CPUGeneratorImpl>(
          storm_.seed * 100 + static_cast<uint64_t>(rank));
      table = storm_.in_rank_order
                  ? at::randn({kTableElements}, random) * 10
                  : at::randint(-8, 9, {kTableElements}, random);
      table = table.to(dtype);
    }
    return table;
  }
  // Returns a rank's input: a copy, because the operation may write it.
  at::Tensor given(int rank, const Turn& turn, int64_t count) {
    return table(rank, turn.dtype).narrow(0, turn.offset, count).clone();
  }

  at::Tensor reduced(const Turn& turn, int64_t count) {
    const bool half = turn.dtype == at::kBFloat16;
    auto rows = [&](int rank) {
      const auto row = table(rank, turn.dtype).narrow(0, turn.offset, count);
      return half ? row.to(at::kFloat) : row.clone();
    };
    auto result = rows(0);
    for (int rank = 1; rank < size_; ++rank) {
      if (turn.max) {
        result = at::maximum(result, rows(rank));
      } else {
        result += rows(rank);
      }
    }
    return result.to(turn.dtype);
  }

  static void finish(const WorkPtr& work) {
    if (work) work->wait();
  }

  void expect_bits(int number, const Turn& turn, const at::Tensor& got,
                   const at::Tensor& wanted) {
    if (got.nbytes() == wanted.nbytes() &&
        std::memcmp(got.const_data_ptr(), wanted.const_data_ptr(),
                    got.nbytes()) == 0) {
      return;
    }
    throw std::runtime_error(
        "turn " + std::to_string(number) + " of seed " +
        std::to_string(storm_.seed) + " is wrong on rank " +
        std::to_string(rank_) + ": " + kKinds[turn.kind] +
        (turn.max ? " MAX, " : ", ") + c10::toString(turn.dtype) + ", " +
        std::to_string(turn.count) + " elements, root " +
        std::to_string(turn.root));
  }

  void take(int number, const Turn& turn) {
    const ReduceOp op = turn.max ? ReduceOp::MAX : ReduceOp::SUM;
    // For operations with one row per rank.
    const int64_t row = turn.count / size_ + 1;
    switch (turn.kind) {
      case 0: {
        auto data = given(rank_, turn, turn.count);
        auto work = all_reduce(data, {.op = op, .async_op = turn.async_op});
        if (turn.async_op) delay();
        finish(work);
        return expect_bits(number, turn, data, reduced(turn, turn.count));
      }
      case 1: {
        auto data = given(rank_, turn, turn.count);
        finish(reduce(data, turn.root, {.op = op, .async_op = turn.async_op}));
        if (rank_ != turn.root) return;
        return expect_bits(number, turn, data, reduced(turn, turn.count));
      }
      case 2: {
        auto data = given(rank_, turn, turn.count);
        finish(broadcast(data, turn.root, {.async_op = turn.async_op}));
        return expect_bits(number, turn, data,
                           given(turn.root, turn, turn.count));
      }
      case 3: {
        auto all = at::empty({row * size_}, turn.dtype);
        finish(all_gather_into_tensor(all, given(rank_, turn, row),
                                      {.async_op = turn.async_op}));
        std::vector<at::Tensor> rows;
        for (int from = 0; from < size_; ++from) {
          rows.push_back(given(from, turn, row));
        }
        return expect_bits(number, turn, all, at::cat(rows));
      }
      case 4: {
        auto own = at::empty({row}, turn.dtype);
        finish(reduce_scatter_tensor(own, given(rank_, turn, row * size_),
                                     {.op = op, .async_op = turn.async_op}));
        return expect_bits(
            number, turn, own,
            reduced(turn, row * size_).narrow(0, rank_ * row, row));
      }
      case 5: {
        auto all = at::empty({row * size_}, turn.dtype);
        all_to_all_single(all, given(rank_, turn, row * size_));
        std::vector<at::Tensor> rows;
        for (int from = 0; from < size_; ++from) {
          rows.push_back(
              given(from, turn, row * size_).narrow(0, rank_ * row, row));
        }
        return expect_bits(number, turn, all, at::cat(rows));
      }
      case 6: {
        const int from = (rank_ + size_ - 1) % size_;
        auto got = at::empty({turn.count}, turn.dtype);
        const auto mine = given(rank_, turn, turn.count);
        auto sent = isend(mine, (rank_ + 1) % size_);
        recv(got, from);
        finish(sent);
        return expect_bits(number, turn, got, given(from, turn, turn.count));
      }
      default:
        barrier();
    }
  }

  const Storm storm_;
  const int rank_ = get_rank();
  const int size_ = get_world_size();
  std::mt19937 plan_;
  std::mt19937 own_;
  std::map<std::pair<int, at::ScalarType>, at::Tensor> tables_;
};

}  // namespace

void run_storm(const Storm& storm) { Runner(storm).run(); }

}  // namespace lockstep::internal::testing
