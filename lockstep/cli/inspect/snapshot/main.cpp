// `lockstep inspect snapshot`: [--verify] [--json] -- PATH [OTHER], as
// lockstep/cli/inspect.cpp gives them.

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/shown_text.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/inspect/snapshot/snapshot_difference.h"
#include "lockstep/cli/inspect/snapshot/snapshot_listing.h"
#include "lockstep/cli/inspect/snapshot/stored_snapshot.h"

namespace {

using namespace lockstep::internal;

constexpr const char* kName = "lockstep inspect snapshot";
constexpr int kDamagedOrDifferent = 1;
constexpr int kBadInput = 2;

struct Arguments {
  bool verify = false;
  bool json = false;
  std::vector<std::string> paths;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  bool only_paths = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (only_paths) {
      arguments.paths.push_back(word);
    } else if (word == "--verify") {
      arguments.verify = true;
    } else if (word == "--json") {
      arguments.json = true;
    } else if (word == "--") {
      only_paths = true;
    }
  }
  return arguments;
}

int inspect(const Arguments& arguments) {
  const auto first = StoredSnapshot::open(arguments.paths.at(0));
  if (arguments.paths.size() == 2) {
    const auto second = StoredSnapshot::open(arguments.paths[1]);
    const auto difference = compare_snapshots(*first, *second);
    write_output(arguments.json ? difference_json(difference)
                                : difference_table(difference));
    return difference.rows.empty() ? 0 : kDamagedOrDifferent;
  }
  std::optional<SnapshotVerification> verification;
  if (arguments.verify) verification = verify(*first);
  const auto* found = verification ? &*verification : nullptr;
  write_output(arguments.json ? listing_json(*first, found)
                              : listing_table(*first, found));
  if (!verification) return 0;
  for (const std::string& line : verification->damage) {
    write_message(kName, shown_line(line));
  }
  return verification->damage.empty() ? 0 : kDamagedOrDifferent;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return end_output(kName, inspect(parse(argc, argv)));
  } catch (const lockstep::SnapshotError& error) {
    write_message(kName, shown_line(error.what()));
    return kDamagedOrDifferent;
  } catch (const std::exception& error) {
    write_message(kName, shown_line(error.what()));
    return kBadInput;
  }
}
