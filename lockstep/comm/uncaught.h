#pragma once

#include <string>

// Internal to comm: how the failures of this process are told (record.h).
namespace lockstep {

// Which rank this process is, and what tells the peers that it knows to be gone
// ("rank 3 died"; empty: none). The function is called while the process ends,
// so it waits for no lock.
void identify_process(int rank, std::string (*failed_peers)());

// From here on an exception that nobody catches is written for the launcher and
// printed in one line, "rank 3: ...". Then the terminate handler is called that
// the program had set, or the process aborts. May be called again. Threads: one
// at a time.
void report_uncaught();

}  // namespace lockstep
