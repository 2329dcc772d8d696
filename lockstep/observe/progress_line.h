#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::internal {

// The contents of a progress bar.
struct ProgressState {
  std::string description{};
  std::string unit = "it";
  int64_t count = 0;
  std::optional<int64_t> total{};
  double elapsed_seconds = 0;
  double rate = 0;  // units a second; 0 if it is not known yet
  std::string postfix{};
};

// Returns the state as one line in the form of tqdm:
//
//   Epoch 3:  45%|####......| 900/2000 [00:03<00:04, 290it/s, loss=0.3]
//
// The bar fills what is left of `width` columns; a longer line loses its bar
// and is then cut. A width of 0 gives the whole line without the bar. Control
// characters become spaces, so that it stays one line.
std::string progress_line(const ProgressState& state, int width);

// Returns up to four significant digits: "0.1235", "12", "1.235e+06", "nan".
std::string short_number(double value);

// Returns "02:05", or "1:02:05" from an hour on.
std::string clock_text(double seconds);

}  // namespace lockstep::internal
