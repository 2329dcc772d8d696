#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep::internal {

// Returns the CRC-32C of the bytes: the polynomial of Castagnoli, as iSCSI has
// it (RFC 3720, sections 12.1 and B.4).
uint32_t crc32c(std::string_view bytes);

// The events of TensorBoard's files: messages of Protocol Buffers
// (tensorboard/compat/proto/event.proto and summary.proto in TensorBoard's
// repository), with the fields that Python's torch.utils.tensorboard sets.
// Texts must be UTF-8.

// When: seconds since 1970, and the step of the training.
struct EventTime {
  double wall_time;
  int64_t step;
};

struct HistogramData {
  double min;
  double max;
  double num;
  double sum;
  double sum_squares;
  // The right edge of each bin, and how many values are in it. The first bin is
  // empty, so that its edge is the left edge of the second.
  std::vector<double> limits;
  std::vector<double> counts;
};

using HParamVariant = std::variant<bool, double, std::string>;
using HParamValues = std::vector<std::pair<std::string, HParamVariant>>;

// Begins each file.
std::string version_event(double wall_time);
// TensorBoard hides the events before this one whose step is `time.step` or
// more.
std::string restart_event(const EventTime& time);

std::string scalar_event(const EventTime& time, std::string_view tag,
                         double value);
std::string histogram_event(const EventTime& time, std::string_view tag,
                            const HistogramData& histogram);
std::string text_event(const EventTime& time, std::string_view tag,
                       std::string_view text);
// `channels`: 3 RGB, 4 RGBA.
std::string image_event(const EventTime& time, std::string_view tag,
                        int64_t height, int64_t width, int64_t channels,
                        std::string_view png);
// Return the three events of one set of hyperparameters: which
// hyperparameters and metrics there are, the values, and that the run has ended
// well.
std::vector<std::string> hparams_events(
    const EventTime& time, const HParamValues& hparams,
    const std::vector<std::string>& metrics);

// Returns the event as a record of a file: the TFRecord format (TensorFlow
// documentation, "TFRecord and tf.train.Example"), which is the length, its
// checksum, the bytes, and theirs.
std::string record_of(std::string_view event);

}  // namespace lockstep::internal
