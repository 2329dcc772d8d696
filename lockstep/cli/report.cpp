#include "lockstep/cli/subcommands.h"

#include <memory>
#include <string>

#include "lockstep/cli/command_line.h"
#include "lockstep/cli/report/trace_folder.h"
#include "lockstep/cli/report/trace_report.h"
#include "lockstep/cli/report/trace_scan.h"

namespace lockstep::internal {
namespace {

constexpr const char* kTraceCommand = "lockstep report trace";
constexpr int kUnreadableTrace = 2;

struct TraceArguments {
  std::string folder;
  std::string output;
  bool json = false;
};

int report_trace(const TraceArguments& arguments) {
  try {
    const TraceFolder folder = read_trace_folder(arguments.folder);
    const TraceReport report = make_trace_report(folder);
    for (const auto& warning : report.warnings) {
      write_message(kTraceCommand, "warning: " + warning);
    }
    write_output(arguments.json ? trace_json(report) : trace_table(report));
    if (!arguments.output.empty()) {
      write_merged_trace(folder, arguments.output);
    }
    return 0;
  } catch (const TraceFileError& error) {
    write_message(kTraceCommand, error.what());
    return kUnreadableTrace;
  }
}

void add_trace_command(CLI::App& report, int& exit_code) {
  CLI::App* trace = add_command(
      report, "trace",
      "Say where the time of a step went, by the ranks' traces",
      "lockstep report trace [--output FILE] [--json] DIR\n"
      "  DIR holds the traces of a job's ranks, as torch.profiler and "
      "Lockstep's "
      "Profiler\n  write them: *.trace.json or *.trace.json.gz.\n"
      "Examples:\n"
      "  lockstep report trace traces/\n"
      "  lockstep report trace traces/ --output merged.json   # for "
      "ui.perfetto.dev\n"
      "  lockstep report trace traces/ --json\n"
      "Exit code 0: the report was printed; 2: a trace cannot be read.");
  auto arguments = std::make_shared<TraceArguments>();
  trace
      ->add_option("DIR", arguments->folder,
                   "The folder with the traces, one for each rank and cycle")
      ->required()
      ->type_name("");
  trace
      ->add_option("--output", arguments->output,
                   "Write all ranks into one trace with aligned clocks")
      ->type_name("FILE");
  trace->add_flag("--json", arguments->json, "Print one JSON document");
  trace->callback(
      [arguments, &exit_code] { exit_code = report_trace(*arguments); });
}

}  // namespace

void add_report_command(CLI::App& app, int& exit_code) {
  CLI::App* report =
      add_command(app, "report", "Say how well jobs used their time",
                  "lockstep report COMMAND ...");
  report->require_subcommand(1);
  add_trace_command(*report, exit_code);
  add_scaling_command(*report, app, exit_code);
}

}  // namespace lockstep::internal
