#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/cli/inspect/flight_file.h"

namespace lockstep::internal {

// Compares the ranks' records, matching them by the sequence numbers of their
// collectives.

// In the order in which they are looked for at one sequence number. The first
// three are divergences.
enum class FlightVerdict {
  mismatch,   // ranks made different calls
  absent,     // a rank did not come while others wait or failed
  no_record,  // the same, of a rank that left no file
  failed,     // all made the same call, and it failed
  waiting,    // all made the same call, and it has not ended
  consistent,
};

// The operation of one rank at the sequence number in question.
struct FlightRow {
  int rank = 0;
  const FlightFile* file = nullptr;    // null without a record
  const FlightEntry* entry = nullptr;  // null if it did not come, or its
                                       // record no longer holds the entry
};

struct FlightGroupComparison {
  std::string name{};
  std::vector<int> ranks{};
  FlightVerdict verdict = FlightVerdict::consistent;
  // The sequence number to which the verdict belongs; 0 if there is none.
  uint64_t number = 0;
  // The ranks that diverged. If no side of a mismatch is the largest, these are
  // the ranks of all sides.
  std::vector<int> blamed{};
  // The findings, one sentence each, the most important first.
  std::vector<std::string> findings{};
  std::vector<FlightRow> rows{};
  // Messages that still run, and those that failed; one sentence for each.
  std::vector<std::string> messages{};

  bool diverged() const { return verdict <= FlightVerdict::no_record; }
};

// The result of a comparison. It points into the compared files, which must
// outlive it.
struct FlightComparison {
  std::string job{};
  int world_size = 0;
  std::vector<int> recorded{};
  std::vector<int> missing{};
  std::vector<FlightGroupComparison> groups{};

  bool diverged() const;
};

// `files` must be of different ranks of one job, at least one.
FlightComparison compare_flights(const std::vector<FlightFile>& files);

// Returns, for example, "all_reduce SUM Float[1000]", "broadcast Float[3] root
// 2" or "recv Int[1] from any rank".
std::string describe(const FlightEntry& entry);
// Returns "rank 3" or "ranks 0-2, 5".
std::string rank_list(const std::vector<int>& sorted);
// Returns "0.412 ms", "12.50 s" or "30 min".
std::string duration(int64_t nanoseconds);

// The texts that show a comparison. Both end with a newline.

// Returns a table for people: what was found in each group, and a row for each
// rank.
std::string flight_table(const FlightComparison& comparison);

// Returns JSON for programs; docs/flight-recorder.md has the fields.
std::string flight_json(const FlightComparison& comparison);

}  // namespace lockstep::internal
