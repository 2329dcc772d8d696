#include "tests/parallel/fuzz/fuzz_main.h"

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "tests/harness/rank_process.h"
#include "tests/parallel/fuzz/campaign.h"

namespace lockstep::internal::fuzz {
namespace {

CampaignOptions options_of(const std::vector<std::string>& arguments) {
  CampaignOptions options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i];
    auto value = [&]() -> const std::string& {
      if (++i == arguments.size()) {
        throw std::invalid_argument(name + " wants a value");
      }
      return arguments[i];
    };
    if (name == "--world") {
      options.world.world_size = std::stoi(value());
    } else if (name == "--backend") {
      options.world.backend = value();
    } else if (name == "--case-timeout") {
      options.world.case_timeout = std::chrono::seconds(std::stoi(value()));
    } else if (name == "--reduce") {
      options.reduces = true;
    } else if (name == "--program") {
      options.prints_programs = true;
    } else if (name == "--with") {
      options.with.push_back(value());
    } else if (name == "--without") {
      options.without.push_back(value());
    } else if (name == "--statistics") {
      options.prints_statistics = true;
    } else if (name == "--seeds") {
      const auto& range = value();
      const auto colon = range.find(':');
      options.begin = std::stoull(range);
      options.end = colon == std::string::npos
                        ? options.begin + 1
                        : std::stoull(range.substr(colon + 1));
    } else {
      throw std::invalid_argument("unknown argument \"" + name + "\"");
    }
  }
  return options;
}

}  // namespace

int fuzz_main(const Subject& subject, const char* name, int argc, char** argv) {
  if (const auto socket = testing::inherited_control_socket()) {
    serve_as_rank(subject, *socket);
  }
  CampaignOptions options;
  try {
    options = options_of(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr,
                 "%s: %s\nusage: %s [--world N] [--backend NAME] "
                 "[--seeds BEGIN:END] [--case-timeout S] [--reduce] "
                 "[--program] [--with TEXT] [--without TEXT] "
                 "[--statistics]\n",
                 name, error.what(), name);
    return 2;
  }
  return run_campaign(subject, options) ? 0 : 1;
}

}  // namespace lockstep::internal::fuzz
