#pragma once

#include <string>

#include "lockstep/base/flight_recorder.h"

// Where the flight recorders of this process are written to, and when: by a
// failure, by SIGUSR1, or by who asks. The format: docs/flight-recorder.md.
namespace lockstep {

// From here on this process is `rank` of `world_size` in its record, which is
//
//   <LOCKSTEP_FLIGHT_DIR>/lockstep-flight-<job>-rank<rank>.json
//
// in the temporary folder where that is unset. <job> is MASTER_PORT, with
// ".<n>" behind it after the n-th restart by an elastic launcher, or
// "pid<pid>" where the port is unset. The folder is made when it is needed,
// not its parents.
//
// SIGUSR1 writes the record, unless the program handles or ignores it,
// LOCKSTEP_FLIGHT_SIGNAL is 0, or nothing is recorded.
// Throws std::invalid_argument where the environment says what it cannot mean.
// May be called again; not from two threads.
void arm_flight_dump(int rank, int world_size);

// Why a record is written.
enum class FlightReason { failure, signal, request };

// Writes what all recorders of the process hold: aside, then renamed, so that
// the file is always whole. Only what a signal handler may call: no lock, no
// memory, and so also for a process of which every thread is stuck.
// Returns 0 or what the system says (errno); ENODATA, and writes nothing,
// before arm_flight_dump(), in a process forked since, or without a recorder.
int write_flight_record(FlightReason reason) noexcept;

// The file's path; empty before arm_flight_dump().
std::string flight_record_path();

// Writes the record, where `recorder` knows something new, and says so in what
// an error's text ends with: "; flight record: <path>", or why there is none.
// Empty where nothing is recorded.
std::string record_failure(FlightRecorder& recorder);

}  // namespace lockstep
