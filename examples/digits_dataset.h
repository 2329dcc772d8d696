#pragma once

#include <filesystem>

#include "lockstep/data/tensor_dataset.h"

namespace examples {

// The handwritten digits of datasets/digits (see its README.md), in two parts
// that share no row. `data`: float32 [N, 1, 8, 8], ink in [0, 1]. `target`:
// int64 [N], the digit, 0 to 9.
struct Digits {
  lockstep::TensorDataset train;  // 1,438 rows
  lockstep::TensorDataset test;   // 359 rows: the 5th, 10th, ... of the file
};

// Reads `file`: 1,797 lines of 64 integers in [0, 16] and the digit, separated
// by commas. Throws std::runtime_error with file, line and what was expected,
// if the file is missing, cut off, or another one.
Digits read_digits(const std::filesystem::path& file);

}  // namespace examples
