#include "tests/comm/contract/tensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <complex>
#include <limits>
#include <type_traits>

namespace lockstep::internal::testing {
namespace {

constexpr int64_t kMoreThanOneMiB = (int64_t{1} << 20) + 64;

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
// generators, 2014): the same bits on every rank and machine.
uint64_t hash(uint64_t seed, uint64_t index) {
  uint64_t z = (seed + 1) * 0x9e3779b97f4a7c15 + index * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

bool is_real(at::ScalarType dtype) { return c10::isFloatingType(dtype); }
bool is_complex(at::ScalarType dtype) { return c10::isComplexType(dtype); }

// Returns an integer in [-range, range].
double small_integer(uint64_t bits, int64_t range) {
  return static_cast<double>(static_cast<int64_t>(bits % (2 * range + 1)) -
                             range);
}

double exact_real(ReduceOpType op, uint64_t bits) {
  switch (op) {
    case ReduceOpType::PRODUCT: {
      constexpr double powers[] = {0.5, 1, 2, -0.5, -1, -2};
      return powers[bits % 6];
    }
    case ReduceOpType::MIN:
    case ReduceOpType::MAX:
      return small_integer(bits, 100) / 8;
    default:
      return small_integer(bits, 16);
  }
}

uint64_t combine_integers(ReduceOpType op, uint64_t a, uint64_t b) {
  auto less = [](uint64_t x, uint64_t y) {
    return static_cast<int64_t>(x) < static_cast<int64_t>(y);
  };
  switch (op) {
    case ReduceOpType::SUM:
      return a + b;
    case ReduceOpType::PRODUCT:
      return a * b;
    case ReduceOpType::MIN:
      return less(b, a) ? b : a;
    case ReduceOpType::MAX:
      return less(a, b) ? b : a;
    case ReduceOpType::BAND:
      return a & b;
    case ReduceOpType::BOR:
      return a | b;
    case ReduceOpType::BXOR:
      return a ^ b;
    default:
      throw std::invalid_argument("no such reduction of integers");
  }
}

template <typename T>
T combine_numbers(ReduceOpType op, T a, T b) {
  if (op == ReduceOpType::SUM || op == ReduceOpType::AVG) return a + b;
  if constexpr (std::is_same_v<T, double>) {
    if (op == ReduceOpType::PRODUCT) return a * b;
    if (op == ReduceOpType::MIN) return std::min(a, b);
    if (op == ReduceOpType::MAX) return std::max(a, b);
  }
  throw std::invalid_argument("no such reduction");
}

// Both tensors must be dense, with elements of type `T`.
template <typename T, typename Combine>
void accumulate(const at::Tensor& into, const at::Tensor& next,
                Combine&& combine) {
  T* a = into.mutable_data_ptr<T>();
  const T* b = next.const_data_ptr<T>();
  for (int64_t i = 0; i < into.numel(); ++i) a[i] = combine(a[i], b[i]);
}

at::ScalarType wide(at::ScalarType dtype) {
  if (is_complex(dtype)) return at::kComplexDouble;
  return is_real(dtype) ? at::kDouble : at::kLong;
}

// Returns a tensor of the values value(index), computed as `T` and converted to
// `dtype`.
template <typename T, typename Value>
at::Tensor filled(at::ScalarType dtype, const Shape& shape, Value&& value) {
  auto result = at::empty(shape, c10::CppTypeToScalarType<T>::value);
  T* data = result.template mutable_data_ptr<T>();
  for (int64_t i = 0; i < result.numel(); ++i) data[i] = value(i);
  return result.to(dtype);
}

Shape strides_of(const Shape& shape, int64_t row_padding) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
    if (i + 1 == shape.size()) stride += row_padding;
  }
  return strides;
}

// Returns a copy on the CPU of all elements in order, as bytes.
at::Tensor bytes(const at::Tensor& tensor) {
  auto plain = tensor.detach().resolve_conj().resolve_neg().cpu();
  return plain.flatten().clone(at::MemoryFormat::Contiguous).view(at::kByte);
}

}  // namespace

