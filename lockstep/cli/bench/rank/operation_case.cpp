#include "lockstep/cli/bench/rank/operation_case.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include <ATen/Functions.h>

#include "lockstep/comm/empty_shared.h"

namespace lockstep::internal::bench {
namespace {

constexpr int kReduced = -1;
// This many elements are compared at a time, as their wide copies take memory.
constexpr int64_t kChunk = int64_t{1} << 20;

void finish(const WorkPtr& work) {
  if (work) work->wait();
}

at::Tensor combine(ReduceOp::RedOpType op, const at::Tensor& one,
                   const at::Tensor& other) {
  switch (op) {
    case ReduceOp::PRODUCT:
      return one * other;
    case ReduceOp::MIN:
      return at::minimum(one, other);
    case ReduceOp::MAX:
      return at::maximum(one, other);
    case ReduceOp::BAND:
      return at::bitwise_and(one, other);
    case ReduceOp::BOR:
      return at::bitwise_or(one, other);
    case ReduceOp::BXOR:
      return at::bitwise_xor(one, other);
    default:
      return one + other;
  }
}

}  // namespace

OperationCase::OperationCase(const Request& request, int rank, int world_size)
    : request_(request), rank_(rank), size_(world_size) {
  set_up();
}

void OperationCase::set_up() {
  const std::string& name = request_.operation;
  const int64_t all = request_.elements;
  const int64_t part = all / size_;
  const bool is_root = rank_ == 0;
  const CollectiveOptions options{.async_op = request_.async_op};
  const ReductionOptions reduction{.op = request_.reduce_op,
                                   .async_op = request_.async_op};
  const auto make = [this](int64_t length) {
    return request_.registered ? empty_shared({length}, request_.dtype)
                               : at::empty({length}, request_.dtype);
  };
  if (name == "barrier") {
    run_ = [options] { finish(barrier(options)); };
  } else if (name == "all_reduce" || name == "reduce") {
    output_ = input_ = make(all);
    if (name == "all_reduce") {
      run_ = [this, reduction] { finish(all_reduce(input_, reduction)); };
    } else {
      run_ = [this, reduction] { finish(reduce(input_, 0, reduction)); };
    }
    if (name == "all_reduce" || is_root) {
      expected_ = {{0, all, kReduced, 0}};
    }
  } else if (name == "broadcast") {
    output_ = input_ = make(all);
    run_ = [this, options] { finish(broadcast(input_, 0, options)); };
    expected_ = {{0, all, 0, 0}};
  } else if (name == "all_gather") {
    input_ = make(part);
    output_ = make(all);
    run_ = [this, options] {
      finish(all_gather_into_tensor(output_, input_, options));
    };
    expect_parts(0);
  } else if (name == "reduce_scatter") {
    input_ = make(all);
    output_ = make(part);
    run_ = [this, reduction] {
      finish(reduce_scatter_tensor(output_, input_, reduction));
    };
    expected_ = {{0, part, kReduced, rank_ * part}};
  } else if (name == "all_to_all") {
    input_ = make(all);
    output_ = make(all);
    run_ = [this] {
      finish(
          all_to_all_single(output_, input_, {.async_op = request_.async_op}));
    };
    expect_parts(rank_);
  } else if (name == "gather") {
    input_ = make(part);
    if (is_root) {
      output_ = make(all);
      expect_parts(0);
    }
    run_ = [this, options, list = parts_of(output_)] {
      finish(gather(input_, list, 0, options));
    };
  } else if (name == "scatter") {
    if (is_root) input_ = make(all);
    output_ = make(part);
    run_ = [this, options, list = parts_of(input_)] {
      finish(scatter(output_, list, 0, options));
    };
    expected_ = {{0, part, 0, rank_ * part}};
  } else if (name == "send_recv") {
    set_up_send_recv(make);
  } else {
    throw std::invalid_argument("unknown operation \"" + name + "\"");
  }
}

void OperationCase::set_up_send_recv(const Make& make) {
  // Rank 0 times the whole way there and back; no other rank's time counts.
  share_ = rank_ == 0 ? 0.5 : 0;
  if (rank_ > 1) {
    run_ = [] {};
    return;
  }
  input_ = make(request_.elements);
  output_ = make(request_.elements);
  const int peer = 1 - rank_;
  expected_ = {{0, request_.elements, peer, 0}};
  const auto there = [this, peer] {
    if (request_.async_op) return finish(isend(input_, peer));
    send(input_, peer);
  };
  const auto back = [this, peer] {
    if (request_.async_op) return finish(irecv(output_, peer));
    recv(output_, peer);
  };
  if (rank_ == 0) {
    run_ = [there, back] { there(), back(); };
  } else {
    run_ = [there, back] { back(), there(); };
  }
}

// Expects that the result holds a part of each rank's input: its
// `source_part`-th.
void OperationCase::expect_parts(int source_part) {
  const int64_t part = request_.elements / size_;
  for (int source = 0; source < size_; ++source) {
    expected_.push_back({source * part, part, source, source_part * part});
  }
}

std::vector<at::Tensor> OperationCase::parts_of(
    const at::Tensor& tensor) const {
  return tensor.defined() ? tensor.chunk(size_) : std::vector<at::Tensor>();
}

// Returns small integers, so that every dtype sums them exactly in any order.
// They are hashed, so that an element in a wrong place is not right by chance.
// For products they are ones and twos, whose products stay finite.
at::Tensor OperationCase::values(int source, int64_t begin,
                                 int64_t length) const {
  auto hashed = at::arange(begin, begin + length, at::kLong)
                    .add_(int64_t{977} * (source + 1))
                    .mul_(int64_t{2654435761});
  // Without this the low bits would repeat after some power of two.
  hashed.bitwise_xor_(hashed.bitwise_right_shift(32)).bitwise_right_shift_(16);
  return request_.reduce_op == ReduceOp::PRODUCT ? hashed.bitwise_and(1).add_(1)
                                                 : hashed.bitwise_and(3);
}

at::Tensor OperationCase::expected(const Segment& segment, int64_t offset,
                                   int64_t length) const {
  const int64_t begin = segment.source_begin + offset;
  if (segment.source != kReduced) {
    return values(segment.source, begin, length);
  }
  auto result = values(0, begin, length);
  for (int source = 1; source < size_; ++source) {
    result = combine(request_.reduce_op, result, values(source, begin, length));
  }
  return request_.reduce_op == ReduceOp::AVG ? result.to(at::kDouble).div(size_)
                                             : result;
}

void OperationCase::fill() {
  if (output_.defined()) output_.zero_();
  if (!input_.defined()) return;
  for (int64_t begin = 0; begin < input_.numel(); begin += kChunk) {
    const int64_t length = std::min(kChunk, input_.numel() - begin);
    input_.narrow(0, begin, length).copy_(values(rank_, begin, length));
  }
}

void OperationCase::clear() {
  if (input_.defined()) input_.zero_();
  if (output_.defined()) output_.zero_();
}

int64_t OperationCase::count_wrong(std::string& first) const {
  int64_t wrong = 0;
  for (const auto& segment : expected_) {
    for (int64_t offset = 0; offset < segment.length; offset += kChunk) {
      const int64_t length = std::min(kChunk, segment.length - offset);
      const int64_t begin = segment.begin + offset;
      const auto got = output_.narrow(0, begin, length);
      const auto want = expected(segment, offset, length).to(got.dtype());
      // A mean may be divided before it is summed or after, so it is not exact.
      const bool is_mean =
          request_.reduce_op == ReduceOp::AVG && segment.source == kReduced;
      const auto differs = is_mean
                               ? at::isclose(got.to(at::kDouble),
                                             want.to(at::kDouble), 0.02, 0.02)
                                     .logical_not()
                               : got.ne(want);
      const int64_t count = differs.sum().item<int64_t>();
      if (wrong == 0 && count > 0) {
        const int64_t index = differs.to(at::kByte).argmax().item<int64_t>();
        std::ostringstream text;
        text << "element " << begin + index << " is "
             << got[index].item<double>() << ", not "
             << want[index].item<double>();
        first = text.str();
      }
      wrong += count;
    }
  }
  return wrong;
}

}  // namespace lockstep::internal::bench
