#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/inspect/snapshot/stored_snapshot.h"

namespace lockstep::internal {

// How many elements are converted to float64 at once.
inline constexpr int64_t kElementsAtOnce = int64_t{1} << 20;

// Returns "[2, 3]".
std::string shape_text(const at::Tensor& tensor);
// Returns Python's name: "float32".
std::string dtype_text(const at::Tensor& tensor);
// Returns "16.2 MiB", or "512 B".
std::string bytes_text(double bytes);

// Returns the part of `tensor` in which no element is repeated by a stride of 0
// that `as`, of the same shape, has in this dimension, too. (Of an expanded
// tensor, a file has few elements, whatever its shape is.)
at::Tensor without_repetitions(const at::Tensor& tensor, const at::Tensor& as);

// Whether it has many more elements than memory, because its strides overlap
// (1, 1). Nobody looks at each of them: 8 MB may have 2^40.
bool has_too_many_elements(const at::Tensor& tensor);

// Returns the Euclidean norm of all elements, computed in float64; NaN if an
// element is NaN; none if there are too many.
std::optional<double> norm_of(const at::Tensor& tensor);

// The findings if all tensors are read.
struct SnapshotVerification {
  struct Tensor {
    enum class Checksum { kOk, kNone, kDamaged };
    Checksum checksum = Checksum::kOk;
    std::optional<double> norm{};  // none if damaged
  };
  std::vector<Tensor> tensors{};  // as StoredSnapshot::tensors()
  // A line for each damage, which names the file and the tensor.
  std::vector<std::string> damage{};
};

// Reads all of a snapshot, one tensor at a time, and goes on after damage.
// Throws std::system_error if the disk fails.
SnapshotVerification verify(const StoredSnapshot& snapshot);

// Both describe a snapshot, and end with a newline. `verification`: null if it
// was not verified. docs/inspecting-snapshots.md has the columns and the fields
// of the JSON.
std::string listing_table(const StoredSnapshot& snapshot,
                          const SnapshotVerification* verification);
std::string listing_json(const StoredSnapshot& snapshot,
                         const SnapshotVerification* verification);

}  // namespace lockstep::internal