const std::vector<at::ScalarType>& moved_dtypes() {
  static const std::vector<at::ScalarType> all{
      at::kFloat,      at::kDouble, at::kHalf,         at::kBFloat16,
      at::kChar,       at::kByte,   at::kShort,        at::kInt,
      at::kLong,       at::kBool,   at::kComplexFloat, at::kComplexDouble,
      at::kUInt16,     at::kUInt32, at::kUInt64,       at::kFloat8_e4m3fn,
      at::kFloat8_e5m2};
  return all;
}

const std::vector<ReduceOpType>& reduce_ops() {
  static const std::vector<ReduceOpType> all{
      ReduceOpType::SUM, ReduceOpType::AVG, ReduceOpType::PRODUCT,
      ReduceOpType::MIN, ReduceOpType::MAX, ReduceOpType::BAND,
      ReduceOpType::BOR, ReduceOpType::BXOR};
  return all;
}

std::vector<ReduceOpType> reduce_ops_for(int world_size) {
  if (world_size <= 3) return reduce_ops();
  return {ReduceOpType::SUM, ReduceOpType::AVG, ReduceOpType::MAX,
          ReduceOpType::BXOR};
}

std::string op_name(ReduceOpType op) {
  static const char* const names[] = {"SUM", "AVG",  "PRODUCT", "MIN",
                                      "MAX", "BAND", "BOR",     "BXOR"};
  return names[static_cast<int>(op)];
}

std::vector<at::ScalarType> reduced_dtypes(ReduceOpType op) {
  std::vector<at::ScalarType> taken;
  for (auto dtype : moved_dtypes()) {
    bool takes = false;
    if (is_complex(dtype)) {
      takes = op == ReduceOpType::SUM || op == ReduceOpType::AVG;
    } else if (dtype == at::kUInt64 || c10::isFloat8Type(dtype)) {
      takes = false;
    } else if (is_real(dtype)) {
      takes = op != ReduceOpType::BAND && op != ReduceOpType::BOR &&
              op != ReduceOpType::BXOR;
    } else if (dtype == at::kBool) {
      takes = op != ReduceOpType::SUM && op != ReduceOpType::AVG;
    } else {
      takes = op != ReduceOpType::AVG;
    }
    if (takes) taken.push_back(dtype);
  }
  return taken;
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{Layout::contiguous, Layout::offset,
                                       Layout::transposed, Layout::strided,
                                       Layout::padded_rows};
  return all;
}

Placed::Placed(const at::Tensor& values, Layout layout, at::Device device) {
  Shape shape = values.sizes().vec();
  Shape strides = strides_of(shape, layout == Layout::padded_rows ? 2 : 0);
  int64_t offset = layout == Layout::contiguous ? 0 : 1;
  if (layout == Layout::transposed) {
    Shape reversed(shape.rbegin(), shape.rend());
    strides = strides_of(reversed, 0);
    std::reverse(strides.begin(), strides.end());
  }
  if (layout == Layout::strided) {
    for (auto& stride : strides) stride *= 2;
    offset = 3;
  }
  int64_t elements = offset + (layout == Layout::contiguous ? 1 : 2);
  for (size_t i = 0; i < shape.size(); ++i) {
    elements += std::max<int64_t>(shape[i] - 1, 0) * strides[i];
  }
  auto dtype = values.scalar_type();
  auto size = static_cast<int64_t>(c10::elementSize(dtype));
  surroundings_ = at::full({elements * size}, dtype == at::kBool ? 1 : 0x5a,
                           at::TensorOptions(at::kByte).device(device))
                      .view(dtype);
  view = surroundings_.as_strided(shape, strides, offset);
  view.copy_(values);
}

Placed Placed::empty_like(const at::Tensor& values, Layout layout,
                          at::Device device) {
  auto filler =
      at::full({values.numel() * static_cast<int64_t>(values.element_size())},
               values.scalar_type() == at::kBool ? 0 : 0x2b, at::kByte)
          .view(values.scalar_type())
          .reshape(values.sizes());
  return {filler, layout, device};
}

