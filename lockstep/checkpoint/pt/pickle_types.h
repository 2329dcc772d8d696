#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <string_view>

namespace lockstep::internal {

// A dtype as pickles name it: by a storage class of module `torch`, or, if the
// dtype has no such class, by its own name.
struct PickledDtype {
  c10::ScalarType dtype;
  std::string_view storage;  // empty if there is no class
  std::string_view name;
};

inline constexpr std::array<PickledDtype, 21> kPickledDtypes{{
    {c10::ScalarType::Float, "FloatStorage", "float32"},
    {c10::ScalarType::Double, "DoubleStorage", "float64"},
    {c10::ScalarType::Half, "HalfStorage", "float16"},
    {c10::ScalarType::BFloat16, "BFloat16Storage", "bfloat16"},
    {c10::ScalarType::Long, "LongStorage", "int64"},
    {c10::ScalarType::Int, "IntStorage", "int32"},
    {c10::ScalarType::Short, "ShortStorage", "int16"},
    {c10::ScalarType::Char, "CharStorage", "int8"},
    {c10::ScalarType::Byte, "ByteStorage", "uint8"},
    {c10::ScalarType::Bool, "BoolStorage", "bool"},
    {c10::ScalarType::ComplexFloat, "ComplexFloatStorage", "complex64"},
    {c10::ScalarType::ComplexDouble, "ComplexDoubleStorage", "complex128"},
    {c10::ScalarType::UInt16, "", "uint16"},
    {c10::ScalarType::UInt32, "", "uint32"},
    {c10::ScalarType::UInt64, "", "uint64"},
    {c10::ScalarType::ComplexHalf, "", "complex32"},
    {c10::ScalarType::Float8_e5m2, "", "float8_e5m2"},
    {c10::ScalarType::Float8_e4m3fn, "", "float8_e4m3fn"},
    {c10::ScalarType::Float8_e5m2fnuz, "", "float8_e5m2fnuz"},
    {c10::ScalarType::Float8_e4m3fnuz, "", "float8_e4m3fnuz"},
    {c10::ScalarType::Float8_e8m0fnu, "", "float8_e8m0fnu"},
}};

}  // namespace lockstep::internal
