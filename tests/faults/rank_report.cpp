#include "tests/faults/rank_report.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"

namespace lockstep::internal::testing {

int own_rank() {
  static const int own = std::stoi(std::getenv("RANK"));
  return own;
}

void say(const char* what, const std::string& more) {
  std::printf("%s %d%s%s\n", what, own_rank(), more.empty() ? "" : " ",
              more.c_str());
  std::fflush(stdout);
}

std::string one_line(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch ? torch->what_without_backtrace() : error.what();
  for (size_t at; (at = text.find('\n')) != text.npos;) {
    text.replace(at, 1, " | ");
  }
  return text;
}

Arguments::Arguments(const std::vector<std::string>& given) {
  for (const auto& argument : given) {
    const auto equals = argument.find('=');
    values_[argument.substr(0, equals)] =
        std::stoi(argument.substr(equals + 1));
  }
}

int Arguments::get(const std::string& name, int otherwise) const {
  const auto found = values_.find(name);
  return found == values_.end() ? otherwise : found->second;
}

namespace {

void await_all_started() {
  const auto name = [](int peer) {
    return std::string("lockstep-test-job-") + std::getenv("MASTER_PORT") +
           "-" + std::to_string(peer);
  };
  static const auto own = listen_at(name(own_rank()));
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  for (int peer = 0; peer < std::stoi(std::getenv("WORLD_SIZE")); ++peer) {
    while (!connect_to(name(peer)) && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  using namespace lockstep::internal::testing;
  const Arguments given({argv + 3, argv + argc});
  if (given.get("together")) await_all_started();
  return run(argv[1], argv[2], given);
}
