#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/trace/flight_recorder.h"

// A flight record (docs/internals/flight-recorder.md) as it was read.
namespace lockstep::internal {

// what() is one line: the file, the place in it, what it has and what is
// allowed.
class FlightFileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Times are nanoseconds since 1970.
struct FlightEntry {
  uint64_t id = 0;
  uint64_t number = 0;  // 0 for a message
  std::string operation{};
  std::string dtype{};      // empty if there is none
  std::string reduce_op{};  // empty if there is none
  int peer = -1;            // -1 for none, or for any
  uint64_t in_elements = 0;
  uint64_t out_elements = 0;
  FlightState state = FlightState::scheduled;
  int64_t created_ns = 0;
  int64_t ended_ns = 0;

  bool ended() const { return state >= FlightState::completed; }
};

struct FlightFileGroup {
  std::string name{};
  std::vector<int> ranks{};
  uint64_t last_number = 0;  // of the last collective; 0 if there is none
  std::vector<FlightEntry> entries{};
};

struct FlightFile {
  std::string path{};
  std::string job{};  // empty if it is not known
  std::string host{};
  int rank = 0;
  int world_size = 0;
  int pid = 0;
  std::string reason{};
  int64_t time_ns = 0;
  std::vector<FlightFileGroup> groups{};
};

// Reads a file and checks all of it. The file may come from anywhere: at most
// 64 MiB are read, numbers are checked against each other, and texts hold no
// control characters. Throws FlightFileError.
FlightFile read_flight_file(const std::string& path);

// Throws FlightFileError unless the files are of different ranks of one job.
void require_one_job(const std::vector<FlightFile>& files);

}  // namespace lockstep::internal
