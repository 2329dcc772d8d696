#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace examples {

// The main() of an example with arguments: parses them, runs `body`, returns
// the exit code. Every failure is one line on standard error that begins with
// the program's name: a wrong argument, code 2; what `body` throws, with the
// rank where there is one, code 1. --help prints the arguments, code 0.
int run_program(CLI::App& app, int argc, char** argv,
                const std::function<void()>& body);

}  // namespace examples
