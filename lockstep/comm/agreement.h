#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// How the ranks of an Agreement exchange what they hold.
enum class AgreementWay : uint8_t {
  // One all_gather of 16 bytes. Only if the ranks do not agree does an
  // all_gather_object() of the texts follow.
  collectives,
  // One roll_call() of all texts, which needs no backend and names the ranks
  // that do not come.
  store,
  // The same, for ranks that know that they differ and will all throw: see
  // AfterRollCall::throws. A rank that does not come in time, as one of
  // Python's, is not compared.
  store_before_error,
};

struct AgreementOptions {
  AgreementWay way{AgreementWay::collectives};
  // None means that of the group.
  std::optional<std::chrono::milliseconds> timeout{};
};

// Makes sure that all ranks of a group hold the same (options, the shapes of a
// model, the arguments of a call), or that all of them throw. If one rank threw
// alone, the others would wait for it in their next collective.
//
//   Agreement agreement(group);
//   agreement.hold("the batch size", std::to_string(batch_size));
//   if (const auto difference = agreement.compare()) {
//     throw std::invalid_argument(difference->words() + "; give all the same");
//   }
//
// Every rank of the group makes one, calls hold() for the same names in the
// same order, and calls compare() or is_same() once. Python's ranks cannot
// take part. One thread at a time. docs/internals/architecture.md lists the
// comparisons that are made otherwise.
class Agreement {
 public:
  // A rank, the first that holds something else than a rank before it. Ranks
  // are those of the default group.
  struct Difference {
    std::string name;  // what they hold
    int first_rank;
    std::string first_text;
    int rank;
    std::string text;

    // Returns "the ranks of the group differ in the batch size: 4 on rank 0, 8
    // on rank 1". What a rank lacks is "nothing".
    std::string words() const;
  };

  explicit Agreement(ProcessGroupPtr group, AgreementOptions options = {});

  // Says what this rank holds under `name`. With an empty text, this rank is
  // not compared.
  void hold(std::string name, std::string text);

  // Numbers that may differ and travel with the comparison, as many on all
  // ranks; only for AgreementWay::collectives. Call it once at most.
  void tell(std::vector<int64_t> numbers) { numbers_ = std::move(numbers); }

  // Says how this rank has failed; null if it has not.
  void fail(std::exception_ptr failure) { failure_ = std::move(failure); }

  // Collective. Returns on all ranks the same difference, or nothing. If a rank
  // has failed, it throws its own exception, and the others throw "rank 1: "
  // and its words: std::invalid_argument if it was one, else
  // std::runtime_error. Through the store, a rank that is in another call is a
  // Disagreement that names it.
  std::optional<Difference> compare();

  // Collective, by AgreementWay::collectives. Returns whether compare() would
  // return nothing, without the exchange of texts. An empty text is compared.
  bool is_same();

  // After compare() or is_same(): what each rank has told, by rank.
  const std::vector<std::vector<int64_t>>& told() const { return told_; }

 private:
  std::vector<Object> all_by_roll_call(const Object& mine) const;

  const ProcessGroupPtr group_;
  const AgreementOptions options_;
  std::vector<std::pair<std::string, std::string>> held_;  // names and texts
  std::vector<int64_t> numbers_;
  std::exception_ptr failure_;
  std::vector<std::vector<int64_t>> told_;
};

// Collective: one all_gather. Returns every rank's numbers, by rank; there must
// be as many on all ranks.
std::vector<std::vector<int64_t>> gather_numbers(
    const ProcessGroupPtr& group, const std::vector<int64_t>& mine,
    std::optional<std::chrono::milliseconds> timeout = std::nullopt);

}  // namespace lockstep::internal
