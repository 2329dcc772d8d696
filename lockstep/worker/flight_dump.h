#pragma once

#include <string>

#include "lockstep/trace/flight_recorder.h"

// Writes the flight recorders of this process to a file: when an operation
// fails, when SIGUSR1 comes, or when the program asks for it.
// docs/internals/flight-recorder.md describes the format.
namespace lockstep::internal {

// From this call on, the record says that this process is `rank` of
// `world_size`. The record's file is
//
//   <LOCKSTEP_FLIGHT_DIR>/lockstep-flight-<job>-rank<rank>.json
//
// and lies in the temporary folder if LOCKSTEP_FLIGHT_DIR is unset. <job> is
// MASTER_PORT, followed by ".<n>" after the n-th restart by an elastic
// launcher; it is "pid<pid>" if MASTER_PORT is not set to a number. The folder
// is made when a record is written; its parents are not.
//
// SIGUSR1 writes the record, unless the program handles or ignores the signal,
// the launcher ends the job with it (signals.h), LOCKSTEP_FLIGHT_SIGNAL is
// 0, or nothing is recorded. Throws
// std::invalid_argument if an environment variable has a value that is not
// allowed, or the file's path is too long. May be called again, but not by two
// threads at the same time.
void arm_flight_dump(int rank, int world_size);

// Why a record is written.
enum class FlightReason { failure, signal, request };

// Writes what all recorders of the process hold to a file under another name
// and then renames it, so that no reader sees a part of it. Calls only what a
// signal handler may call: it takes no lock and allocates no memory. So it
// works even if every thread of the process is stuck. Returns 0, or the errno
// of what failed. Returns ENODATA and writes nothing before arm_flight_dump(),
// in a child that was forked after it, or if there is no recorder.
int write_flight_record(FlightReason reason) noexcept;

// Returns the file's path; empty before arm_flight_dump().
std::string flight_record_path();

// Writes the record if `recorder` has news (FlightRecorder::has_news()).
// Returns the end of an error's text: "; flight record: <path>", or why there
// is no record. Returns an empty text if nothing is recorded.
std::string record_failure(FlightRecorder& recorder);

}  // namespace lockstep::internal
