#include "lockstep/comm/mpi/datatypes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "lockstep/base/environment.h"
#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::internal::mpi {
namespace {

// The type in which two elements of type T are combined: float32 for half
// types, int for bytes, so that they wrap.
template <typename T>
using Wide = std::conditional_t<std::is_integral_v<T>, int, float>;

struct Sum {
  template <typename W>
  static W combine(W a, W b) {
    return a + b;
  }
};
struct Product {
  template <typename W>
  static W combine(W a, W b) {
    return a * b;
  }
};
// NaN wins, as in shared memory: which of the two is `a` depends on MPI.
template <typename W>
bool is_nan(W value) {
  if constexpr (std::is_floating_point_v<W>) return std::isnan(value);
  return false;
}
struct Min {
  template <typename W>
  static W combine(W a, W b) {
    return b < a || is_nan(b) ? b : a;
  }
};
struct Max {
  template <typename W>
  static W combine(W a, W b) {
    return a < b || is_nan(b) ? b : a;
  }
};

// Has the signature of MPI_User_function.
template <typename T, typename Operation>
void combine(void* in, void* in_out, int* count, MPI_Datatype*) {
  const auto* a = static_cast<const T*>(in);
  auto* b = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) {
    b[i] = static_cast<T>(Operation::combine(static_cast<Wide<T>>(a[i]),
                                             static_cast<Wide<T>>(b[i])));
  }
}

MPI_Op make_op(MPI_User_function* function) {
  MPI_Op op = MPI_OP_NULL;
  check(MPI_Op_create(function, /*commute=*/1, &op), "MPI_Op_create");
  return op;
}

// This type, and the operations of own_reduction(), live as long as MPI does.
MPI_Datatype two_bytes() {
  static const MPI_Datatype type = [] {
    MPI_Datatype made = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(2, MPI_BYTE, &made), "MPI_Type_contiguous");
    check(MPI_Type_commit(&made), "MPI_Type_commit");
    return made;
  }();
  return type;
}

template <typename T>
Reduction own_reduction(MPI_Datatype type, c10d::ReduceOp::RedOpType op) {
  static const MPI_Op sum = make_op(combine<T, Sum>);
  static const MPI_Op product = make_op(combine<T, Product>);
  static const MPI_Op least = make_op(combine<T, Min>);
  static const MPI_Op most = make_op(combine<T, Max>);
  switch (op) {
    case c10d::ReduceOp::PRODUCT:
      return {type, product};
    case c10d::ReduceOp::MIN:
      return {type, least};
    case c10d::ReduceOp::MAX:
      return {type, most};
    default:
      return {type, sum};
  }
}

MPI_Datatype native_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kByte:
    case at::kBool:
      return MPI_UINT8_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    default:
      throw std::invalid_argument(c10::str(
          "MPI does not reduce tensors of ", dtype,
          "; allowed are Float, Double, Half, BFloat16, Bool and integers"));
  }
}

MPI_Op native_op(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      return MPI_SUM;
    case c10d::ReduceOp::PRODUCT:
      return MPI_PROD;
    case c10d::ReduceOp::MIN:
      return MPI_MIN;
    case c10d::ReduceOp::MAX:
      return MPI_MAX;
    case c10d::ReduceOp::BAND:
      return MPI_BAND;
    case c10d::ReduceOp::BOR:
      return MPI_BOR;
    case c10d::ReduceOp::BXOR:
      return MPI_BXOR;
    default:
      throw std::invalid_argument(
          "MPI does not have this reduce operation; allowed are SUM, AVG, "
          "PRODUCT, MIN, MAX, BAND, BOR, BXOR");
  }
}

// Makes one type of any size: `parts` runs of max_count() bytes, and a rest.
MPI_Datatype large_type(int64_t parts, int64_t rest) {
  const auto part = static_cast<int>(max_count());
  const std::array<int, 2> counts{static_cast<int>(parts),
                                  static_cast<int>(rest)};
  const std::array<MPI_Aint, 2> offsets{
      0, static_cast<MPI_Aint>(parts * max_count())};
  MPI_Datatype run = MPI_DATATYPE_NULL;
  MPI_Datatype made = MPI_DATATYPE_NULL;
  check(MPI_Type_contiguous(part, MPI_BYTE, &run), "MPI_Type_contiguous");
  const std::array<MPI_Datatype, 2> types{run, MPI_BYTE};
  const int code = MPI_Type_create_struct(2, counts.data(), offsets.data(),
                                          types.data(), &made);
  MPI_Type_free(&run);
  check(code, "MPI_Type_create_struct");
  check(MPI_Type_commit(&made), "MPI_Type_commit");
  return made;
}

}  // namespace

int64_t max_count() {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  static const int64_t count =
      get_env_int("LOCKSTEP_MPI_MAX_COUNT", 1, kMost).value_or(kMost);
  return count;
}

Reduction reduction(at::ScalarType dtype, const c10d::ReduceOp& op) {
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  const auto native = native_op(type);
  const auto guard = calls_guard();
  switch (dtype) {
    case at::kByte:
      // OpenMPI 4.1 adds bytes with saturation if the processor has AVX.
      if (native == MPI_SUM) return own_reduction<uint8_t>(MPI_UINT8_T, type);
      break;
    case at::kChar:
      if (native == MPI_SUM) return own_reduction<int8_t>(MPI_INT8_T, type);
      break;
    case at::kHalf:
    case at::kBFloat16:
      if (native == MPI_BAND || native == MPI_BOR || native == MPI_BXOR) {
        throw std::invalid_argument("bitwise operations are for integers");
      }
      return dtype == at::kHalf
                 ? own_reduction<c10::Half>(two_bytes(), type)
                 : own_reduction<c10::BFloat16>(two_bytes(), type);
    default:
      break;
  }
  return {native_type(dtype), native};
}

Bytes::Bytes(size_t bytes, int ranks)
    : count_(static_cast<int>(bytes)), type_(MPI_BYTE) {
  const auto size = static_cast<int64_t>(bytes);
  if (size <= max_count() / ranks) return;
  const auto guard = calls_guard();
  count_ = 1;
  type_ = large_type(size / max_count(), size % max_count());
  owned_ = true;
}

Bytes::Bytes(Bytes&& other) noexcept
    : count_(other.count_), type_(other.type_), owned_(other.owned_) {
  other.owned_ = false;
}

Bytes::~Bytes() {
  if (!owned_) return;
  const auto guard = calls_guard();
  MPI_Type_free(&type_);
}

}  // namespace lockstep::internal::mpi
