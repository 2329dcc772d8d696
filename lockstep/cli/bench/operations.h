#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

// The operations that `lockstep bench` can measure. Sizes and bandwidths are
// defined as in NCCL's tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md; for gather
// and scatter, which that page leaves out, src/gather.cu and src/scatter.cu).
namespace lockstep::internal::bench {

enum class Volume {
  none,   // moves no data
  whole,  // S is the tensor of one rank
  parts,  // S is all ranks' equal parts together
};

// algbw = S / t; busbw = algbw times this.
enum class BusFactor {
  one,                  // 1
  one_direction,        // (n - 1) / n
  there_and_back_again  // 2 (n - 1) / n
};

struct Operation {
  std::string_view name;
  Volume volume;
  BusFactor bus_factor;
  bool reduces;
};

inline constexpr std::array kOperations{
    Operation{"all_reduce", Volume::whole, BusFactor::there_and_back_again,
              true},
    Operation{"all_gather", Volume::parts, BusFactor::one_direction, false},
    Operation{"reduce_scatter", Volume::parts, BusFactor::one_direction, true},
    Operation{"all_to_all", Volume::parts, BusFactor::one_direction, false},
    Operation{"broadcast", Volume::whole, BusFactor::one, false},
    Operation{"reduce", Volume::whole, BusFactor::one, true},
    Operation{"gather", Volume::parts, BusFactor::one_direction, false},
    Operation{"scatter", Volume::parts, BusFactor::one_direction, false},
    Operation{"send_recv", Volume::whole, BusFactor::one, false},
    Operation{"barrier", Volume::none, BusFactor::one, false},
};

struct DType {
  std::string_view name;
  int64_t bytes;
  bool is_floating_point;
};

inline constexpr std::array kDTypes{
    DType{"float32", 4, true}, DType{"float64", 8, true},
    DType{"float16", 2, true}, DType{"bfloat16", 2, true},
    DType{"int8", 1, false},   DType{"uint8", 1, false},
    DType{"int16", 2, false},  DType{"int32", 4, false},
    DType{"int64", 8, false},
};

// Both throw std::invalid_argument that lists the allowed names.
const Operation& find_operation(std::string_view name);
const DType& find_dtype(std::string_view name);
// Throws std::invalid_argument if `reduce_op` is not one of "sum", "avg", ...,
// or is not for `dtype`.
void check_reduce_op(std::string_view reduce_op, const DType& dtype);

double bus_factor(const Operation& operation, int ranks);

// Returns how many elements of S fit into `bytes`, for parts an equal number
// for each rank; at least one (for parts, one for each rank); 0 for an
// operation without data.
int64_t element_count(const Operation& operation, const DType& dtype,
                      int64_t bytes, int ranks);

}  // namespace lockstep::internal::bench
