#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lockstep/kernels/convert.h"
#include "lockstep/kernels/scalar_elements.h"

namespace lockstep::kernels {
namespace {

template <typename To, typename From>
To value_as(From value) {
  if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    using Limits = std::numeric_limits<To>;
    // One past the greatest is a power of two, which any From holds.
    constexpr From kEnd = static_cast<From>(Limits::max() / 2 + 1) * 2;
    if (std::isnan(value)) {
      return 0;
    }
    if (value >= kEnd) {
      return Limits::max();
    }
    if (value <= static_cast<From>(Limits::min())) {
      return Limits::min();
    }
  }
  return static_cast<To>(value);
}

template <typename To, typename From>
void convert_elements(typename To::Stored* destination,
                      const typename From::Stored* source, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    destination[i] =
        To::store(value_as<typename To::Value>(From::load(source[i])));
  }
}

}  // namespace

void convert_scalar(void* destination, DType to, const void* source, DType from,
                    size_t count) {
  if (to == from) {
    if (count > 0) {
      std::memcpy(destination, source, count * size_of(to));
    }
    return;
  }
  with_element(from, [&](auto from_element) {
    using From = decltype(from_element);
    const auto* in = static_cast<const typename From::Stored*>(source);
    if (to == DType::boolean) {
      for (size_t i = 0; i < count; ++i) {
        static_cast<uint8_t*>(destination)[i] = From::load(in[i]) != 0;
      }
      return;
    }
    with_element(to, [&](auto to_element) {
      using To = decltype(to_element);
      convert_elements<To, From>(static_cast<typename To::Stored*>(destination),
                                 in, count);
    });
  });
}

void convert_scaled_scalar(void* destination, DType to, const void* source,
                           DType from, size_t count, double factor) {
  with_element(from, [&](auto from_element) {
    with_element(to, [&](auto to_element) {
      using From = decltype(from_element);
      using To = decltype(to_element);
      if constexpr (std::is_floating_point_v<typename From::Value> &&
                    std::is_floating_point_v<typename To::Value>) {
        // The wider of both: double if either is.
        using Wide = decltype(typename From::Value() + typename To::Value());
        const auto* in = static_cast<const typename From::Stored*>(source);
        auto* out = static_cast<typename To::Stored*>(destination);
        for (size_t i = 0; i < count; ++i) {
          const Wide product =
              Wide{From::load(in[i])} * static_cast<Wide>(factor);
          out[i] = To::store(static_cast<typename To::Value>(product));
        }
      }
    });
  });
}

}  // namespace lockstep::kernels
