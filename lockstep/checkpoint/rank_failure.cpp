#include "lockstep/checkpoint/rank_failure.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/base/number_list.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/comm/errors.h"

namespace lockstep::internal {

using Json = nlohmann::json;

ThrowForOthers failed_save(const std::string& path,
                           const std::string& outcome) {
  return [=](const std::string& words, bool is_mistake) {
    const SnapshotError error(path, outcome + ": " + words, "");
    if (is_mistake) throw std::invalid_argument(error.what());
    throw error;
  };
}

ThrowForOthers failed_load(const std::string& path) {
  return [=](const std::string& words, bool /*is_mistake*/) {
    throw SnapshotError(path, "was loaded by no rank: " + words, "");
  };
}

std::vector<Json> gather_or_fail(const Ranks& ranks,
                                 const std::function<void(Json&)>& collect,
                                 const ThrowForOthers& throw_for_others) {
  Json mine = Json::object();
  std::exception_ptr failure;
  const auto fail = [&](bool is_mistake) {
    failure = std::current_exception();
    mine = {{"failed", words_of(failure)}, {"is_mistake", is_mistake}};
  };
  try {
    collect(mine);
  } catch (const std::invalid_argument&) {
    fail(true);
  } catch (...) {
    fail(false);
  }
  auto all = ranks.gather_objects(mine);
  if (failure) std::rethrow_exception(failure);
  std::vector<size_t> failed;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].contains("failed")) failed.push_back(rank);
  }
  if (!failed.empty()) {
    const Json& first = all[failed.front()];
    throw_for_others(name_numbers("rank", failed) + ": " +
                         first.at("failed").get<std::string>(),
                     first.at("is_mistake").get<bool>());
  }
  return all;
}

std::string from_first_rank(const Ranks& ranks,
                            const std::function<std::string()>& work,
                            const ThrowForOthers& throw_for_others) {
  const auto all = gather_or_fail(
      ranks,
      [&](Json& mine) {
        if (ranks.rank() == 0) mine["result"] = work();
      },
      throw_for_others);
  return all.front().value("result", "");  // "": rank 0 is imagined
}

}  // namespace lockstep::internal
