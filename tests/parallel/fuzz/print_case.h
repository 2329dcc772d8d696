#pragma once

#include <string>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// Returns the case as a C++ program that trains it and prints each rank's
// parameters and gradients, to read and to run under `lockstep run`. Its first
// lines contain `reason`. Its numbers differ from the fuzzer's.
std::string program_of(const Case& fuzz_case, const std::string& reason);

}  // namespace lockstep::internal::fuzz
