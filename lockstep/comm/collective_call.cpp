#include "lockstep/comm/collective_call.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "lockstep/comm/buffers.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/worker/error_file.h"
#include "lockstep/worker/flight_dump.h"

namespace lockstep::internal {
namespace {

// " to rank 3", " from any rank"; empty for a collective.
std::string other_end(const Call& call) {
  const std::string_view name = call.operation;
  const bool sends = name == "send" || name == "isend";
  if (!sends && name != "recv" && name != "irecv") return {};
  const char* const word = sends ? " to " : " from ";
  if (call.peer >= 0) return word + ("rank " + std::to_string(call.peer));
  return sends ? "" : " from any rank";
}

// Returns Call::where() with `end` after the operation.
std::string place_of(const Call& call, const std::string& end) {
  const auto& group = *call.group;
  const int global = group.global_rank(group.rank());
  std::string text = call.operation + end;
  if (call.number > 0) text += " #" + std::to_string(call.number);
  text += " in group '" + group.name() + "' on rank " + std::to_string(global);
  const auto size = " of " + std::to_string(group.size());
  if (group.name() == kDefaultGroupName) return text + size;
  return text + " (member " + std::to_string(group.rank()) + size + ")";
}

// Returns the peers that are gone and because of which an operation may have
// failed. A connection breaks before it is known that the peer's process is
// gone, so this waits a little for that, but not if the operation ran out of
// time.
std::string peers_behind(const ProcessGroup& group, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kConnectionFirst{300};
  constexpr std::chrono::milliseconds kPause{10};
  const auto known = Deadline::after(kConnectionFirst);
  std::string gone = group.failed_peers();
  while (gone.empty() && !inside(group).hears_departures() &&
         !deadline.expired() && !known.expired()) {
    std::this_thread::sleep_for(kPause);
    gone = group.failed_peers();
  }
  return gone;
}

// Whether this rank would have failed even if all its peers were well: the
// ranks disagree, or the backend refused what it was given.
bool is_own_failure(const std::exception& error) {
  if (dynamic_cast<const Disagreement*>(&error) != nullptr) return true;
  if (dynamic_cast<const std::logic_error*>(&error) != nullptr) return true;
  return dynamic_cast<const c10::Error*>(&error) != nullptr &&
         dynamic_cast<const c10::DistError*>(&error) == nullptr;
}

}  // namespace

const char* op_name(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return "SUM";
    case c10d::ReduceOp::AVG:
      return "AVG";
    case c10d::ReduceOp::PRODUCT:
      return "PRODUCT";
    case c10d::ReduceOp::MIN:
      return "MIN";
    case c10d::ReduceOp::MAX:
      return "MAX";
    case c10d::ReduceOp::BAND:
      return "BAND";
    case c10d::ReduceOp::BOR:
      return "BOR";
    case c10d::ReduceOp::BXOR:
      return "BXOR";
    default:
      return nullptr;
  }
}

Call::Call(const char* name, const ProcessGroupPtr& given,
           std::optional<std::chrono::milliseconds> allowed)
    : operation(name),
      group(group_or_default(given)),
      timeout(bounded_timeout(allowed.value_or(group->timeout()))) {
  inside(group).require_own_process();
  if (allowed && *allowed <= std::chrono::milliseconds(0)) {
    throw mistake(c10::str("timeout is ", allowed->count(),
                           " ms; give more than 0, or none for the group's, ",
                           group->timeout().count(), " ms"));
  }
}

void Call::take_numbers() {
  number = inside(group).next_sequence_number();
  entry = inside(group).next_entry();
}

std::string Call::where() const { return place_of(*this, {}); }

std::invalid_argument Call::mistake(const std::string& text) const {
  return std::invalid_argument(where() + ": " + text);
}

void Call::fail(const Deadline& deadline, const std::exception& error,
                const std::string& more) const {
  const auto elapsed = deadline.elapsed();
  const auto cause = words_of(error) + more;
  const bool own = is_own_failure(error);
  const auto gone = own ? std::string() : peers_behind(*group, deadline);
  const bool said = gone.empty() || inside(group).hears_departures() ||
                    cause.find(gone) != cause.npos;
  const auto text =
      c10::str(place_of(*this, other_end(*this)), " failed after ",
               elapsed.count(), " ms (allowed ", deadline.allowed().count(),
               " ms): ", cause, said ? "" : "; " + gone);
  // If the backend does not say which peer is gone, a connection that broke is
  // the sign of a peer that failed, maybe on another host.
  const bool broken =
      !own && !inside(group).hears_departures() && !deadline.expired();
  if (!gone.empty() || broken) note_failure(FailureKind::echo, text);
  if (!gone.empty()) {
    // This rank may end now: then it is not the one to blame, in any group.
    inside(group).keep_cause(gone);
    for (const auto& other : existing_groups().groups) {
      inside(other).keep_cause(gone);
    }
  }
  throw c10::DistBackendError(text + record_failure(*inside(group).flight()));
}