bool Placed::surroundings_intact() const {
  auto now = bytes(surroundings_);
  auto dtype = view.scalar_type();
  auto fresh = at::full_like(now, dtype == at::kBool ? 1 : 0x5a);
  auto cut = [&](const at::Tensor& all) {
    return all.view(dtype).as_strided(view.sizes(), view.strides(),
                                      view.storage_offset());
  };
  cut(now).copy_(cut(fresh));
  return now.equal(fresh);
}

at::Tensor some_content(at::ScalarType dtype, const Shape& shape,
                        int64_t seed) {
  auto size = static_cast<int64_t>(c10::elementSize(dtype));
  auto result = at::empty({c10::multiply_integers(shape) * size}, at::kByte);
  auto* data = result.mutable_data_ptr<uint8_t>();
  const uint8_t mask = dtype == at::kBool ? 1 : 0xff;
  for (int64_t i = 0; i < result.numel(); ++i) {
    data[i] = static_cast<uint8_t>(hash(seed, i) >> 24) & mask;
  }
  return result.view(dtype).reshape(shape);
}

at::Tensor exact_numbers(ReduceOpType op, at::ScalarType dtype,
                         const Shape& shape, int rank) {
  if (is_complex(dtype)) {
    return filled<c10::complex<double>>(dtype, shape, [&](int64_t i) {
      uint64_t bits = hash(rank, i);
      return c10::complex<double>(exact_real(op, bits),
                                  exact_real(op, bits >> 32));
    });
  }
  if (is_real(dtype)) {
    return filled<double>(
        dtype, shape, [&](int64_t i) { return exact_real(op, hash(rank, i)); });
  }
  const uint64_t mask = dtype == at::kBool ? 1 : ~uint64_t{0};
  return filled<int64_t>(dtype, shape, [&](int64_t i) {
    return static_cast<int64_t>(hash(rank, i) & mask);
  });
}

at::Tensor real_numbers(at::ScalarType dtype, const Shape& shape, int rank) {
  auto real = [&](uint64_t seed, int64_t i) {
    return static_cast<double>(hash(seed, i) >> 11) * 0x1p-52 - 1;
  };
  if (is_complex(dtype)) {
    return filled<c10::complex<double>>(dtype, shape, [&](int64_t i) {
      return c10::complex<double>(real(rank, i), real(1000 + rank, i));
    });
  }
  return filled<double>(dtype, shape, [&](int64_t i) { return real(rank, i); });
}

at::Tensor reduce_in_rank_order(ReduceOpType op,
                                const std::vector<at::Tensor>& inputs) {
  auto dtype = inputs.at(0).scalar_type();
  auto result =
      inputs[0].cpu().to(wide(dtype)).clone(at::MemoryFormat::Contiguous);
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    auto next = inputs[rank].cpu().to(wide(dtype)).contiguous();
    if (is_complex(dtype)) {
      accumulate<c10::complex<double>>(result, next, [&](auto a, auto b) {
        return combine_numbers(op, a, b);
      });
    } else if (is_real(dtype)) {
      accumulate<double>(result, next, [&](auto a, auto b) {
        return combine_numbers(op, a, b);
      });
    } else {
      // bool: PRODUCT, MIN and BAND are "and"; MAX and BOR are "or".
      accumulate<int64_t>(result, next, [&](int64_t a, int64_t b) {
        return static_cast<int64_t>(combine_integers(
            op, static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
      });
    }
  }
  if (op == ReduceOpType::AVG) result /= static_cast<double>(inputs.size());
  return result.to(dtype);
}

at::Tensor reduced_exact_numbers(ReduceOpType op, at::ScalarType dtype,
                                 const Shape& shape, int size) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < size; ++rank) {
    inputs.push_back(exact_numbers(op, dtype, shape, rank));
  }
  return reduce_in_rank_order(op, inputs);
}

