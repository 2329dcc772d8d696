#include "examples/program.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

namespace examples {

int run_program(const char* name, const std::function<void()>& body) {
  std::string what;
  try {
    body();
    return 0;
  } catch (const c10::Error& error) {  // without LibTorch's stack trace
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  const char* rank = std::getenv("RANK");
  std::fprintf(stderr, "%s%s%s: %s\n", name, rank != nullptr ? " rank " : "",
               rank != nullptr ? rank : "", what.c_str());
  return 1;
}

}  // namespace examples
