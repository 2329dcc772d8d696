#include "lockstep/cli/subcommands.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/cli/command_line.h"
#include "lockstep/cli/inspect/flight_comparison.h"
#include "lockstep/cli/inspect/flight_file.h"

namespace lockstep::internal {
namespace {

constexpr int kDiverged = 1;
constexpr int kBadInput = 2;

struct FlightArguments {
  std::vector<std::string> files;
  bool json = false;
};

int inspect_flight(const FlightArguments& arguments) {
  std::vector<FlightFile> files;
  try {
    for (const auto& path : arguments.files) {
      files.push_back(read_flight_file(path));
    }
    require_one_job(files);
  } catch (const FlightFileError& error) {
    write_message("lockstep inspect flight", error.what());
    return kBadInput;
  }
  const FlightComparison comparison = compare_flights(files);
  write_output(arguments.json ? flight_json(comparison)
                              : flight_table(comparison));
  return comparison.diverged() ? kDiverged : 0;
}

struct SnapshotArguments {
  std::string path;
  std::string other;
  bool verify = false;
  bool json = false;
};

// Reading tensors needs LibTorch, so another program does it.
int inspect_snapshot(const SnapshotArguments& arguments) {
  std::vector<std::string> words;
  if (arguments.verify) words.emplace_back("--verify");
  if (arguments.json) words.emplace_back("--json");
  words.insert(words.end(), {"--", arguments.path});
  if (!arguments.other.empty()) words.push_back(arguments.other);
  return execute_libexec("lockstep inspect snapshot",
                         "lockstep-inspect-snapshot", std::move(words));
}

void add_snapshot_command(CLI::App& inspect, int& exit_code) {
  CLI::App* snapshot = add_command(
      inspect, "snapshot",
      "List a snapshot's tensors, verify it, or compare two",
      "lockstep inspect snapshot [--verify] [--json] PATH\n"
      "       lockstep inspect snapshot --diff OTHER [--json] PATH\n"
      "  PATH and OTHER are files or folders. Of a folder of snapshots the "
      "newest is\n  taken.\n"
      "  Exit code 0: the snapshot is sound, or equal to OTHER; 1: it is "
      "damaged, no\n  snapshot, or differs; 2: a file cannot be read.");
  auto arguments = std::make_shared<SnapshotArguments>();
  snapshot
      ->add_option("PATH", arguments->path,
                   "A snapshot or weights: a file or a folder")
      ->required()
      ->type_name("");
  auto* verify = snapshot->add_flag(
      "--verify", arguments->verify,
      "Read every tensor, compare all checksums, and show norms");
  snapshot
      ->add_option("--diff", arguments->other,
                   "Compare the tensors with those of another snapshot")
      ->excludes(verify);
  snapshot->add_flag("--json", arguments->json, "Print one JSON document");
  snapshot->callback(
      [arguments, &exit_code] { exit_code = inspect_snapshot(*arguments); });
}

}  // namespace

void add_inspect_command(CLI::App& app, int& exit_code) {
  CLI::App* inspect = add_command(
      app, "inspect", "Look at the records and snapshots that jobs left",
      "lockstep inspect COMMAND ...");
  inspect->require_subcommand(1);

  CLI::App* flight = add_command(
      *inspect, "flight", "Compare the flight records of a job's ranks",
      "lockstep inspect flight [--json] FILE...\n"
      "  Each FILE is the record of one rank: lockstep-flight-*-rank*.json.\n"
      "  Exit code 0: the ranks made the same calls; 1: they diverged; 2: a "
      "FILE is\n  not such a record.");
  auto arguments = std::make_shared<FlightArguments>();
  flight->add_option("FILE", arguments->files, "Records, one for each rank")
      ->required()
      ->type_name("");
  flight->add_flag("--json", arguments->json, "Print one JSON document");
  flight->callback(
      [arguments, &exit_code] { exit_code = inspect_flight(*arguments); });
  add_snapshot_command(*inspect, exit_code);
}

}  // namespace lockstep::internal
