#include "lockstep/parallel/ddp/model_agreement.h"

#include <sstream>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

// Writes one line for each tensor, with all that the ranks must agree on.
std::string describe(const std::vector<NamedParameter>& tensors,
                     const char* kind) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    text += c10::str(kind, " '", name, "' of ", tensor.scalar_type(),
                     tensor.sizes());
    if (tensor.strides() != c10::contiguous_strides(tensor.sizes())) {
      text += c10::str(" with strides ", tensor.strides());
    }
    text += tensor.requires_grad() ? "\n" : " without grad\n";
  }
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Returns, for example, "rank 0 has parameter 'a' of Float[2], rank 2 has
// parameter 'a' of Float[3]".
std::string first_difference(int rank, const std::string& text, int other_rank,
                             const std::string& other_text) {
  auto first = split(text);
  auto other = split(other_text);
  size_t at = 0;
  while (at < first.size() && at < other.size() && first[at] == other[at]) ++at;
  auto line = [&](const auto& lines, const auto& beside) -> std::string {
    if (at < lines.size()) return lines[at];
    // "parameter" or "buffer", as in the other rank's line.
    return "no " + beside[at].substr(0, beside[at].find(' ')) + " number " +
           std::to_string(at);
  };
  return "rank " + std::to_string(rank) + " has " + line(first, other) +
         ", rank " + std::to_string(other_rank) + " has " + line(other, first);
}

// Compares the descriptions of Lockstep's ranks through the store. This needs
// no collective, which a Python rank would not join, and no waiting: each rank
// writes everything to the store before it enters the first collective of the
// constructor, and reads what the others wrote after that collective.
class Meeting {
 public:
  Meeting(std::string text, const ProcessGroupPtr& group)
      : text_(std::move(text)), group_(group) {
    // Each rank counts its own wrappers; all ranks construct them in one order.
    auto number = inside(group).store()->add(
        "ddp/wrapped/" + std::to_string(group->rank()), 1);
    store_ = c10::make_intrusive<c10d::PrefixStore>(
        "ddp/" + std::to_string(number), inside(group).store());
    Digest digest;
    digest.add(text_);
    auto mine = bytes(std::to_string(digest.value()));
    store_->add("ours", 1);
    // The first rank to arrive stores the digest with which the others compare
    // theirs. Unlike set(), add() waits until the store has answered: another
    // rank may ask as soon as this one is in the collective.
    if (store_->compareSet("digest", {}, mine) != mine) {
      store_->add("differs", 1);
    }
  }

  // Called after a collective. Returns whether all ranks are Lockstep's.
  bool is_complete() { return store_->add("ours", 0) == group_->size(); }

  // Called after a collective. Throws on every rank of Lockstep, or on none.
  void throw_if_different() {
    if (store_->add("differs", 0) == 0) return;
    // Python ranks do not take part, so with any of them this lasts until its
    // timeout.
    Deadline deadline = Deadline::after(
        std::min<std::chrono::milliseconds>(kTextsTimeout, group_->timeout()));
    auto texts = exchange(deadline);
    int first = -1;
    for (int rank = 0; rank < group_->size(); ++rank) {
      if (texts[rank].empty()) continue;
      if (first < 0) first = rank;
      if (texts[rank] == texts[first]) continue;
      fail(first_difference(group_->global_ranks()[first], texts[first],
                            group_->global_ranks()[rank], texts[rank]));
    }
    fail("rank " + std::to_string(group_->global_ranks()[group_->rank()]) +
         " could not learn how, because the other ranks have gone");
  }

  [[noreturn]] static void fail(const std::string& difference) {
    throw std::invalid_argument("the ranks' models differ: " + difference +
                                "; build the same model on every rank");
  }

 private:
  static constexpr std::chrono::seconds kTextsTimeout{5};

  static std::vector<uint8_t> bytes(const std::string& text) {
    return {text.begin(), text.end()};
  }

  std::vector<std::string> keys(const char* what) const {
    std::vector<std::string> all;
    for (int rank = 0; rank < group_->size(); ++rank) {
      all.push_back(what + std::to_string(rank));
    }
    return all;
  }

  void wait(const std::vector<std::string>& keys, const Deadline& deadline) {
    try {
      // A timeout of zero would mean: for ever.
      store_->wait(
          keys, std::max(deadline.remaining(), std::chrono::milliseconds(1)));
    } catch (const c10::Error&) {
      // The time is over, or the store's host has left: the texts that have
      // come must be enough.
    }
  }

