#pragma once

#include <functional>
#include <vector>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::fuzz {

// All cases that are one edit smaller, in a fixed order: without an event, an
// operation, an option, with fewer elements. A case is then named by its seed
// and the numbers of its edits, which is all that the ranks are told.
std::vector<Case> smaller_cases(const Case& fuzz_case);

// The case after these edits.
Case edited_case(Case fuzz_case, const std::vector<size_t>& edits);

// Edits as long as `still_fails` says so of the result.
std::vector<size_t> reduce_case(
    const Case& fuzz_case,
    const std::function<bool(const std::vector<size_t>&)>& still_fails);

}  // namespace lockstep::fuzz
