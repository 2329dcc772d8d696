// Fuzzes DistributedDataParallel with random autograd graphs (README.md).
//
//   ddp_fuzz --world 2 --backend lockstep --seeds 0:1000
//
//   --case-timeout 20  seconds until the ranks of a case are killed
//   --reduce           makes each failing case as small as it still fails, and
//                      prints it as a program
//   --program          prints each failing case as it was drawn
//   --with TEXT, --without TEXT
//                      leaves out cases without a feature whose name contains
//                      TEXT, or with one; may be repeated
//   --statistics       counts failures by what the cases had in them
//
// Prints a line for each failing seed and one with the sums. Exits with 1 if a
// case failed, with 2 if the arguments are wrong.

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "tests/harness/rank_process.h"
#include "tests/parallel/fuzz/campaign.h"

namespace {

lockstep::internal::fuzz::CampaignOptions options_of(
    const std::vector<std::string>& arguments) {
  lockstep::internal::fuzz::CampaignOptions options;
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

int main(int argc, char** argv) {
  if (const auto socket =
          lockstep::internal::testing::inherited_control_socket()) {
    lockstep::internal::fuzz::serve_as_rank(*socket);
  }
  lockstep::internal::fuzz::CampaignOptions options;
  try {
    options = options_of(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr,
                 "ddp_fuzz: %s\nusage: ddp_fuzz [--world N] [--backend NAME] "
                 "[--seeds BEGIN:END] [--case-timeout S] [--reduce] "
                 "[--program] [--with TEXT] [--without TEXT] "
                 "[--statistics]\n",
                 error.what());
    return 2;
  }
  return lockstep::internal::fuzz::run_campaign(options) ? 0 : 1;
}
