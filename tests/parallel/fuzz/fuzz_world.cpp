#include "tests/parallel/fuzz/fuzz_world.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>

#include <torch/torch.h>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/init.h"

namespace lockstep::internal::fuzz {
namespace {

constexpr const char* kBackendVariable = "LOCKSTEP_FUZZ_BACKEND";
// The group's timeout. It is shorter than the time of a case, so a rank that
// waits reports what it waits for.
constexpr std::chrono::seconds kGroupTimeout{2};

// Returns whether a rank has this error only because another rank failed.
bool is_consequence(const std::string& reason) {
  return reason.find("timed out") != std::string::npos ||
         reason.find("timeout") != std::string::npos ||
         reason.find("has left") != std::string::npos ||
         reason.find(" failed after ") != std::string::npos;
}

// Returns the outcome of the case. If one rank refuses it and the others fail
// because that rank does not come, the case was refused.
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

FuzzWorld::FuzzWorld(FuzzWorldOptions options) : options_(std::move(options)) {}

Outcome FuzzWorld::run(uint64_t seed, const Edits& edits) {
  if (!world_) {
    world_.emplace(options_.world_size,
                   std::vector<std::string>{std::string(kBackendVariable) +
                                            "=" + options_.backend});
  }
  auto& ranks = world_->ranks();
  for (auto& rank : ranks) rank.send({{"seed", seed}, {"edits", edits}});
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<bool> has_answered(ranks.size());
  size_t left = ranks.size();
  const auto deadline = Deadline::after(options_.case_timeout);
  while (left > 0 && !deadline.expired()) {
    std::vector<pollfd> waits;
    for (size_t i = 0; i < ranks.size(); ++i) {
      waits.push_back({has_answered[i] ? -1 : ranks[i].socket(), POLLIN, 0});
    }
    ::poll(waits.data(), waits.size(),
           static_cast<int>(deadline.remaining().count()));
    for (size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents == 0) continue;
      has_answered[i] = true;
      --left;
      const auto answer = ranks[i].receive();
      outcomes[i] =
          answer ? from_json(*answer)
                 : Outcome{Verdict::failed, ranks[i].describe_end(), false};
    }
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (has_answered[i]) continue;
    outcomes[i] = {Verdict::failed, "timed out: did not end", false};
  }
  const auto outcome = combine(outcomes);
  if (!outcome.is_in_step) world_.reset();
  return outcome;
}

void serve_as_rank(const Subject& subject, int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  const char* backend = std::getenv(kBackendVariable);
  const auto group = init_process_group(backend == nullptr ? "" : backend,
                                        {.timeout = kGroupTimeout});
  while (const auto message = testing::receive_message(socket)) {
    const auto seed = (*message)["seed"].get<uint64_t>();
    testing::send_message(
        socket, to_json(subject.run(seed, group->size(),
                                    (*message)["edits"].get<Edits>())));
  }
  // The campaign has ended; groups and threads need not be destroyed.
  ::_exit(0);
}

}  // namespace lockstep::internal::fuzz
