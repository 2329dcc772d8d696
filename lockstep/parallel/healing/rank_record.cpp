#include "lockstep/parallel/healing/rank_record.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"

namespace lockstep::internal {
namespace {

void add_buffers(const torch::nn::Module& module, std::vector<at::Tensor>& to) {
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) to.push_back(buffer.detach());
  }
}

std::vector<at::Tensor> buffers_of_model(const TrainingState& state) {
  std::vector<at::Tensor> all;
  add_buffers(*state.model, all);
  return all;
}

// The buffers of the modules beside TrainingState::model.
std::vector<at::Tensor> buffers_of_items(const TrainingState& state) {
  std::vector<at::Tensor> all;
  for (const auto& [name, item] : state.items) {
    if (item.module()) add_buffers(*item.module(), all);
  }
  return all;
}

}  // namespace

RankRecord::RankRecord(const FileDescriptor& memory, const TrainingState& state,
                       TrainedParameters& parameters)
    : state_(state), parameters_(parameters), record_(memory, 0, kSlots) {}

std::vector<at::Tensor> RankRecord::buffers() const {
  auto all = buffers_of_model(state_);
  const auto more = buffers_of_items(state_);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

RankRecord::Mark RankRecord::mark() const {
  return {.generators = generator_state(state_.model.get()),
          .buffers = TrainedParameters::marks_of(buffers_of_model(state_)),
          .of_items = TrainedParameters::marks_of(buffers_of_items(state_))};
}

std::string RankRecord::changed_items(const Mark& mark) const {
  const auto now = TrainedParameters::marks_of(buffers_of_items(state_));
  std::string changed(now.size(), '1');
  for (size_t at = 0; at < std::min(now.size(), mark.of_items.size()); ++at) {
    if (now[at] == mark.of_items[at]) changed[at] = '0';
  }
  return changed;
}

bool RankRecord::differs_from(const Mark& mark) const {
  const Mark now = this->mark();
  return now.buffers != mark.buffers ||
         !at::equal(now.generators, mark.generators);
}

// A record holds, in this order: its Moment; the number of calls; which
// gradients are kept and which were recorded (trained_parameters.h); what
// wrappers know (reconfigure.h); generators; buffers; gradients.
void RankRecord::write(int64_t steps, int64_t calls, Moment moment) {
  auto tensors = buffers();
  tensors.insert(tensors.begin(), generator_state(state_.model.get()));
  std::string marks;
  for (auto& gradient : parameters_.gradients_to_record(marks)) {
    tensors.push_back(std::move(gradient));
  }
  std::string kept = parameters_.kept();
  kept.resize(marks.size(), '0');
  const std::string wrappers = memory_to_reconfigure();
  std::vector<PlaceRecord::Bytes> parts = {
      std::as_bytes(std::span(&moment, 1)), std::as_bytes(std::span(&calls, 1)),
      std::as_bytes(std::span(kept)), std::as_bytes(std::span(marks)),
      std::as_bytes(std::span(wrappers))};
  for (auto& tensor : tensors) {
    tensor = file_form(tensor);
    parts.push_back(
        {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  }
  record_.write(steps, parts);
}

bool RankRecord::read(int64_t steps, const std::optional<std::string>& kept,
                      const std::optional<std::string>& updated) {
  const auto record = record_.read(steps);
  wrappers_ = memory_to_reconfigure();
  moment_ = Moment::begun;
  if (!record) {
    load_gradients(steps, kept.value_or(""), "", {});
    return false;
  }
  auto generators = generator_state(state_.model.get());
  std::string marks(parameters_.count(), '0');
  std::string recorded_kept = marks;
  size_t bytes = sizeof moment_ + sizeof calls_ + 2 * marks.size() +
                 wrappers_.size() + generators.nbytes();
  for (const auto& buffer : buffers()) bytes += buffer.nbytes();
  const std::byte* from = record->data();
  const auto read = [&](void* to, size_t count) {
    if (count != 0) std::memcpy(to, from, count);
    from += count;
  };
  if (record->size() >= bytes) {
    read(&moment_, sizeof moment_);
    read(&calls_, sizeof calls_);
    read(recorded_kept.data(), marks.size());
    read(marks.data(), marks.size());
    read(wrappers_.data(), wrappers_.size());
    bytes += parameters_.bytes_of(marks);
  }
  if (record->size() != bytes) {
    throw std::runtime_error(
        "HealedTraining: the process before in this rank's place had other "
        "buffers in its module: " +
        std::to_string(record->size()) + " bytes with the generators, not " +
        std::to_string(bytes) + "; all processes must make the same module");
  }
  const auto take = [&](const at::Tensor& like) {
    auto saved = at::empty(like.sizes(), like.options().device(at::kCPU));
    read(saved.data_ptr(), saved.nbytes());
    return saved;
  };
  const at::NoGradGuard no_grad;
  set_generator_state(take(generators), state_.model.get());
  for (auto& buffer : buffers_of_model(state_)) buffer.copy_(take(buffer));
  // Averages of weights change theirs when they are updated: then the record is
  // too old, and the rank that has updated has given its own.
  size_t index = 0;
  for (auto& buffer : buffers_of_items(state_)) {
    const at::Tensor saved = take(buffer);
    const bool is_own =
        updated && index < updated->size() && (*updated)[index] == '0';
    ++index;
    if (is_after_update() || is_own) buffer.copy_(saved);
  }
  load_gradients(steps, kept.value_or(recorded_kept), marks, take);
  return true;
}

void RankRecord::load_gradients(
    int64_t steps, const std::string& kept, const std::string& marks,
    const std::function<at::Tensor(const at::Tensor& like)>& take) {
  if (parameters_.load_gradients(kept, marks, take)) return;
  throw std::runtime_error(
      "HealedTraining: this rank has no copy of the gradients that were "
      "left by step " +
      std::to_string(steps) +
      ", whose update has changed no parameter, unlike those before it");
}

void RankRecord::restore_wrappers() const {
  set_memory_to_reconfigure(wrappers_);
}

void RankRecord::take_first(int64_t steps, int64_t calls,
                            std::exception_ptr& failure) {
  for (const at::Tensor& buffer : buffers()) broadcast(buffer, 0);
  auto first = generator_state(state_.model.get());
  broadcast(first, 0);
  if (failure) return;
  try {
    const auto ranks = static_cast<size_t>(get_world_size());
    const auto own = generator_state_for(
        "the memory of rank 0", /*saved=*/ranks + 1,
        [&](size_t) { return first; }, static_cast<size_t>(get_rank()), ranks,
        state_.model.get());
    set_generator_state(*own, state_.model.get());
    write(steps, calls, Moment::begun);
  } catch (...) {
    failure = std::current_exception();
  }
}

}  // namespace lockstep::internal
