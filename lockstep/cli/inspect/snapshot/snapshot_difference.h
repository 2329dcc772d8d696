#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/cli/inspect/snapshot/stored_snapshot.h"

namespace lockstep::internal {

// The differences of two snapshots.
struct SnapshotDifference {
  struct Row {
    std::string name;  // of a tensor, or "epochs_run" and the like
    // "only in A", "shape [2] and [3]", "3 of 8 elements differ", "1 and 2".
    std::string what;
    // The greatest absolute difference of two elements; NaN if only one of two
    // is NaN. 0 where elements cannot be compared.
    double greatest = 0;
  };
  std::string a;  // the paths
  std::string b;
  std::vector<Row> rows{};
  size_t equal_tensors = 0;
};

// Compares the tensors of model and optimizer state bit for bit, except that -0
// equals 0; all NaNs are equal. Reads one tensor of each side at a time. Throws
// the errors of StoredSnapshot::read().
//
// Optimizer state belongs together if its parameter has the same name, or the
// same number if one side knows only numbers. If one side has only names and
// the other only numbers, it is not compared, and a row says so.
SnapshotDifference compare_snapshots(const StoredSnapshot& a,
                                     const StoredSnapshot& b);

// Both end with a newline.
std::string difference_table(const SnapshotDifference& difference);
std::string difference_json(const SnapshotDifference& difference);

}  // namespace lockstep::internal
