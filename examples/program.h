#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace examples {

// Parses the arguments of an example, runs `body`, and returns the exit code
// for main(). Every failure is one line on standard error that begins with the
// program's name: for a wrong argument the code is 2; for what `body` throws it
// is 1, and the line has the rank if there is one. If the training has stopped
// at a signal (lockstep::stop_requested()), the code is that of the signal.
// --help prints the arguments and returns 0.
int run_program(CLI::App& app, int argc, char** argv,
                const std::function<void()>& body);

}  // namespace examples
