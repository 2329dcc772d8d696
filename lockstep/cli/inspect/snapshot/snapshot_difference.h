#pragma once

#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// What two snapshots do not have in common.
struct SnapshotDifference {
  struct Row {
    std::string name;  // of a tensor, or "epochs_run" and the like
    // "only in A", "shape [2] and [3]", "3 of 8 elements differ", "1 and 2".
    std::string what;
    // The greatest absolute difference of two elements; NaN if only one of two
    // is NaN. 0 where elements cannot be compared.
    double greatest = 0;
  };
  std::vector<Row> rows{};
  size_t equal_tensors = 0;
};

// Compares tensors bit for bit, except that -0 equals 0; all NaNs are equal.
SnapshotDifference compare_snapshots(const Snapshot& a, const Snapshot& b);

// Both end with a newline. `a`, `b`: the paths.
std::string difference_table(const std::string& a, const std::string& b,
                             const SnapshotDifference& difference);
std::string difference_json(const std::string& a, const std::string& b,
                            const SnapshotDifference& difference);

}  // namespace lockstep::internal
