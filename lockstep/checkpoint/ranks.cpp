#include "lockstep/checkpoint/ranks.h"

#include <ATen/Functions.h>
#include <c10/core/GeneratorImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/number_list.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/point_to_point.h"

namespace lockstep::internal {

// Exchanges of texts by the keys "lockstep/save/ID/SAVE/CALL/RANK" of the
// group's store. A rank that gave up a save has made fewer calls in it than the
// others, so calls are counted anew in each save. It does not look at the group
// later, whose ranks may get other numbers meanwhile (reconfigure()).
class Ranks::StoreTexts {
 public:
  StoreTexts(const ProcessGroup& group, c10::intrusive_ptr<c10d::Store> store,
             const std::string& id)
      : rank_(group.rank()),
        global_ranks_(group.global_ranks()),
        timeout_(group.timeout()),
        store_(std::move(store)),
        prefix_("lockstep/save/" + id + "/") {}

  size_t rank() const { return static_cast<size_t>(rank_); }
  size_t size() const { return global_ranks_.size(); }

  void give_up() { given_up_ = true; }

  void begin_save(uint64_t number) {
    save_ = number;
    calls_ = 0;
  }

  std::vector<std::string> gather(const std::string& text) {
    // Every rank has sent its text for the last call, so it has read those of
    // the call before, and this rank's can go. If this is the first call of a
    // save, no rank reads those of the save before any more.
    const size_t still_read = calls_ > 0 ? 1 : 0;
    while (own_keys_.size() > still_read) {
      store_->deleteKey(own_keys_.front());
      own_keys_.pop_front();
    }
    const std::string prefix =
        prefix_ + std::to_string(save_) + "/" + std::to_string(++calls_) + "/";
    own_keys_.push_back(prefix + std::to_string(rank_));
    return gather_texts(
        {.store = *store_, .rank = rank_, .global_ranks = global_ranks_},
        prefix, text, Deadline::after(timeout_), [this] {
          if (!given_up_) return;
          throw c10::DistBackendError("a rank was lost during the save");
        });
  }

 private:
  const int rank_;
  const std::vector<int> global_ranks_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> given_up_{false};
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  uint64_t save_ = 0;
  uint64_t calls_ = 0;                // in this save
  std::deque<std::string> own_keys_;  // those in the store
};

Ranks Ranks::through_store() const {
  Ranks other = *this;
  if (size() > 1 && !are_imagined()) {
    // Rank 0's number tells this exchange from others of the group.
    const auto number = c10::detail::getNonDeterministicRandom();
    other.store_ = std::make_shared<StoreTexts>(
        *group_, inside(group_).store(), share(std::to_string(number), 0));
  }
  return other;
}

void Ranks::give_up() const {
  if (store_) store_->give_up();
}

void Ranks::begin_save(uint64_t number) const {
  if (store_) store_->begin_save(number);
}

Ranks::Ranks(ProcessGroupPtr group) : group_(group_if_any(std::move(group))) {}

size_t Ranks::rank() const {
  if (store_) return store_->rank();
  return group_ ? static_cast<size_t>(group_->rank()) : 0;
}

size_t Ranks::size() const {
  if (store_) return store_->size();
  return group_ ? static_cast<size_t>(group_->size()) : 1;
}

bool Ranks::are_imagined() const {
  return !store_ && size() > 1 && imagines_peers(*group_);
}

std::vector<at::Tensor> Ranks::gather(const at::Tensor& mine) const {
  if (size() == 1) return {mine};
  const at::Tensor sent = mine.to(group_->control_device());
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < size(); ++i) all.push_back(at::empty_like(sent));
  all_gather(all, sent, {.group = group_});
  for (at::Tensor& tensor : all) tensor = tensor.cpu();
  return all;
}

