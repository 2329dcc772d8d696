#pragma once

#include <CLI/CLI.hpp>
#include <string>
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
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::string rdzv_id;
  std::string rdzv_conf;
  std::string max_restarts = "0";
  std::string monitor_interval = "0.1";
  std::string shutdown_timeout;
  std::string failure_shutdown_timeout = "0.5";
  std::string leftover_timeout = "0.2";
  std::string role = "default";
  bool module = false;
  bool no_python = false;
  std::string log_dir;
  std::string redirects = "0";
  std::string tee = "0";
  std::string local_ranks_filter;
  bool prefix_lines = false;
  std::string metrics_port;
  std::vector<std::string> command;
};

// Adds every option of `lockstep run` to its command, with its help.
void add_run_arguments(CLI::App& run, RunArguments& arguments);

// Takes what CLI11 left as the program and its arguments: everything from the
// first argument that is not an option that it knows. Throws
// std::invalid_argument if there is no program or the first argument is an
// option; if that is an option of torchrun that this launcher lacks, the
// message says what to do instead.
void set_command(RunArguments& arguments, std::vector<std::string> remaining);

// Throws std::invalid_argument if the environment (PET_...) sets an option of
// torchrun that this launcher lacks.
void refuse_unsupported_environment();

}  // namespace lockstep::internal
