// `lockstep inspect snapshot`: [--verify] [--json] -- PATH [OTHER], as
// lockstep/cli/inspect.cpp gives them.

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/inspect/snapshot/snapshot_difference.h"
#include "lockstep/cli/inspect/snapshot/snapshot_listing.h"

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
  const auto& first = arguments.paths.at(0);
  const auto snapshot = lockstep::load_snapshot_file(first);
  if (arguments.paths.size() == 1) {
    std::cout << (arguments.json
                      ? listing_json(first, snapshot, arguments.verify)
                      : listing_table(first, snapshot, arguments.verify))
              << std::flush;
    return 0;
  }
  const auto& second = arguments.paths[1];
  const auto difference =
      compare_snapshots(snapshot, lockstep::load_snapshot_file(second));
  std::cout << (arguments.json ? difference_json(first, second, difference)
                               : difference_table(first, second, difference))
            << std::flush;
  return difference.rows.empty() ? 0 : kDamagedOrDifferent;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return inspect(parse(argc, argv));
  } catch (const lockstep::SnapshotError& error) {
    write_message(kName, error.what());
    return kDamagedOrDifferent;
  } catch (const std::exception& error) {
    write_message(kName, error.what());
    return kBadInput;
  }
}
