#include "lockstep/parallel/ddp/module_state.h"

#include <sstream>
#include <stdexcept>

#include <ATen/ATen.h>

#include "lockstep/comm/collectives.h"

namespace lockstep {
namespace {

constexpr int64_t kPieceBytes = 25 << 20;

std::vector<std::string> describe(const std::vector<NamedParameter>& tensors,
                                  const char* kind) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(c10::str(kind, " '", name, "' of ", tensor.scalar_type(),
                             tensor.sizes(),
                             tensor.requires_grad() ? "" : " without grad"));
  }
  return lines;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// FNV-1a: the same on every platform, unlike std::hash.
int64_t digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return static_cast<int64_t>(hash);
}

std::vector<at::Tensor> gather(const at::Tensor& tensor,
                               const ProcessGroupPtr& group) {
  auto on_device = tensor.to(group->control_device());
  std::vector<at::Tensor> all;
  for (int i = 0; i < group->size(); ++i) {
    all.push_back(at::empty_like(on_device));
  }
  all_gather(all, on_device, {.group = group});
  for (auto& each : all) each = each.cpu();
  return all;
}

// Every rank's text, by two gathers: of the lengths, and of the padded bytes.
std::vector<std::string> gather_texts(const std::string& text,
                                      const ProcessGroupPtr& group) {
  auto size = static_cast<int64_t>(text.size());
  int64_t longest = 0;
  std::vector<int64_t> sizes;
  for (auto& each : gather(at::full({1}, size, at::kLong), group)) {
    sizes.push_back(each.item<int64_t>());
    longest = std::max(longest, sizes.back());
  }
  auto padded = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), padded.data_ptr<uint8_t>());
  auto all = gather(padded, group);
  std::vector<std::string> texts;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto* data = all[i].const_data_ptr<uint8_t>();
    texts.emplace_back(data, data + sizes[i]);
  }
  return texts;
}

}  // namespace

void verify_same_across_ranks(const std::vector<NamedParameter>& tensors,
                              const char* kind, const ProcessGroupPtr& group) {
  auto mine = join(describe(tensors, kind));
  auto key =
      at::tensor({static_cast<int64_t>(mine.size()), digest(mine)}, at::kLong);
  bool same = true;
  // Every rank sees the same digests, so all of them go on to the next gather
  // or none does.
  auto keys = gather(key, group);
  for (auto& each : keys) same = same && each.equal(keys[0]);
  if (same) return;
  auto texts = gather_texts(mine, group);
  auto first = split(texts[0]);
  for (int rank = 1; rank < group->size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    auto other = split(texts[rank]);
    size_t at = 0;
    while (at < first.size() && at < other.size() && first[at] == other[at]) {
      ++at;
    }
    auto line = [&](const std::vector<std::string>& lines) {
      return at < lines.size()
                 ? lines[at]
                 : "no " + std::string(kind) + " number " + std::to_string(at);
    };
    throw std::invalid_argument(
        "the ranks' models differ: rank " +
        std::to_string(group->global_ranks()[0]) + " has " + line(first) +
        ", rank " + std::to_string(group->global_ranks()[rank]) + " has " +
        line(other) + "; build the same model on every rank");
  }
}

void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src,
                         const ProcessGroupPtr& group) {
  std::vector<at::Tensor> piece;
  int64_t piece_bytes = 0;
  auto send = [&] {
    if (piece.empty()) return;
    std::vector<at::Tensor> flat;
    for (auto& tensor : piece) {
      flat.push_back(tensor.contiguous().view({-1}).view(at::kByte));
    }
    auto joined = flat.size() == 1 ? flat[0].clone() : at::cat(flat);
    broadcast(joined, src, {.group = group});
    int64_t offset = 0;
    for (size_t i = 0; i < piece.size(); ++i) {
      auto bytes = joined.narrow(0, offset, flat[i].numel());
      offset += flat[i].numel();
      // A copy of its own: a dtype cannot be viewed at an odd offset.
      piece[i].copy_(
          bytes.clone().view(piece[i].scalar_type()).view(piece[i].sizes()));
    }
    piece.clear();
    piece_bytes = 0;
  };
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    auto detached = tensor.detach();
    if (!piece.empty() &&
        (piece[0].device() != detached.device() || piece_bytes > kPieceBytes)) {
      send();
    }
    piece.push_back(detached);
    piece_bytes += static_cast<int64_t>(detached.nbytes());
  }
  send();
}

}  // namespace lockstep
