#pragma once

namespace lockstep::internal {

// The exit codes of the commands if no worker decides them: for a mistake in
// what the user gave (as argparse, and so torchrun), and for a failure of the
// system.
inline constexpr int kUsageError = 2;
inline constexpr int kSystemError = 1;

}  // namespace lockstep::internal
