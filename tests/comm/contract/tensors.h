#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/collective_options.h"

// What the contract suite puts into operations, and the plain scalar reference
// that it holds their results against. Everything is made by formula from
// ranks and numbers, so that each rank knows what its peers gave.
namespace lockstep::testing {

using ReduceOpType = ReduceOp::RedOpType;
using Shape = std::vector<int64_t>;

// Every dtype that data movement takes, and those that `op` reduces.
const std::vector<at::ScalarType>& moved_dtypes();
std::vector<at::ScalarType> reduced_dtypes(ReduceOpType op);
const std::vector<ReduceOpType>& reduce_ops();
// All of them in worlds of up to 3 ranks, some in larger ones.
std::vector<ReduceOpType> reduce_ops_for(int world_size);
std::string op_name(ReduceOpType op);

// How a tensor lies in memory. All but `contiguous` have a pointer that is not
// aligned to 16 bytes, elements around them that are not theirs, or strides
// that are not those of their shape.
enum class Layout { contiguous, offset, transposed, strided, padded_rows };
const std::vector<Layout>& layouts();

// `view` has the values given and the layout asked for, within memory that is
// full of something else.
class Placed {
 public:
  Placed(const at::Tensor& values, Layout layout, at::Device device);
  // Memory for a result, filled with what no test expects.
  static Placed empty_like(const at::Tensor& values, Layout layout,
                           at::Device device);

  // False if anything around `view` was written.
  bool surroundings_intact() const;

  at::Tensor view;

 private:
  at::Tensor surroundings_;  // all of the storage, one dimension
};

// Any bytes (for bool: zeros and ones), different for every `seed` (a rank, or
// a rank and a part).
at::Tensor some_content(at::ScalarType dtype, const Shape& shape, int64_t seed);

// Numbers of rank `rank` to reduce by `op`. In floating point and complex
// dtypes they are small integers (SUM, AVG), signed powers of two (PRODUCT) or
// short fractions (MIN, MAX), so that the reduction over 8 ranks is exact in
// any order and dtype (for AVG: where the number of ranks is a power of two).
// Integers use all of their range: sums and products wrap.
at::Tensor exact_numbers(ReduceOpType op, at::ScalarType dtype,
                         const Shape& shape, int rank);

// Reals in (-1, 1), of which each partial sum is rounded.
at::Tensor real_numbers(at::ScalarType dtype, const Shape& shape, int rank);

// The scalar reference: element by element, rank by rank in their order, in
// double, complex double or 64-bit integers, converted to the dtype at the
// end.
at::Tensor reduce_in_rank_order(ReduceOpType op,
                                const std::vector<at::Tensor>& inputs);

// Of exact_numbers() of ranks 0 to size - 1.
at::Tensor reduced_exact_numbers(ReduceOpType op, at::ScalarType dtype,
                                 const Shape& shape, int size);

// Whether AVG over so many ranks is exact, see exact_numbers().
bool exact(ReduceOpType op, at::ScalarType dtype, int size);

// How far a sum or average of `inputs`, accumulated in their own precision in
// any order, may be from the exact one, for each element: one rounding for
// each of n additions or divisions, each at most eps * sum|x|. In double.
at::Tensor accumulation_bound(ReduceOpType op,
                              const std::vector<at::Tensor>& inputs);

// Of equal shape, dtype and content bit for bit; any strides and devices.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

// Of equal shape and dtype, and nowhere further apart than `bound`.
bool within(const at::Tensor& have, const at::Tensor& want,
            const at::Tensor& bound);

// Same bits where the reduction is exact, else within its bound. `inputs` are
// what the ranks gave.
bool matches(const at::Tensor& have, ReduceOpType op,
             const std::vector<at::Tensor>& inputs);

// One combination for an operation to be tried with.
struct GridPoint {
  at::ScalarType dtype;
  Shape shape;
  Layout layout;
  bool async_op;

  std::string describe() const;
};

// Worlds of up to 3 ranks: every dtype of `dtypes` with every small shape (0
// dimensions, 0, 1, odd sizes), every layout for some dtypes, with `large` more
// than 1 MiB, each synchronous or asynchronous in turn. Larger worlds: fewer of
// each.
std::vector<GridPoint> grid(int world_size,
                            const std::vector<at::ScalarType>& dtypes,
                            bool large = true);

}  // namespace lockstep::testing