std::vector<nlohmann::json> Ranks::gather_objects(
    const nlohmann::json& mine) const {
  if (size() == 1) return {mine};
  if (store_) {
    std::vector<nlohmann::json> all;
    // Names of files need not be UTF-8, which the text form of JSON must be.
    const auto bytes = nlohmann::json::to_cbor(mine);
    for (const std::string& theirs :
         store_->gather({bytes.begin(), bytes.end()})) {
      all.push_back(nlohmann::json::from_cbor(theirs));
    }
    return all;
  }
  return all_gather_object(mine, {.group = group_});
}

std::vector<int64_t> Ranks::any(const std::vector<int64_t>& mine) const {
  if (size() == 1) return mine;
  at::Tensor flags = at::tensor(mine, at::kLong).to(group_->control_device());
  all_reduce(flags, {.op = ReduceOp::MAX, .group = group_});
  flags = flags.cpu();
  const auto* const values = flags.const_data_ptr<int64_t>();
  return {values, values + flags.numel()};
}

std::string Ranks::share(const std::string& text, size_t from) const {
  if (size() == 1) return text;
  if (store_) return store_->gather(rank() == from ? text : "").at(from);
  const int source = group_->global_ranks().at(from);
  const c10::Device device = group_->control_device();
  at::Tensor length =
      at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  broadcast(length, source, {.group = group_});
  at::Tensor bytes = at::zeros({length.item<int64_t>()}, at::kByte);
  if (rank() == from) {
    std::memcpy(bytes.data_ptr(), text.data(), text.size());
  }
  if (bytes.numel() == 0) return "";
  bytes = bytes.to(device);
  broadcast(bytes, source, {.group = group_});
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.data_ptr()),
          static_cast<size_t>(bytes.numel())};
}

at::Tensor Ranks::to_first(const at::Tensor& tensor, size_t from) const {
  const auto& global = group_->global_ranks();
  const at::Tensor moved = tensor.to(group_->control_device()).contiguous();
  if (rank() == from) {
    send(moved, global.front(), {.group = group_});
  } else {
    recv(moved, global.at(from), {.group = group_});
  }
  return moved.cpu();
}

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

using Json = nlohmann::json;

Json digests_of(const ReplicaChecksums& checksums) {
  Json digests = Json::object();
  for (const auto& [set, tensors] : checksums) {
    const std::string text = Json(tensors).dump();
    digests[set] = xxh3(text);
  }
  return digests;
}

void require_equal_replicas(const std::vector<Json>& digests,
                            const ReplicaChecksums& mine, const Ranks& ranks) {
  std::map<std::string, Json> known;
  std::set<std::string> different;
  for (const Json& rank : digests) {
    for (const auto& [set, digest] : rank.items()) {
      const auto& first = known.try_emplace(set, digest).first->second;
      if (first != digest) different.insert(set);
    }
  }
  if (different.empty()) return;
  Json checksums = Json::object();
  for (const auto& [set, tensors] : mine) {
    if (different.contains(set)) checksums[set] = tensors;
  }
  // Ranks with a tensor, by name and set, and by checksum.
  std::map<std::pair<std::string, std::string>,
           std::map<std::string, std::vector<size_t>>>
      holders;
  const std::vector<Json> all = ranks.gather_objects(checksums);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& [set, tensors] : all[rank].items()) {
      for (const auto& [name, checksum] : tensors.items()) {
        holders[{name, set}][checksum.get<std::string>()].push_back(rank);
      }
    }
  }
  for (auto& [tensor, by_values] : holders) {
    if (by_values.size() == 1) continue;
    std::vector<std::vector<size_t>> groups;
    for (auto& [text, same] : by_values) groups.push_back(std::move(same));
    std::sort(groups.begin(), groups.end());
    throw std::invalid_argument(
        "the tensor \"" + tensor.first +
        "\" must be equal on all ranks that have it, "
        "but its values on " +
        name_numbers("rank", groups[0]) + " differ from those on " +
        name_numbers("rank", groups[1]) +
        ", so that the result would be a mixture. "
        "Average or broadcast the tensors first, and look for the step at "
        "which they drift apart "
        "(verify_replicated())");
  }
}

}  // namespace lockstep::internal
