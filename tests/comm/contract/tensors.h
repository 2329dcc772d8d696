#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/collective_options.h"

// The inputs of the contract suite, and the plain scalar reference for its
// results. Everything is computed from ranks and numbers, so each rank knows
// the inputs of its peers.
namespace lockstep::internal::testing {

using ReduceOpType = ReduceOp::RedOpType;
using Shape = std::vector<int64_t>;

// Every dtype that data movement takes, and every dtype that `op` reduces.
const std::vector<at::ScalarType>& moved_dtypes();
std::vector<at::ScalarType> reduced_dtypes(ReduceOpType op);
const std::vector<ReduceOpType>& reduce_ops();
// Returns all operations for worlds of up to 3 ranks, some for larger ones.
std::vector<ReduceOpType> reduce_ops_for(int world_size);
std::string op_name(ReduceOpType op);

// How a tensor lies in memory. Every layout but `contiguous` has a pointer that
// is not aligned to 16 bytes, or foreign elements around the tensor's, or
// strides other than those of its shape.
enum class Layout { contiguous, offset, transposed, strided, padded_rows };
const std::vector<Layout>& layouts();

// Places values in the given layout, as `view`, within memory that is full of
// other values.
class Placed {
 public:
  Placed(const at::Tensor& values, Layout layout, at::Device device);
  // Makes room for a result, filled with a value that no test expects.
  static Placed empty_like(const at::Tensor& values, Layout layout,
                           at::Device device);

  // Returns whether nothing around `view` was written.
  bool surroundings_intact() const;

  at::Tensor view;

 private:
  at::Tensor surroundings_;  // all of the storage, one dimension
};

// Returns any bytes (for bool: zeros and ones), different for every `seed` (a
// rank, or a rank and a part).
at::Tensor some_content(at::ScalarType dtype, const Shape& shape, int64_t seed);

// Returns the numbers that rank `rank` reduces by `op`. In floating point and
// complex dtypes they are small integers (SUM, AVG), signed powers of two
// (PRODUCT) or short fractions (MIN, MAX), so that the reduction over 8 ranks
// is exact in any order and dtype (for AVG: if the number of ranks is a power
// of two). Integers use all of their range: sums and products wrap.
at::Tensor exact_numbers(ReduceOpType op, at::ScalarType dtype,
                         const Shape& shape, int rank);

// Returns reals in (-1, 1), whose partial sums are all rounded.
at::Tensor real_numbers(at::ScalarType dtype, const Shape& shape, int rank);

// The scalar reference: reduces element by element in rank order, in double,
// complex double or 64-bit integers, and converts to the dtype at the end.
at::Tensor reduce_in_rank_order(ReduceOpType op,
                                const std::vector<at::Tensor>& inputs);

// Returns exact_numbers() of ranks 0 to size - 1, reduced.
at::Tensor reduced_exact_numbers(ReduceOpType op, at::ScalarType dtype,
                                 const Shape& shape, int size);

// Returns whether the reduction over so many ranks is exact, see
// exact_numbers().
bool exact(ReduceOpType op, at::ScalarType dtype, int size);

// Returns, in double, how far each element of a sum or average of `inputs`,
// accumulated in their own precision in any order, may be from the exact one:
// one rounding for each of n additions or divisions, each at most eps * sum|x|.
at::Tensor accumulation_bound(ReduceOpType op,
                              const std::vector<at::Tensor>& inputs);

// Returns whether shape, dtype and content are equal bit for bit; strides and
// devices may differ.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

// Returns whether shape and dtype are equal, and no elements differ by more
// than `bound`.
bool within(const at::Tensor& have, const at::Tensor& want,
            const at::Tensor& bound);

// Compares bits if the reduction is exact, else expects `have` within the
// bound. `inputs` are the tensors of all ranks.
bool matches(const at::Tensor& have, ReduceOpType op,
             const std::vector<at::Tensor>& inputs);

// One combination to try an operation with.
struct GridPoint {
  at::ScalarType dtype;
  Shape shape;
  Layout layout;
  bool async_op;

  std::string describe() const;
};

// Returns the combinations for a world. Up to 3 ranks: every dtype of `dtypes`
// with every small shape (0 dimensions, 0, 1, odd sizes), every layout for some
// dtypes, with `large` more than 1 MiB, synchronous and asynchronous in turn.
// Larger worlds: fewer of each.
std::vector<GridPoint> grid(int world_size,
                            const std::vector<at::ScalarType>& dtypes,
                            bool large = true);

}  // namespace lockstep::internal::testing
