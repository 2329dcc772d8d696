#pragma once

namespace lockstep::internal {

// What the commands end with if no worker decides it: for a mistake in what the
// user gave (as argparse, and so torchrun), and for a failure of the system.
inline constexpr int kUsageError = 2;
inline constexpr int kSystemError = 1;

}  // namespace lockstep::internal