c10d::Backend& Call::backend(c10::DeviceType device) const {
  on_stream = device != c10::kCPU;
  try {
    return inside(group).backend(device);
  } catch (const std::invalid_argument& error) {
    throw mistake(error.what());
  }
}

int Call::member(const char* argument, int global_rank) const {
  peer = global_rank;
  try {
    return group->group_rank(global_rank);
  } catch (const std::invalid_argument& error) {
    throw mistake(std::string(argument) + ": " + error.what());
  }
}

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

std::string describe(at::TensorList list) {
  std::string text;
  for (const auto& tensor : list) {
    text += (text.empty() ? "" : ", ") + describe(tensor);
  }
  return text;
}

void require_dense(const Call& call, const char* argument,
                   const at::Tensor& tensor) {
  if (!tensor.defined()) {
    throw call.mistake(std::string(argument) + " is undefined");
  }
  if (tensor.layout() != c10::kStrided) {
    throw call.mistake(c10::str(argument, " is sparse (", tensor.layout(),
                                "); give a dense one: tensor.to_dense()"));
  }
  if (tensor.is_quantized()) {
    throw call.mistake(c10::str(
        argument, " is quantized (", tensor.scalar_type(),
        "); give its int_repr(), and its scale and zero point separately"));
  }
}

void require_list(const Call& call, const char* argument, at::TensorList list,
                  const at::Tensor& like) {
  if (static_cast<int>(list.size()) != call.group->size()) {
    throw call.mistake(c10::str(argument, " holds ", list.size(),
                                " tensors; give one for each rank (",
                                call.group->size(), ")"));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    auto name = c10::str(argument, "[", i, "]");
    require_dense(call, name.c_str(), list[i]);
    if (list[i].scalar_type() != like.scalar_type() ||
        list[i].device() != like.device()) {
      throw call.mistake(c10::str(name, " is ", list[i].scalar_type(), " on ",
                                  list[i].device(), ", others are ",
                                  like.scalar_type(), " on ", like.device(),
                                  "; give one dtype and device"));
    }
  }
}

void require_shape(const Call& call, const char* argument,
                   const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() != like.sizes()) {
    throw call.mistake(c10::str(argument, " has shape ", tensor.sizes(),
                                "; it must be ", like.sizes()));
  }
}

void require_reducible(const Call& call, const c10d::ReduceOp& op,
                       at::ScalarType dtype) {
  const char* name = op_name(op);
  if (name == nullptr) {
    throw call.mistake(
        "this reduce operation is not supported; allowed are SUM, AVG, "
        "PRODUCT, MIN, MAX, BAND, BOR, BXOR");
  }
  call.reduce_op = name;
  auto refuse = [&](const char* allowed, const char* advice) {
    return call.mistake(c10::str(name, " is for ", allowed,
                                 " tensors, this one is ", dtype, "; ",
                                 advice));
  };
  if (!known_to_backends(reduced_as(dtype)) && !c10::isComplexType(dtype)) {
    throw call.mistake(
        c10::str("a tensor of ", dtype, " cannot be reduced; convert it: ",
                 c10::isQIntType(dtype)       ? "tensor.dequantize()"
                 : c10::isFloatingType(dtype) ? "tensor.to(torch::kHalf)"
                                              : "tensor.to(torch::kLong)"));
  }
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      if (dtype == at::kBool) {
        throw refuse("numeric", "use MAX for any, MIN for all");
      }
      return;
    case c10d::ReduceOp::AVG:
      if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) {
        throw refuse("floating-point", "use SUM and divide");
      }
      return;
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
      if (!c10::isIntegralType(dtype, /*includeBool=*/true)) {
        throw refuse("integer and bool", "view it as an integer type first");
      }
      return;
    default:
      if (c10::isComplexType(dtype)) {
        throw refuse("real", "reduce torch::view_as_real(tensor)");
      }
  }
}

}  // namespace lockstep::internal
