#include "lockstep/comm/agreement.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/roll_call.h"
#include "lockstep/state/digest.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::internal {
namespace {

bool is_invalid_argument(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::invalid_argument&) {
    return true;
  } catch (...) {
    return false;
  }
}

// Throws if a rank has failed, as it has told.
void throw_failure(const ProcessGroup& group, const std::vector<Object>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].contains("failed")) continue;
    const std::string words =
        c10::str("rank ", group.global_rank(static_cast<int>(rank)), ": ",
                 all[rank]["failed"].get<std::string>());
    if (all[rank]["mistake"].get<bool>()) throw std::invalid_argument(words);
    throw std::runtime_error(words);
  }
}

// `all`: lists of [name, text], by rank; null for a rank that did not come.
std::optional<Agreement::Difference> first_difference(
    const ProcessGroup& group, const std::vector<Object>& all) {
  const auto name = [](const Object& item) {
    return item[0].get<std::string>();
  };
  const auto text = [](const Object& item) {
    return item[1].get<std::string>();
  };
  const auto difference = [&](std::string what, size_t first,
                              std::string first_text, size_t rank,
                              std::string other) {
    return Agreement::Difference{
        .name = std::move(what),
        .first_rank = group.global_rank(static_cast<int>(first)),
        .first_text = std::move(first_text),
        .rank = group.global_rank(static_cast<int>(rank)),
        .text = std::move(other)};
  };
  size_t base = 0;
  while (base < all.size() && all[base].is_null()) ++base;
  if (base == all.size()) return std::nullopt;
  const Object& first = all[base];
  std::vector<std::optional<size_t>> holders(first.size());
  for (size_t rank = base; rank < all.size(); ++rank) {
    const Object& own = all[rank];
    if (own.is_null()) continue;
    for (size_t i = 0; i < std::max(first.size(), own.size()); ++i) {
      if (i == first.size()) {
        return difference(name(own[i]), base, "nothing", rank, text(own[i]));
      }
      if (i == own.size()) {
        return difference(name(first[i]), base, text(first[i]), rank,
                          "nothing");
      }
      if (own[i][0] != first[i][0]) {
        return difference(c10::str("item ", i), base,
                          name(first[i]) + " " + text(first[i]), rank,
                          name(own[i]) + " " + text(own[i]));
      }
      if (text(own[i]).empty()) continue;
      if (!holders[i]) holders[i] = rank;
      const Object& known = all[*holders[i]][i];
      if (own[i] == known) continue;
      return difference(name(own[i]), *holders[i], text(known), rank,
                        text(own[i]));
    }
  }
  return std::nullopt;
}

}  // namespace

std::string Agreement::Difference::words() const {
  return c10::str("the ranks of the group differ in ", name, ": ", first_text,
                  " on rank ", first_rank, ", ", text, " on rank ", rank);
}

Agreement::Agreement(ProcessGroupPtr group, AgreementOptions options)
    : group_(std::move(group)), options_(options) {}

void Agreement::hold(std::string name, std::string text) {
  held_.emplace_back(std::move(name), std::move(text));
}

bool Agreement::is_same() {
  Digest digest;
  for (const auto& [name, text] : held_) {
    for (const std::string& part : {name, text}) {
      digest.add(uint64_t{part.size()});
      digest.add(part);
    }
  }
  std::vector<int64_t> mine{failure_ != nullptr,
                            static_cast<int64_t>(digest.value())};
  mine.insert(mine.end(), numbers_.begin(), numbers_.end());
  told_ = gather_numbers(group_, mine, options_.timeout);
  const int64_t first = told_[0][1];
  bool same = true;
  for (auto& numbers : told_) {
    same = same && numbers[0] == 0 && numbers[1] == first;
    numbers.erase(numbers.begin(), numbers.begin() + 2);
  }
  return same;
}

std::optional<Agreement::Difference> Agreement::compare() {
  const bool in_store = options_.way != AgreementWay::collectives;
  if (!in_store && is_same()) return std::nullopt;
  Object mine = held_;
  if (failure_) {
    mine = {{"failed", words_of(failure_)},
            {"mistake", is_invalid_argument(failure_)}};
  }
  std::vector<Object> all;
  if (!in_store) {
    all =
        all_gather_object(mine, {.group = group_, .timeout = options_.timeout});
  } else {
    all = all_by_roll_call(mine);
  }
  if (failure_) std::rethrow_exception(failure_);
  throw_failure(*group_, all);
  return first_difference(*group_, all);
}

// Another rank's roll call may be that of a monitored_barrier() or of a
// compared call, whose texts begin with a line that names it; so do these.
std::vector<Object> Agreement::all_by_roll_call(const Object& mine) const {
  const char* const function = user_function();
  const std::string called =
      function == nullptr ? "a comparison between ranks" : function;
  const auto texts =
      roll_call(*group_,
                called + "\n" +
                    mine.dump(-1, ' ', false, Object::error_handler_t::replace),
                Deadline::after(options_.timeout.value_or(group_->timeout())),
                options_.way == AgreementWay::store_before_error
                    ? AfterRollCall::throws
                    : AfterRollCall::goes_on);
  std::vector<Object> all;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) {
      all.emplace_back();
      continue;
    }
    const size_t line = texts[rank].find('\n');
    if (texts[rank].substr(0, line) != called) {
      throw Disagreement(c10::str(
          called, ": rank ", group_->global_rank(static_cast<int>(rank)),
          " called ", texts[rank].substr(0, line), " instead"));
    }
    all.push_back(Object::parse(texts[rank].substr(line + 1)));
  }
  return all;
}

std::vector<std::vector<int64_t>> gather_numbers(
    const ProcessGroupPtr& group, const std::vector<int64_t>& mine,
    std::optional<std::chrono::milliseconds> timeout) {
  if (group->size() == 1) return {mine};
  const at::Tensor own =
      at::tensor(mine, at::kLong).to(group->control_device());
  at::Tensor all = at::empty({group->size(), own.numel()}, own.options());
  all_gather_into_tensor(all, own, {.group = group, .timeout = timeout});
  all = all.cpu();
  const auto* next = all.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> rows;
  for (int rank = 0; rank < group->size(); ++rank) {
    rows.emplace_back(next, next + mine.size());
    next += mine.size();
  }
  return rows;
}

}  // namespace lockstep::internal
