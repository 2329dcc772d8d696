#include "lockstep/cli/report/scaling_cases.h"

#include <cstdint>
#include <limits>
#include <stdexcept>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr std::string_view kNproc = "{nproc}";
constexpr std::string_view kBatch = "{batch:";
constexpr std::string_view kGlobalBatch = "{global_batch:";

int64_t batch_of(std::string_view placeholder, std::string_view number,
                 Scaling scaling, ScalingSide side, int nproc) {
  const int64_t batch =
      parse_int(placeholder, number, 1, std::numeric_limits<int32_t>::max());
  const bool of_all =
      placeholder == kGlobalBatch || side == ScalingSide::threads;
  if (scaling == Scaling::weak) return of_all ? batch * nproc : batch;
  if (of_all) return batch;
  if (batch % nproc != 0) {
    throw std::invalid_argument(
        std::string(placeholder) + std::string(number) +
        "} cannot be divided by " + std::to_string(nproc) +
        " processes for strong scaling; give a multiple of every --nproc");
  }
  return batch / nproc;
}

}  // namespace

std::string_view name_of(Scaling scaling) {
  return scaling == Scaling::weak ? "weak" : "strong";
}

std::string_view name_of(ScalingSide side) {
  switch (side) {
    case ScalingSide::ranks:
      return "ranks";
    case ScalingSide::threads:
      return "threads";
    case ScalingSide::compared:
      return "compared";
  }
  return "";
}

std::string ScalingCase::label() const {
  const std::string number = std::to_string(nproc);
  switch (side) {
    case ScalingSide::ranks:
      return number + (nproc == 1 ? " rank" : " ranks");
    case ScalingSide::threads:
      return "1 process, " + number + " threads";
    case ScalingSide::compared:
      return "compared, " + number;
  }
  return "";
}

std::string expand(std::string_view text, Scaling scaling, ScalingSide side,
                   int nproc) {
  std::string expanded;
  while (!text.empty()) {
    if (text.starts_with(kNproc)) {
      expanded += std::to_string(nproc);
      text.remove_prefix(kNproc.size());
      continue;
    }
    bool replaced = false;
    for (const std::string_view placeholder : {kBatch, kGlobalBatch}) {
      const size_t end = text.find('}');
      if (!text.starts_with(placeholder) || end == std::string_view::npos) {
        continue;
      }
      const auto number =
          text.substr(placeholder.size(), end - placeholder.size());
      expanded +=
          std::to_string(batch_of(placeholder, number, scaling, side, nproc));
      text.remove_prefix(end + 1);
      replaced = true;
      break;
    }
    if (replaced) continue;
    expanded += text.front();
    text.remove_prefix(1);
  }
  return expanded;
}

bool has_batch(std::string_view text) {
  return text.find(kBatch) != std::string_view::npos ||
         text.find(kGlobalBatch) != std::string_view::npos;
}

std::vector<ScalingCase> cases_of(const ScalingPlan& plan) {
  std::vector<ScalingCase> cases;
  const auto add = [&](Scaling scaling, ScalingSide side, int nproc) {
    std::vector<std::string> command;
    if (side == ScalingSide::compared) {
      command = {"/bin/sh", "-c", expand(plan.compare, scaling, side, nproc)};
    } else {
      for (const auto& word : plan.command) {
        command.push_back(expand(word, scaling, side, nproc));
      }
    }
    cases.push_back({.scaling = scaling,
                     .side = side,
                     .nproc = nproc,
                     .command = std::move(command)});
  };
  const auto add_all = [&](Scaling scaling, bool of_command, bool of_compare) {
    for (const int nproc : plan.nproc) {
      const bool is_common = nproc == 1 && scaling == Scaling::strong;
      if (of_command && !is_common) add(scaling, ScalingSide::ranks, nproc);
      if (of_command && nproc > 1) add(scaling, ScalingSide::threads, nproc);
      if (of_compare && !is_common) {
        add(scaling, ScalingSide::compared, nproc);
      }
    }
  };
  add_all(Scaling::weak, true, !plan.compare.empty());
  bool strong = false;
  for (const auto& word : plan.command) strong = strong || has_batch(word);
  if (strong) add_all(Scaling::strong, true, has_batch(plan.compare));
  return cases;
}

}  // namespace lockstep::internal
