#pragma once

#include <exception>
#include <functional>

// Tells the launcher that started this process why it fails, like
// torch.distributed.elastic.multiprocessing.errors.record (PyTorch
// documentation, "Error Propagation").
//
// The launcher names a file in TORCHELASTIC_ERROR_FILE; worker/error_file.h
// says what is written there. It tells a *cause* from an *echo*: the failure of
// a rank that could not go on without a peer that had failed before. So a job's
// report begins with the rank that failed first.
//
// Three things are written without the program's doing: an exception that
// nobody catches (InitProcessGroupOptions::report_uncaught), the failure of an
// operation because a peer is gone, and, without its text, that an exception
// left the scope of a ProcessGroupGuard. A program that catches what it throws,
// and returns from main(), reports it by one of these functions.
namespace lockstep {

// Writes `error`. Only the first failure of the process counts: later ones,
// which follow from it, are left out; but `error` replaces a failure without a
// text. Any thread may call; throws nothing.
void record_error(const std::exception& error) noexcept;

// Runs what would be main(): returns what `body` returns. If `body` throws,
// writes the exception, prints it in one line ("rank 3: ...") and returns 1.
//
//   int main(int argc, char** argv) {
//     return lockstep::record([&] { return train(argc, argv); });
//   }
int record(const std::function<int()>& body) noexcept;

}  // namespace lockstep
