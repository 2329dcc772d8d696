#pragma once

#include <string>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::fuzz {

// The case as a C++ program that trains it and prints each rank's parameters
// and gradients: to read, and to try out under `lockstep run`. `reason` goes
// into its first lines. The numbers are other ones than the fuzzer's.
std::string program_of(const Case& fuzz_case, const std::string& reason);

}  // namespace lockstep::fuzz
