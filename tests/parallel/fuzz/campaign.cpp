#include "tests/parallel/fuzz/campaign.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include <torch/torch.h>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/init.h"
#include "tests/parallel/fuzz/draw_case.h"
#include "tests/parallel/fuzz/features.h"
#include "tests/parallel/fuzz/print_case.h"
#include "tests/parallel/fuzz/reduce_case.h"

namespace lockstep::fuzz {
namespace {

constexpr const char* kBackendVariable = "LOCKSTEP_FUZZ_BACKEND";
// A reduction ends after this, with what it has.
constexpr std::chrono::seconds kReductionTime{60};
// The group's timeout: shorter than a case may take, so that a rank that waits
// says what it waits for.
constexpr std::chrono::seconds kGroupTimeout{2};

// Bound and never listening, so that only a store that reuses addresses can
// take the port.
FileDescriptor bind_loopback_port(int* port) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) !=
          0 ||
      ::bind(socket.get(), raw, size) != 0 ||
      ::getsockname(socket.get(), raw, &size) != 0) {
    throw std::system_error(errno, std::generic_category(), "bind");
  }
  *port = ntohs(address.sin_port);
  return socket;
}

// Whether the error is one that a rank has because of another one's.
bool is_consequence(const std::string& reason) {
  return reason.find("timed out") != std::string::npos ||
         reason.find("timeout") != std::string::npos ||
         reason.find("has left") != std::string::npos ||
         reason.find(" failed after ") != std::string::npos;
}

// The outcome of the case. If one rank refuses it and the others fail because
// that rank does not come, the case was refused.
Outcome combine(const std::vector<Outcome>& outcomes) {
  Outcome all;
  const Outcome* reason = nullptr;
  const Outcome* refusal = nullptr;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const auto& one = outcomes[rank];
    all.is_in_step &= one.is_in_step;
    if (one.verdict == Verdict::refused) refusal = &one;
    if (one.verdict == Verdict::failed &&
        (reason == nullptr ||
         (is_consequence(reason->reason) && !is_consequence(one.reason)))) {
      reason = &one;
      all.reason = "rank " + std::to_string(rank) + ": " + one.reason;
    }
  }
  if (reason != nullptr) all.verdict = Verdict::failed;
  if (refusal != nullptr &&
      (reason == nullptr || is_consequence(reason->reason))) {
    all.verdict = Verdict::refused;
    all.reason = refusal->reason;
  }
  return all;
}

nlohmann::json to_json(const Outcome& outcome) {
  return {{"verdict", static_cast<int>(outcome.verdict)},
          {"reason", outcome.reason},
          {"is_in_step", outcome.is_in_step}};
}

Outcome from_json(const nlohmann::json& message) {
  return {static_cast<Verdict>(message["verdict"].get<int>()),
          message["reason"].get<std::string>(),
          message["is_in_step"].get<bool>()};
}

}  // namespace

FuzzWorld::FuzzWorld(const CampaignOptions& options) : options_(options) {}

FuzzWorld::~FuzzWorld() { stop(); }

void FuzzWorld::start() {
  auto pattern =
      (std::filesystem::temp_directory_path() / "lockstep-fuzz-XXXXXX")
          .string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw std::system_error(errno, std::generic_category(), "mkdtemp");
  }
  folder_ = pattern;
  int port = 0;
  held_port_ = bind_loopback_port(&port);
  const auto count = std::to_string(options_.world_size);
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const auto number = std::to_string(rank);
    ranks_.emplace_back(
        rank,
        std::vector<std::string>{
            "RANK=" + number, "LOCAL_RANK=" + number, "WORLD_SIZE=" + count,
            "LOCAL_WORLD_SIZE=" + count, "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=" + std::to_string(port), "OMP_NUM_THREADS=1",
            "LOCKSTEP_FLIGHT_DIR=" + (folder_ / "flight").string(),
            std::string(kBackendVariable) + "=" + options_.backend});
  }
}

void FuzzWorld::stop() {
  ranks_.clear();  // kills them
  held_port_ = FileDescriptor();
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  folder_.clear();
}

Outcome FuzzWorld::run(uint64_t seed, const std::vector<size_t>& edits) {
  if (ranks_.empty()) start();
  for (auto& rank : ranks_) rank.send({{"seed", seed}, {"edits", edits}});
  std::vector<Outcome> outcomes(ranks_.size());
  std::vector<bool> has_answered(ranks_.size());
  size_t left = ranks_.size();
  const auto deadline = Deadline::after(options_.case_timeout);
  while (left > 0 && !deadline.expired()) {
    std::vector<pollfd> waits;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      waits.push_back({has_answered[i] ? -1 : ranks_[i].socket(), POLLIN, 0});
    }
    ::poll(waits.data(), waits.size(),
           static_cast<int>(deadline.remaining().count()));
    for (size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents == 0) continue;
      has_answered[i] = true;
      --left;
      const auto answer = ranks_[i].receive();
      outcomes[i] =
          answer ? from_json(*answer)
                 : Outcome{Verdict::failed, ranks_[i].describe_end(), false};
    }
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (has_answered[i]) continue;
    outcomes[i] = {Verdict::failed, "timed out: did not end", false};
  }
  const auto outcome = combine(outcomes);
  if (!outcome.is_in_step) stop();
  return outcome;
}

