#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// A set of a worker's standard streams, with torchrun's numbers.
enum class Streams : unsigned { none = 0, out = 1, err = 2, all = 3 };

inline bool includes(Streams set, Streams one) {
  return (static_cast<unsigned>(set) & static_cast<unsigned>(one)) != 0;
}

// The value of --redirects or --tee: one set of streams for every worker
// ("3"), or one for some local ranks and none for the rest ("0:1,1:2").
class StreamSelection {
 public:
  StreamSelection() = default;
  // Throws std::invalid_argument that begins with `option`.
  static StreamSelection parse(std::string_view option, std::string_view text);

  Streams of(int local_rank) const;
  bool empty() const;  // selects nothing for any rank
  // Returns the highest local rank that the value names, or -1 if it names
  // none.
  int highest_rank() const;

 private:
  Streams everywhere_ = Streams::none;
  std::map<int, Streams> by_rank_;
};

// Parses "0,2" as a set of local ranks. Throws std::invalid_argument.
std::set<int> parse_local_ranks(std::string_view option, std::string_view text);

// Parses texts separated by commas; two commas stand for one in a text. Empty
// text: none. Throws std::invalid_argument if one of several texts is empty, as
// every line holds it.
std::vector<std::string> parse_line_filters(std::string_view option,
                                            std::string_view text);

// Where the workers' output goes. By default they write to the launcher's own
// stdout and stderr, with nothing in between: a terminal stays a terminal.
struct OutputOptions {
  // Streams that go only into a file of the log directory.
  StreamSelection redirects{};
  // Streams that go to the console by prefixed lines, and into the file if
  // there is a log directory.
  StreamSelection tee{};
  // Prefix the lines of every stream that is not redirected.
  bool prefix_lines = false;
  // Local ranks whose output the console shows; unset means all. Files get the
  // output of all ranks.
  std::optional<std::set<int>> local_ranks_filter{};
  // Lines on the console that hold one of these texts also go into the file
  // filtered_stdout.log or filtered_stderr.log of the attempt, if there is a
  // log directory. For streams with prefixed lines only.
  std::vector<std::string> stdout_filters{};
  std::vector<std::string> stderr_filters{};
  // ${role_name}, ${local_rank} and ${rank} are replaced.
  std::string prefix_template = "[${role_name}${local_rank}]:";
};

// Returns the prefix of a worker's lines on the console.
std::string line_prefix(const OutputOptions& options, std::string_view role,
                        int local_rank, int rank);

}  // namespace lockstep::internal
