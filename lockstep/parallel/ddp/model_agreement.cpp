#include "lockstep/parallel/ddp/model_agreement.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/own_device.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

// Returns one line for each option, with its value.
std::vector<std::string> describe(const DistributedDataParallelOptions& all) {
  std::vector<std::string> lines;
  const auto add = [&](const char* name, const auto& value) {
    lines.push_back(c10::str(name, " = ", value));
  };
  const auto text = [](const auto& value) {
    return value ? c10::str(*value) : std::string("none");
  };
  add("broadcast_buffers", all.broadcast_buffers);
  add("forward_sync_buffers", text(all.forward_sync_buffers));
  add("bucket_cap_mb", text(all.bucket_cap_mb));
  add("first_bucket_mb", text(all.first_bucket_mb));
  add("gradient_as_bucket_view", all.gradient_as_bucket_view);
  add("place_gradients", all.place_gradients);
  add("find_unused_parameters", all.find_unused_parameters);
  add("static_graph", all.static_graph);
  add("skip_all_reduce_unused_params", all.skip_all_reduce_unused_params);
  const std::set<std::string> ignored(all.params_and_buffers_to_ignore.begin(),
                                      all.params_and_buffers_to_ignore.end());
  add("params_and_buffers_to_ignore", "{" + c10::Join(", ", ignored) + "}");
  const auto mixed = all.mixed_precision.value_or(MixedPrecision());
  add("mixed_precision.param_dtype", text(mixed.param_dtype));
  add("mixed_precision.reduce_dtype", text(mixed.reduce_dtype));
  add("mixed_precision.buffer_dtype", text(mixed.buffer_dtype));
  add("check_for_nan_in_grad", all.check_for_nan_in_grad);
  add("check_replicas_every", all.check_replicas_every);
  return lines;
}

// Returns one line for each tensor, with all that the ranks must agree on.
std::vector<std::string> describe(const std::vector<NamedParameter>& parameters,
                                  const std::vector<NamedParameter>& buffers,
                                  const ProcessGroup& group) {
  std::vector<std::string> lines;
  const auto add = [&](const char* kind, const NamedParameter& named) {
    const auto& [name, tensor] = named;
    std::string line = c10::str(kind, " '", name, "' of ", tensor.scalar_type(),
                                tensor.sizes());
    if (tensor.strides() != c10::contiguous_strides(tensor.sizes())) {
      line += c10::str(" with strides ", tensor.strides());
    }
    line += words_of_other_device(tensor, group);
    lines.push_back(line + (tensor.requires_grad() ? "" : " without grad"));
  };
  for (const auto& parameter : parameters) add("parameter", parameter);
  for (const auto& buffer : buffers) add("buffer", buffer);
  return lines;
}

// Compares the descriptions of Lockstep's ranks through the store. This is not
// an Agreement until a difference is known, because a Python rank would not
// take part. It needs no waiting: each rank writes to the store before it
// enters the first collective of the constructor, and reads what the others
// wrote after that collective.
class Meeting {
 public:
  Meeting(std::vector<std::string> options, std::vector<std::string> tensors,
          const ProcessGroupPtr& group)
      : lines_(std::move(options)), options_(lines_.size()), group_(group) {
    std::ranges::move(tensors, std::back_inserter(lines_));
    // Each rank counts its own wrappers; all ranks construct them in one order.
    auto number = inside(group).store()->add(
        "ddp/wrapped/" + std::to_string(group->rank()), 1);
    store_ = c10::make_intrusive<c10d::PrefixStore>(
        "ddp/" + std::to_string(number), inside(group).store());
    Digest digest;
    for (const auto& line : lines_) digest.add(line + "\n");
    const auto mine = std::to_string(digest.value());
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
    Agreement agreement(group_, {.way = AgreementWay::store_before_error,
                                 .timeout = std::min<std::chrono::milliseconds>(
                                     kTextsTimeout, group_->timeout())});
    for (size_t i = 0; i < lines_.size(); ++i) {
      agreement.hold(std::to_string(i), lines_[i]);
    }
    std::optional<Agreement::Difference> found;
    std::string why = ", because the other ranks have gone";
    try {
      found = agreement.compare();
    } catch (const std::exception&) {
      why = ": " + words_of(std::current_exception());
    }
    if (!found) {
      fail(c10::str("rank ", group_->global_rank(group_->rank()),
                    " could not learn how", why));
    }
    if (std::stoul(found->name) < options_) {
      throw std::invalid_argument(
          c10::str("the ranks' options differ: rank ", found->first_rank,
                   " has ", found->first_text, ", rank ", found->rank, " has ",
                   found->text, "; give all ranks the same options"));
    }
    // A line that one rank lacks is a parameter or a buffer, as the other's.
    const auto line = [&](const std::string& text, const std::string& other) {
      return text != "nothing"
                 ? text
                 : c10::str("no ", other.substr(0, other.find(' ')), " number ",
                            std::stoul(found->name) - options_);
    };
    fail(c10::str("rank ", found->first_rank, " has ",
                  line(found->first_text, found->text), ", rank ", found->rank,
                  " has ", line(found->text, found->first_text)));
  }

  [[noreturn]] static void fail(const std::string& difference) {
    throw std::invalid_argument("the ranks' models differ: " + difference +
                                "; build the same model on every rank");
  }

 private:
  static constexpr std::chrono::seconds kTextsTimeout{5};

  std::vector<std::string> lines_;
  const size_t options_;  // the number of lines that describe options
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
    if (trained_.empty()) {
      return at::TensorOptions(at::kLong).device(group_->control_device());
    }
    // If the parameters are on a device that the group does not take, all ranks
    // must learn it after this collective.
    const auto device = trained_[0].tensor.device();
    return at::TensorOptions(at::kLong).device(
        bound_device(*group_, device.type()).value_or(device));
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

bool verify_same_model(const DistributedDataParallelOptions& options,
                       const std::vector<NamedParameter>& parameters,
                       const std::vector<NamedParameter>& buffers,
                       const std::vector<NamedParameter>& trained) {
  const ProcessGroupPtr& group = options.process_group;
  Meeting meeting(describe(options), describe(parameters, buffers, *group),
                  group);
  PythonsCheck check(trained, group);
  auto counts = check.gather_counts();
  meeting.throw_if_different();
  check.verify_counts(counts);
  check.verify_layouts();
  return meeting.is_complete();
}

}  // namespace lockstep::internal
