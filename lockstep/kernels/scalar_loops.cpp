#include <cmath>
#include <cstdint>
#include <type_traits>

#include "lockstep/kernels/kernels.h"
#include "lockstep/kernels/scalar_elements.h"

namespace lockstep::internal::kernels {
namespace {

template <typename T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::isnan(value);
  } else {
    return false;
  }
}

template <typename T>
bool is_negative(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::signbit(value);
  } else {
    return value < 0;
  }
}

// Integers are computed unsigned, where overflow wraps by definition.
struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a + b;
    } else {
      return static_cast<T>(static_cast<uint64_t>(a) +
                            static_cast<uint64_t>(b));
    }
  }
};

struct Product {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a * b;
    } else {
      return static_cast<T>(static_cast<uint64_t>(a) *
                            static_cast<uint64_t>(b));
    }
  }
};

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    if (is_nan(a) || is_nan(b)) {
      return is_nan(a) ? a : b;
    }
    if (a == b) {
      return is_negative(a) ? a : b;
    }
    return a < b ? a : b;
  }
};

struct Max {
  template <typename T>
  static T apply(T a, T b) {
    if (is_nan(a) || is_nan(b)) {
      return is_nan(a) ? a : b;
    }
    if (a == b) {
      return is_negative(a) ? b : a;
    }
    return a > b ? a : b;
  }
};

struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename Element, typename Op>
void loop(std::span<void* const> destinations,
          std::span<const void* const> sources, size_t count,
          [[maybe_unused]] bool mean) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  for (size_t i = 0; i < count; ++i) {
    Value value = Element::load(static_cast<const Stored*>(sources[0])[i]);
    for (size_t s = 1; s < sources.size(); ++s) {
      value = Op::apply(
          value, Element::load(static_cast<const Stored*>(sources[s])[i]));
    }
    if constexpr (std::is_floating_point_v<Value>) {
      if (mean) {
        value /= static_cast<Value>(sources.size());
      }
    }
    const Stored stored = Element::store(value);
    for (void* destination : destinations) {
      static_cast<Stored*>(destination)[i] = stored;
    }
  }
}

template <typename Element>
void reduce_elements(std::span<void* const> destinations,
                     std::span<const void* const> sources, size_t count,
                     ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return loop<Element, Sum>(destinations, sources, count, false);
    case ReduceOp::avg:
      return loop<Element, Sum>(destinations, sources, count, true);
    case ReduceOp::product:
      return loop<Element, Product>(destinations, sources, count, false);
    case ReduceOp::min:
      return loop<Element, Min>(destinations, sources, count, false);
    case ReduceOp::max:
      return loop<Element, Max>(destinations, sources, count, false);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      break;
  }
  if constexpr (std::is_integral_v<typename Element::Value>) {
    if (op == ReduceOp::band) {
      return loop<Element, And>(destinations, sources, count, false);
    }
    if (op == ReduceOp::bor) {
      return loop<Element, Or>(destinations, sources, count, false);
    }
    return loop<Element, Xor>(destinations, sources, count, false);
  }
}

}  // namespace

void reduce_scalar(std::span<void* const> destinations,
                   std::span<const void* const> sources, size_t count,
                   DType dtype, ReduceOp op) {
  // For booleans, which are bytes of 0 or 1, product and min are "and".
  with_element(dtype, [&](auto element) {
    reduce_elements<decltype(element)>(destinations, sources, count, op);
  });
}

void scale_scalar(void* destination, const void* source, size_t count,
                  DType dtype, double factor) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    using Value = typename Element::Value;
    using Stored = typename Element::Stored;
    for (size_t i = 0; i < count; ++i) {
      const Value value = Element::load(static_cast<const Stored*>(source)[i]);
      static_cast<Stored*>(destination)[i] = Element::store(
          static_cast<Value>(value * static_cast<Value>(factor)));
    }
  });
}

}  // namespace lockstep::internal::kernels
