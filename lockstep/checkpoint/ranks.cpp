#include "lockstep/checkpoint/ranks.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"

namespace lockstep::internal {

Ranks::Ranks(ProcessGroupPtr group) : group_(std::move(group)) {
  if (!group_ && is_initialized()) group_ = default_group();
}

size_t Ranks::rank() const {
  return group_ ? static_cast<size_t>(group_->rank()) : 0;
}

size_t Ranks::size() const {
  return group_ ? static_cast<size_t>(group_->size()) : 1;
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
  return all_gather_object(mine, {.group = group_});
}

std::string Ranks::share(const std::string& text, size_t from) const {
  if (size() == 1) return text;
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

std::string words_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

std::string list_of_ranks(const std::vector<size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace lockstep::internal
