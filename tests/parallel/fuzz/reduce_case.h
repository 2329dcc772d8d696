#pragma once

#include <functional>
#include <vector>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// Returns all cases that are one edit smaller, in a fixed order: without an
// event, an operation or an option, or with fewer elements. So a case is named
// by its seed and the numbers of its edits, which is all that the ranks
// receive.
std::vector<Case> smaller_cases(const Case& fuzz_case);

// Returns the case after these edits.
Case edited_case(Case fuzz_case, const std::vector<size_t>& edits);

// Returns edits that keep the case failing: adds edits as long as `still_fails`
// returns true.
std::vector<size_t> reduce_case(
    const Case& fuzz_case,
    const std::function<bool(const std::vector<size_t>&)>& still_fails);

}  // namespace lockstep::internal::fuzz
