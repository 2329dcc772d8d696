#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// The options of `lockstep run` as they were written; empty if an option was
// not given and has no one default. run_options.h says what they mean.
struct RunArguments {
  bool standalone = false;
  std::string nproc_per_node = "1";
  std::string nnodes = "1";
  std::string node_rank;
  std::string master_addr;
  std::string master_port;
  std::string local_addr;
  std::string rdzv_backend = "lockstep";
  std::string rdzv_secret_file;
  bool rdzv_insecure = false;
  std::string rdzv_endpoint;
  std::string rdzv_id;
  std::string rdzv_conf;
  std::string max_restarts = "0";
  std::string max_membership_changes;
  std::string scale_up_wait = "300";
  std::string leave_out_after;
  bool spare = false;
  std::string standby = "0";
  std::string heal;  // empty, "replace" or "shrink"
  std::string monitor_interval = "0.1";
  std::string signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::string shutdown_timeout;
  std::string failure_shutdown_timeout = "0.5";
  std::string leftover_timeout = "0.2";
  std::string worker_store;
  std::string role = "default";
  bool module = false;
  bool no_python = false;
  bool run_path = false;
  std::string start_method = "spawn";
  std::string numa_binding;
  std::string omp_threads;
  bool virtual_local_rank = false;
  std::string log_dir;
  std::string redirects = "0";
  std::string tee = "0";
  std::string local_ranks_filter;
  std::string duplicate_stdout_filters;
  std::string duplicate_stderr_filters;
  std::string logs_specs = "default";
  std::string event_log_handler = "null";
  bool prefix_lines = false;
  std::string metrics_port;
  std::string metrics_address;
  bool metrics_insecure = false;
  std::string hang_timeout;
  std::string report;
  std::vector<std::string> command;
};

// Removes the white space around numbers and addresses: variables that come
// from files and templates may end with a newline.
void strip_numbers(RunArguments& arguments);

// Adds every option of `lockstep run` to its command, with its help.
void add_run_arguments(CLI::App& run, RunArguments& arguments);

// The differences in the help of the commands whose nodes meet.
struct MeetingTexts {
  const char* nnodes;          // what --nnodes says
  const char* join_timeout;    // the default of that value of --rdzv-conf
  const char* more_conf = "";  // values of --rdzv-conf, each with ", " after
};

// Adds those by which the nodes of a job meet, for commands that meet as
// `lockstep run` does.
void add_meeting_arguments(CLI::App& command, RunArguments& arguments,
                           const MeetingTexts& texts);

// Takes what CLI11 left as the program and its arguments: everything from the
// first argument that is not an option that it knows. Throws
// std::invalid_argument if there is no program or the first argument is an
// option.
void set_command(RunArguments& arguments, std::vector<std::string> remaining);

}  // namespace lockstep::internal
