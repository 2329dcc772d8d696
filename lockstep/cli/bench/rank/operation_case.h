#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::bench {

// What this rank is asked to time.
struct Request {
  std::string operation{};
  int64_t elements = 0;  // of S, see ../operations.h
  at::ScalarType dtype = at::kFloat;
  ReduceOp::RedOpType reduce_op = ReduceOp::SUM;
  bool async_op = false;
  bool registered = false;  // in memory of empty_shared()
};

// One operation with its tensors. Roots are rank 0; send_recv is between ranks
// 0 and 1, there and back.
class OperationCase {
 public:
  // Throws std::invalid_argument for an operation it does not know.
  OperationCase(const Request& request, int rank, int world_size);

  // Writes values into the input that belong to this rank, and zeros where
  // the result comes.
  void fill();
  void run() { run_(); }
  // Elements of the result that are not what fill() on all ranks and one run()
  // give. `first` then says which is the first.
  int64_t count_wrong(std::string& first) const;
  // Zeros, which no number of repetitions makes overflow.
  void clear();

  // The time of run() times this is the operation's: a round trip is two.
  // 0 on a rank that has no part in it.
  double share() const { return share_; }

 private:
  // `length` elements of the result from `begin` are those of rank `source`'s
  // input from `source_begin`; with source -1, all ranks' reduced.
  struct Segment {
    int64_t begin;
    int64_t length;
    int source;
    int64_t source_begin;
  };

  void set_up();
  using Make = std::function<at::Tensor(int64_t length)>;
  void set_up_send_recv(const Make& make);
  at::Tensor values(int source, int64_t begin, int64_t length) const;
  at::Tensor expected(const Segment& segment, int64_t offset,
                      int64_t length) const;
  std::vector<at::Tensor> parts_of(const at::Tensor& tensor) const;
  void expect_parts(int source_part);

  Request request_;
  int rank_;
  int size_;
  at::Tensor input_;
  at::Tensor output_;  // may be input_
  std::vector<Segment> expected_;
  double share_ = 1;
  std::function<void()> run_;
};

}  // namespace lockstep::bench
