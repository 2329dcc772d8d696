#pragma once

#include <exception>
#include <functional>

// Why this process fails, for the launcher that started it: after
// torch.distributed.elastic.multiprocessing.errors.record (PyTorch
// documentation, "Error Propagation").
//
// The launcher names a file in TORCHELASTIC_ERROR_FILE; what is written there
// is in base/error_file.h. It tells a *cause* from an *echo*: the failure of a
// rank that could not go on without a peer that had failed before. So a job's
// report begins with the rank that failed first.
//
// Written without the program's doing: what nobody catches
// (InitProcessGroupOptions::report_uncaught), and a failure of an operation
// because a peer is gone. A program that catches what it throws, and returns
// from main(), says it by one of these.
namespace lockstep {

// Writes `error`. The first failure of the process counts: what follows from it
// is left out. Any thread; throws nothing.
void record_error(const std::exception& error) noexcept;

// main() in short: returns what `body` returns. What it throws is written, and
// printed in one line ("rank 3: ..."), and 1 is returned.
//
//   int main(int argc, char** argv) {
//     return lockstep::record([&] { return train(argc, argv); });
//   }
int record(const std::function<int()>& body) noexcept;

}  // namespace lockstep
