#include "tests/parallel/fuzz/print_case.h"
namespace lockstep::fuzz {
std::string program_of(const Case&, const std::string& reason) { return reason; }
}  // namespace lockstep::fuzz