at::Tensor accumulation_bound(ReduceOpType op,
                              const std::vector<at::Tensor>& inputs) {
  auto dtype = inputs.at(0).scalar_type();
  auto value_type = c10::toRealValueType(dtype);
  auto sum = at::zeros(inputs[0].sizes(), at::kDouble);
  for (const auto& input : inputs) {
    sum += input.cpu().to(wide(dtype)).abs();
  }
  double eps = 0;
  switch (value_type) {
    case at::kDouble:
      eps = std::numeric_limits<double>::epsilon();
      break;
    case at::kFloat:
      eps = std::numeric_limits<float>::epsilon();
      break;
    case at::kHalf:
      eps = 0x1p-10;
      break;
    case at::kBFloat16:
      eps = 0x1p-7;
      break;
    default:
      return at::zeros_like(sum);
  }
  auto n = static_cast<double>(inputs.size());
  return sum * (n * eps / (op == ReduceOpType::AVG ? n : 1));
}

bool exact(ReduceOpType op, at::ScalarType dtype, int size) {
  if (!is_real(dtype) && !is_complex(dtype)) return true;
  return op != ReduceOpType::AVG || (size & (size - 1)) == 0;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         bytes(a).equal(bytes(b));
}

bool within(const at::Tensor& have, const at::Tensor& want,
            const at::Tensor& bound) {
  if (have.scalar_type() != want.scalar_type() ||
      have.sizes() != want.sizes()) {
    return false;
  }
  auto type = wide(want.scalar_type());
  auto apart = (have.detach().cpu().to(type) - want.cpu().to(type)).abs();
  return apart.le(bound).all().item<bool>();  // false for NaN
}

bool matches(const at::Tensor& have, ReduceOpType op,
             const std::vector<at::Tensor>& inputs) {
  auto want = reduce_in_rank_order(op, inputs);
  if (exact(op, want.scalar_type(), static_cast<int>(inputs.size()))) {
    return same_bits(have, want);
  }
  return within(have, want, accumulation_bound(op, inputs));
}

std::string GridPoint::describe() const {
  static const char* const names[] = {"contiguous", "offset", "transposed",
                                      "strided", "padded rows"};
  return c10::str(c10::toString(dtype), c10::IntArrayRef(shape), ", ",
                  names[static_cast<int>(layout)],
                  async_op ? ", asynchronous" : ", synchronous");
}

std::vector<GridPoint> grid(int world_size,
                            const std::vector<at::ScalarType>& dtypes,
                            bool large) {
  const bool small_world = world_size <= 3;
  auto chosen = [&](std::vector<at::ScalarType> some) {
    std::erase_if(some, [&](auto dtype) {
      return std::ranges::find(dtypes, dtype) == dtypes.end();
    });
    return some;
  };
  std::vector<GridPoint> points;
  auto add = [&](at::ScalarType dtype, const Shape& shape, Layout layout) {
    // Synchronous and asynchronous alternate, so over the whole grid each
    // dtype, shape and layout meets both.
    points.push_back({dtype, shape, layout, points.size() % 2 == 1});
  };
  std::vector<Shape> shapes{{}, {0}, {1}, {7}, {3, 5}, {2, 0, 3}};
  if (!small_world) shapes = {{0}, {3, 5}};
  for (auto dtype : small_world ? dtypes
                                : chosen({at::kFloat, at::kBFloat16, at::kByte,
                                          at::kLong, at::kComplexFloat})) {
    for (const auto& shape : shapes) add(dtype, shape, Layout::contiguous);
  }
  for (auto layout : layouts()) {
    if (layout == Layout::contiguous) continue;
    auto some = small_world
                    ? chosen({at::kFloat, at::kBFloat16, at::kByte, at::kShort,
                              at::kInt, at::kBool, at::kComplexDouble})
                    : chosen({at::kFloat, at::kByte});
    for (auto dtype : some) {
      add(dtype, {3, 5}, layout);
      if (small_world) add(dtype, {2, 3, 4}, layout);
    }
  }
  if (!large) return points;
  for (auto dtype : small_world
                        ? chosen({at::kFloat, at::kHalf, at::kByte, at::kLong})
                        : chosen({at::kFloat, at::kInt})) {
    auto size = static_cast<int64_t>(c10::elementSize(dtype));
    add(dtype, {kMoreThanOneMiB / size + 1}, Layout::contiguous);
    if (small_world && dtype == at::kFloat) {
      add(dtype, {513, 514}, Layout::transposed);
    }
  }
  return points;
}

}  // namespace lockstep::internal::testing