  // Returns the texts by rank of the group; empty if a rank gave none.
  std::vector<std::string> exchange(const Deadline& deadline) {
    std::vector<std::string> texts(group_->size());
    texts[group_->rank()] = text_;
    auto text_keys = keys("text/");
    auto read_keys = keys("read/");
    try {
      store_->set(text_keys[group_->rank()], bytes(text_));
      wait(text_keys, deadline);
      for (int rank = 0; rank < group_->size(); ++rank) {
        if (rank == group_->rank() || !store_->check({text_keys[rank]})) {
          continue;
        }
        auto text = store_->get(text_keys[rank]);
        texts[rank].assign(text.begin(), text.end());
      }
      // The store ends when its host throws and exits. So each rank marks that
      // it has read the texts, and waits for all marks before it throws.
      store_->set(read_keys[group_->rank()], bytes("1"));
      wait(read_keys, deadline);
    } catch (const c10::Error&) {
      // The store's host has left.
    }
    return texts;
  }

  std::string text_;
  ProcessGroupPtr group_;
  c10::intrusive_ptr<c10d::Store> store_;
};

// The two collectives of Python's verify_params_across_processes: all ranks
// exchange the number of trained parameters, and rank 0 sends their sizes and
// strides.
class PythonsCheck {
 public:
  PythonsCheck(const std::vector<NamedParameter>& trained,
               const ProcessGroupPtr& group)
      : trained_(trained), group_(group) {}

  std::vector<int64_t> gather_counts() {
    auto mine = at::full({1}, static_cast<int64_t>(trained_.size()), options());
    std::vector<at::Tensor> all(group_->size());
    for (auto& each : all) each = at::empty_like(mine);
    all_gather(all, mine, {.group = group_});
    std::vector<int64_t> counts;
    for (auto& each : all) counts.push_back(each.item<int64_t>());
    return counts;
  }

  void verify_counts(const std::vector<int64_t>& counts) {
    for (int rank = 0; rank < group_->size(); ++rank) {
      if (counts[rank] == counts[group_->rank()]) continue;
      Meeting::fail(says(group_->rank(), counts[group_->rank()]) + ", " +
                    says(rank, counts[rank]));
    }
  }

  void verify_layouts() {
    if (trained_.empty()) return;
    std::vector<int64_t> layouts;
    for (const auto& [name, tensor] : trained_) {
      layouts.insert(layouts.end(), tensor.sizes().begin(),
                     tensor.sizes().end());
      layouts.insert(layouts.end(), tensor.strides().begin(),
                     tensor.strides().end());
    }
    auto received = at::tensor(layouts, at::kLong).to(options().device());
    broadcast(received, group_->global_ranks()[0], {.group = group_});
    received = received.cpu();
    const auto* at = received.const_data_ptr<int64_t>();
    const auto* mine = layouts.data();
    for (const auto& [name, tensor] : trained_) {
      auto length = 2 * tensor.dim();
      if (!std::equal(mine, mine + length, at)) {
        Meeting::fail(c10::str(
            rank_name(group_->rank()), " has parameter '", name, "' of ",
            tensor.sizes(), " with strides ", tensor.strides(), ", ",
            rank_name(0), " has ", c10::IntArrayRef(at, tensor.dim()),
            " with strides ", c10::IntArrayRef(at + tensor.dim(), tensor.dim()),
            " there"));
      }
      mine += length;
      at += length;
    }
  }

 private:
  at::TensorOptions options() const {
    return at::TensorOptions(at::kLong).device(
        trained_.empty() ? group_->control_device()
                         : trained_[0].tensor.device());
  }
  std::string rank_name(int rank) const {
    return "rank " + std::to_string(group_->global_ranks()[rank]);
  }
  std::string says(int rank, int64_t count) const {
    return rank_name(rank) + " has " + std::to_string(count) +
           " parameters that require grad";
  }

  const std::vector<NamedParameter>& trained_;
  const ProcessGroupPtr& group_;
};

}  // namespace

bool verify_same_model(const std::vector<NamedParameter>& parameters,
                       const std::vector<NamedParameter>& buffers,
                       const std::vector<NamedParameter>& trained,
                       const ProcessGroupPtr& group) {
  Meeting meeting(
      describe(parameters, "parameter") + describe(buffers, "buffer"), group);
  PythonsCheck check(trained, group);
  auto counts = check.gather_counts();
  meeting.throw_if_different();
  check.verify_counts(counts);
  check.verify_layouts();
  return meeting.is_complete();
}

}  // namespace lockstep::internal