void serve_as_rank(int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  const char* backend = std::getenv(kBackendVariable);
  const auto group = init_process_group(backend == nullptr ? "" : backend,
                                        {.timeout = kGroupTimeout});
  while (const auto message = testing::receive_message(socket)) {
    const auto seed = (*message)["seed"].get<uint64_t>();
    const auto fuzz_case =
        edited_case(draw_case(seed, group->size()),
                    (*message)["edits"].get<std::vector<size_t>>());
    testing::send_message(socket, to_json(run_on_rank(fuzz_case)));
  }
  // The campaign is over; groups and threads need no goodbye.
  ::_exit(0);
}

namespace {

// How often a feature was drawn, and what came of it.
struct Tally {
  int cases{0};
  int refused{0};
  int failed{0};
};

// Failures of one kind: the reason without its numbers.
std::string kind_of(const Outcome& outcome) {
  if (outcome.verdict != Verdict::failed) return {};
  const auto& reason = outcome.reason;
  if (reason.find(" is off by ") != std::string::npos) return "a difference";
  if (reason.find("should not be") != std::string::npos) return "not undefined";
  if (reason.find(" is missing ") != std::string::npos) return "missing";
  const auto begin = reason.find(": ");
  const auto thrown = reason.find("): ");
  return reason.substr(thrown != std::string::npos ? thrown : begin, 25);
}

void print_reduced(FuzzWorld& world, const Case& fuzz_case,
                   const Outcome& outcome) {
  const auto kind = kind_of(outcome);
  auto last = outcome;
  int runs = 0;
  const auto deadline = Deadline::after(kReductionTime);
  const auto edits =
      reduce_case(fuzz_case, [&](const std::vector<size_t>& tried) {
        if (deadline.expired()) return false;
        ++runs;
        const auto now = world.run(fuzz_case.seed, tried);
        if (kind_of(now) != kind) return false;
        last = now;
        return true;
      });
  std::printf("smallest after %zu edits, %d runs: %s\n%s\n", edits.size(), runs,
              last.reason.c_str(),
              program_of(edited_case(fuzz_case, edits), last.reason).c_str());
}

bool is_wanted(const std::set<std::string>& features,
               const CampaignOptions& options) {
  auto is_there = [&](const std::string& text) {
    return std::ranges::any_of(features, [&](const std::string& feature) {
      return feature.find(text) != std::string::npos;
    });
  };
  return std::ranges::all_of(options.with, is_there) &&
         std::ranges::none_of(options.without, is_there);
}

void print_statistics(const std::map<std::string, Tally>& tallies, int cases) {
  std::printf("%-46s %8s %6s %8s %8s\n", "feature", "cases", "%", "refused",
              "failed");
  for (const auto& [name, tally] : tallies) {
    std::printf("%-46s %8d %6.1f %8d %8d\n", name.c_str(), tally.cases,
                100.0 * tally.cases / cases, tally.refused, tally.failed);
  }
}

}  // namespace

bool run_campaign(const CampaignOptions& options) {
  FuzzWorld world(options);
  std::map<std::string, Tally> tallies;
  Tally sum;
  std::map<std::string, int> refusals;
  // Cases that passed, without the start of a world.
  std::chrono::duration<double> time{};
  int timed = 0;
  for (uint64_t seed = options.begin; seed < options.end; ++seed) {
    const auto fuzz_case = draw_case(seed, options.world_size);
    const auto features = features_of(fuzz_case);
    if (!is_wanted(features, options)) continue;
    const bool was_running = world.is_running();
    const auto begin = std::chrono::steady_clock::now();
    const auto outcome = world.run(seed, {});
    if (was_running && outcome.verdict == Verdict::passed) {
      time += std::chrono::steady_clock::now() - begin;
      ++timed;
    }
    const bool refused = outcome.verdict == Verdict::refused;
    const bool failed = outcome.verdict == Verdict::failed;
    auto count = [&](Tally& tally) {
      ++tally.cases;
      tally.refused += refused ? 1 : 0;
      tally.failed += failed ? 1 : 0;
    };
    count(sum);
    for (const auto& feature : features) count(tallies[feature]);
    if (refused) ++refusals[outcome.reason];
    if (!failed) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed),
                outcome.reason.c_str());
    if (options.prints_statistics) {
      std::printf(" ");
      for (const auto& feature : features) {
        std::printf(" [%s]", feature.c_str());
      }
      std::printf("\n");
    }
    if (options.prints_programs) {
      std::printf("%s\n", program_of(fuzz_case, outcome.reason).c_str());
    }
    std::fflush(stdout);  // reducing takes its time
    if (options.reduces) print_reduced(world, fuzz_case, outcome);
    std::fflush(stdout);
  }
  if (options.prints_statistics) print_statistics(tallies, sum.cases);
  for (const auto& [reason, count] : refusals) {
    std::printf("refused %d: %s\n", count, reason.c_str());
  }
  std::printf(
      "%s, %d ranks, seeds %llu:%llu: %d cases, %d refused, %d failed, %.0f "
      "cases/s where they pass\n",
      options.backend.c_str(), options.world_size,
      static_cast<unsigned long long>(options.begin),
      static_cast<unsigned long long>(options.end), sum.cases, sum.refused,
      sum.failed, timed > 0 ? timed / time.count() : 0);
  return sum.failed == 0;
}

}  // namespace lockstep::fuzz
