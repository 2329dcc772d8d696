#include "examples/program.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <c10/util/Exception.h>
#include <CLI/CLI.hpp>

#include "lockstep/comm/record.h"
#include "lockstep/comm/stop_request.h"

namespace examples {

int run_program(CLI::App& app, int argc, char** argv,
                const std::function<void()>& body) {
  const std::string name = std::filesystem::path(argv[0]).filename().string();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::fprintf(stderr, "%s: %s; %s --help lists the arguments\n",
                 name.c_str(), error.what(), name.c_str());
    return 2;
  }
  std::string what;
  try {
    body();
    return lockstep::stop_exit_code();
  } catch (const c10::Error& error) {  // without LibTorch's stack trace
    lockstep::record_error(error);
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    lockstep::record_error(error);
    what = error.what();
  }
  const char* rank = std::getenv("RANK");
  std::fprintf(stderr, "%s%s%s: %s\n", name.c_str(),
               rank != nullptr ? " rank " : "", rank != nullptr ? rank : "",
               what.c_str());
  return 1;
}

}  // namespace examples
