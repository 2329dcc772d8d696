#include "examples/digits_dataset.h"

#include <ATen/Functions.h>

#include <array>
#include <charconv>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace examples {
namespace {

constexpr int64_t kRows = 1797;
constexpr int kPixels = 64;
constexpr int kMostInk = 16;
constexpr int64_t kTestEvery = 5;

using Row = std::array<int, kPixels + 1>;

// Returns whether `line` is 64 pixels and a digit, and nothing else.
bool parse_row(std::string_view line, Row& row) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  const char* at = line.data();
  const char* end = at + line.size();
  for (size_t i = 0; i < row.size(); ++i) {
    if (i > 0) {
      if (at == end || *at != ',') return false;
      ++at;
    }
    auto [next, error] = std::from_chars(at, end, row[i]);
    int highest = i < kPixels ? kMostInk : 9;
    if (error != std::errc() || row[i] < 0 || row[i] > highest) return false;
    at = next;
  }
  return at == end;
}

// Gathers the rows of one part as plain numbers, before they become tensors.
struct Part {
  std::vector<float> pixels;
  std::vector<int64_t> digits;

  void add(const Row& row) {
    for (int i = 0; i < kPixels; ++i) {
      pixels.push_back(static_cast<float>(row[i]) / kMostInk);
    }
    digits.push_back(row[kPixels]);
  }

  lockstep::TensorDataset dataset() {
    auto rows = static_cast<int64_t>(digits.size());
    return {at::from_blob(pixels.data(), {rows, 1, 8, 8}, at::kFloat).clone(),
            at::from_blob(digits.data(), {rows}, at::kLong).clone()};
  }
};

}  // namespace

Digits read_digits(const std::filesystem::path& file) {
  std::ifstream input(file);
  if (!input) {
    throw std::runtime_error(
        file.string() +
        ": cannot be read; give datasets/digits/digits.csv of the repository");
  }
  Part train;
  Part test;
  Row row{};
  int64_t count = 0;
  for (std::string line; std::getline(input, line); ++count) {
    if (count == kRows || !parse_row(line, row)) {
      throw std::runtime_error(
          file.string() + ": line " + std::to_string(count + 1) +
          (count == kRows ? " is one too many; the digits have 1797 lines"
                          : " is not 64 integers in [0, 16] and a digit, "
                            "separated by commas") +
          "; is this datasets/digits/digits.csv?");
    }
    (count % kTestEvery == kTestEvery - 1 ? test : train).add(row);
  }
  if (count != kRows) {
    throw std::runtime_error(
        file.string() + ": ends after " + std::to_string(count) +
        " of 1797 lines; restore datasets/digits/digits.csv");
  }
  return {train.dataset(), test.dataset()};
}

}  // namespace examples
