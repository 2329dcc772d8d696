#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep {

// The options of `lockstep run` as they were written; empty where an option
// was not given and has no one default. run_options.h says what they mean.
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
  std::vector<std::string> command;
};

// Adds every option of `lockstep run` to its command, with its help.
void add_run_arguments(CLI::App& run, RunArguments& arguments);

// Takes what CLI11 left, from the first argument that is no option that it
// knows, as the program and its arguments. Throws std::invalid_argument where
// there is no program or the first is an option: one of torchrun's that this
// launcher lacks is named with what to do instead.
void set_command(RunArguments& arguments, std::vector<std::string> remaining);

// The same for options that the environment sets, PET_....
void refuse_unsupported_environment();

}  // namespace lockstep
