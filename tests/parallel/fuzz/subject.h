#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::internal::fuzz {

enum class Verdict { passed, refused, failed };

struct Outcome {
  Verdict verdict{Verdict::passed};
  std::string reason{};
  // Whether this rank took part in every operation of the case, so that the
  // next case can run in the same process group.
  bool is_in_step{true};
};

// A kind of random cases, as functions of a type `Case` that holds one as plain
// data.
template <class Case>
struct CaseKind {
  Case (*draw)(uint64_t seed, int world_size);
  // Returns all cases that are one edit smaller, in a fixed order.
  std::vector<Case> (*smaller)(const Case&);
  // Returns what is special in the case.
  std::set<std::string> (*features)(const Case&);
  // Returns the case as a program that a person can read.
  std::string (*program)(const Case&, const std::string& reason);
  // Runs it on this rank of the default group. Collective.
  Outcome (*run)(const Case&);
};

// The numbers of the edits that make a case smaller. A case is named by its
// seed, the number of ranks and its edits, which is all that the ranks receive.
using Edits = std::vector<size_t>;
using StillFails = std::function<bool(const Edits&)>;

// The same for a campaign, which knows cases by their names only.
struct Subject {
  std::function<std::set<std::string>(uint64_t seed, int world_size)> features;
  std::function<std::string(uint64_t seed, int world_size, const Edits&,
                            const std::string& reason)>
      program;
  // Returns edits that keep the case failing.
  std::function<Edits(uint64_t seed, int world_size, const StillFails&)> reduce;
  std::function<Outcome(uint64_t seed, int world_size, const Edits&)> run;
};

// Adds edits as long as `still_fails` returns true.
template <class Case>
Edits reduce_case(const CaseKind<Case>& kind, const Case& whole,
                  const StillFails& still_fails) {
  Edits edits;
  auto smaller = kind.smaller(whole);
  // Ends after a whole pass in which no smaller case fails.
  size_t next = 0;
  for (size_t passed = 0; passed < smaller.size(); ++next) {
    if (next >= smaller.size()) next = 0;
    edits.push_back(next);
    if (still_fails(edits)) {
      smaller = kind.smaller(Case(smaller[next]));
      passed = 0;
      --next;  // the next edit has this number now
    } else {
      edits.pop_back();
      ++passed;
    }
  }
  return edits;
}

template <class Case>
Subject subject_of(const CaseKind<Case>& kind) {
  const auto edited = [kind](uint64_t seed, int world_size,
                             const Edits& edits) {
    Case one = kind.draw(seed, world_size);
    for (size_t edit : edits) one = kind.smaller(one).at(edit);
    return one;
  };
  return {
      .features =
          [=](uint64_t seed, int world_size) {
            return kind.features(edited(seed, world_size, {}));
          },
      .program =
          [=](uint64_t seed, int world_size, const Edits& edits,
              const std::string& reason) {
            return kind.program(edited(seed, world_size, edits), reason);
          },
      .reduce =
          [=](uint64_t seed, int world_size, const StillFails& still_fails) {
            return reduce_case(kind, edited(seed, world_size, {}), still_fails);
          },
      .run =
          [=](uint64_t seed, int world_size, const Edits& edits) {
            return kind.run(edited(seed, world_size, edits));
          }};
}

}  // namespace lockstep::internal::fuzz
