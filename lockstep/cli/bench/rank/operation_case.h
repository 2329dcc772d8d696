#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::internal::bench {

// The operation that this rank is asked to time.
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

  // Writes zeros into the output, then values that belong to this rank into the
  // input (which may be the same tensor).
  void fill();
  void run() { run_(); }
  // Returns the number of elements of the result that differ from what fill()
  // on all ranks and one run() give. `first` then describes the first of them.
  int64_t count_wrong(std::string& first) const;
  // Writes zeros, which do not overflow, however often run() is repeated.
  void clear();

  // Returns the factor from the time of run() to that of the operation: 0.5 for
  // a round trip, which is two operations; 0 on a rank that takes no part.
  double share() const { return share_; }

 private:
  // `length` elements of the result, from `begin` on, must be those of rank
  // `source`'s input from `source_begin` on; with source -1, those of all
  // ranks' inputs reduced.
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

}  // namespace lockstep::internal::bench
