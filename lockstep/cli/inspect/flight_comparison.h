#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/cli/inspect/flight_file.h"

// Lines the ranks' records up by the numbers of their collectives.
namespace lockstep {

// In the order in which they are looked for at one number; the first three are
// divergences.
enum class FlightVerdict {
  mismatch,   // ranks called different things
  absent,     // a rank did not come where others wait or failed
  no_record,  // the same of a rank of which there is no file
  failed,     // all called the same, and it failed
  waiting,    // all called the same, and it has not ended
  consistent,
};

// What one rank did at the number in question.
struct FlightRow {
  int rank = 0;
  const FlightFile* file = nullptr;    // nullptr: no record
  const FlightEntry* entry = nullptr;  // nullptr: it did not come, or the ring
                                       // has forgotten it
};

struct FlightGroupComparison {
  std::string name{};
  std::vector<int> ranks{};
  FlightVerdict verdict = FlightVerdict::consistent;
  uint64_t number = 0;        // where; 0: nowhere
  std::vector<int> blamed{};  // who diverged; of several sides of equal size,
                              // all
  // What happened, a sentence each, the most important first.
  std::vector<std::string> findings{};
  std::vector<FlightRow> rows{};
  // Messages that have not ended or failed, as sentences.
  std::vector<std::string> messages{};

  bool diverged() const { return verdict <= FlightVerdict::no_record; }
};

// Points into the files that were compared.
struct FlightComparison {
  std::string job{};
  int world_size = 0;
  std::vector<int> recorded{};
  std::vector<int> missing{};
  std::vector<FlightGroupComparison> groups{};

  bool diverged() const;
};

// `files`: of different ranks of one job, one at least.
FlightComparison compare_flights(const std::vector<FlightFile>& files);

// "all_reduce SUM Float[1000]", "broadcast Float[3] root 2", "recv Int[1] from
// any rank".
std::string describe(const FlightEntry& entry);
// "rank 3", "ranks 0-2, 5".
std::string rank_list(const std::vector<int>& sorted);
// "0.412 ms", "12.50 s", "30 min".
std::string duration(int64_t nanoseconds);

}  // namespace lockstep
