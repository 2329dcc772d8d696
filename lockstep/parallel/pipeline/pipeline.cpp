#include "lockstep/parallel/pipeline/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/fsdp/unit_hooks.h"
#include "lockstep/parallel/pipeline/pipeline_failure.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/split_backward.h"
#include "lockstep/parallel/pipeline/stage_messages.h"
#include "lockstep/parallel/pipeline/tied_weights.h"
#include "lockstep/state/digest.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep {
namespace {

using ActionKind = PipelineActionKind;
using Tensors = std::vector<at::Tensor>;
using internal::Arriving;
using internal::StageMessages;

std::vector<PipelineAction> actions_of_rank(const PipelineSchedule& schedule,
                                            int rank) {
  std::vector<PipelineAction> actions;
  for (const auto& slot : schedule.ranks[static_cast<size_t>(rank)]) {
    actions.insert(actions.end(), slot.begin(), slot.end());
  }
  return actions;
}

// The forwards alone.
PipelineSchedule forward_only(const PipelineSchedule& schedule) {
  PipelineSchedule result = without_messages(schedule);
  for (auto& slots : result.ranks) {
    for (PipelineSlot& slot : slots) {
      std::erase_if(slot, [](const PipelineAction& action) {
        return action.kind != ActionKind::forward;
      });
    }
  }
  return with_messages(result);
}

bool has_messages(const PipelineSchedule& schedule) {
  for (const auto& slots : schedule.ranks) {
    for (const PipelineSlot& slot : slots) {
      for (const PipelineAction& action : slot) {
        if (is_message(action.kind)) return true;
      }
    }
  }
  return false;
}

Tensors with_gradient(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.requires_grad()) result.push_back(tensor);
  }
  return result;
}

// Joins the micro-batches' outputs into those of the batch.
Tensors joined(const std::vector<Tensors>& outputs) {
  Tensors result;
  for (size_t k = 0; k < outputs.front().size(); ++k) {
    Tensors parts;
    for (const Tensors& one : outputs) parts.push_back(one.at(k));
    result.push_back(parts.front().dim() == 0 ? at::stack(parts)
                                              : at::cat(parts));
  }
  return result;
}

}  // namespace

class Pipeline::State {
 public:
  State(std::vector<PipelineStage> stages, PipelineOptions options);

  PipelineResult run(at::TensorList inputs, const at::Tensor& target,
                     bool training);
  at::Tensor empty_parameter() const;

 private:
  // The tensors of one micro-batch in one stage that this rank keeps.
  struct Chunk {
    Arriving activations{};
    Arriving gradients{};
    Tensors inputs{};
    Tensors outputs{};
    at::Tensor loss{};
    Tensors output_gradients{};  // of the outputs that require grad
    Tensors input_gradients{};   // of the inputs that require grad
    internal::SplitBackward split{};
  };

  // One call of step() or eval().
  struct Run {
    bool training = false;
    int64_t rows = 0;
    std::optional<double> count{};  // PipelineOptions::loss_count of the batch
    std::vector<int64_t> shapes{};  // of the inputs, a number by micro-batch
    std::vector<Tensors> inputs{};
    Tensors targets{};
    std::vector<Tensors> outputs{};
    Tensors losses{};
    std::map<std::pair<int, int>, Chunk> chunks{};
  };

  void begin_again();
  void check_stages() const;
  void agree(std::exception_ptr problem) const;
  void attach_layouts();
  void give_layout(const at::Tensor& tensor) const;
  void give_layout_to_parameters_of_loss(const Chunk& chunk) const;
  void require_no_replicas_of(const at::Tensor& parameter) const;
  std::string problem_of(at::TensorList inputs, const at::Tensor& target,
                         bool training) const;
  Run begin(at::TensorList inputs, const at::Tensor& target, bool training);
  int64_t rows_of(const Run& run, int micro_batch) const;
  double weight_of(const Run& run, int micro_batch) const;
  std::vector<int64_t> shapes_of(const std::vector<Tensors>& inputs);
  int64_t trained_parts(const Run& run) const;
  PipelineResult result_of(Run& run) const;

  void perform(Run& run, const PipelineAction& action);
  void forward(Run& run, const PipelineAction& action);
  void backward(Run& run, const PipelineAction& action);
  void after_backward(int stage);
  void finish(bool training);
  std::vector<ProcessGroupPtr> groups() const;
  void give_up() noexcept;

  bool has_first() const { return stages_.contains(0); }
  bool has_last() const { return stages_.contains(facts_.stages - 1); }
  StageMessages::Place place(const Run& run, int sender, int receiver,
                             int micro_batch) const;

  PipelineOptions options_;
  ProcessGroupPtr group_;
  PipelineScheduleFacts facts_;
  std::map<int, PipelineStage> stages_;
  std::vector<PipelineAction> training_actions_;
  std::vector<PipelineAction> forward_actions_;
  std::optional<internal::TiedWeights> tied_;
  std::optional<StageMessages> messages_;
  Tensors parameters_;  // of the stages of this rank, each once
  std::map<std::vector<int64_t>, int64_t> known_shapes_;
  std::map<std::vector<int64_t>, int64_t> known_forms_;
  // If the training can be healed.
  std::optional<internal::OnReconfigured> on_reconfigured_{};
};

Pipeline::State::State(std::vector<PipelineStage> stages,
                       PipelineOptions options)
    : options_(std::move(options)),
      group_(internal::group_or_default(options_.group)) {
  const PipelineSchedule& schedule = options_.schedule;
  std::exception_ptr problem;
  try {
    const size_t ranks = schedule.ranks.size();
    if (ranks != static_cast<size_t>(group_->size())) {
      throw std::invalid_argument(c10::str("the schedule of a pipeline is for ",
                                           ranks, " ranks, but its group has ",
                                           group_->size()));
    }
    facts_ = check_pipeline_schedule(schedule);
    for (PipelineStage& stage : stages) {
      const int index = stage.index();
      if (!stages_.emplace(index, stage).second) {
        throw std::invalid_argument(
            c10::str("stage ", index, " was given twice"));
      }
    }
    check_stages();
    if (options_.loss_count && !options_.scale_gradients) {
      throw std::invalid_argument(
          "PipelineOptions::loss_count divides the sum of the losses, and "
          "scale_gradients = false leaves it undivided; give one of them");
    }
    tied_.emplace(options_.tied_weights, stages, facts_.rank_of_stage, group_);
  } catch (const std::invalid_argument&) {
    problem = std::current_exception();
  }
  agree(std::move(problem));
  const PipelineSchedule with =
      has_messages(schedule) ? schedule : with_messages(schedule);
  training_actions_ = actions_of_rank(with, group_->rank());
  forward_actions_ = actions_of_rank(forward_only(schedule), group_->rank());
  messages_.emplace(group_, facts_.micro_batches);
  tied_->share_values();
  attach_layouts();
  if (internal::job_heals())
    on_reconfigured_.emplace([this] { begin_again(); });
}

// Forgets what the ranks have told each other, which a process that has taken a
// place does not know, and the messages and gradients of a step that was
// interrupted.
void Pipeline::State::begin_again() {
  messages_.emplace(group_, facts_.micro_batches);
  known_shapes_.clear();
  known_forms_.clear();
  std::vector<PipelineStage> stages;
  for (const auto& [index, stage] : stages_) stages.push_back(stage);
  tied_.emplace(options_.tied_weights, stages, facts_.rank_of_stage, group_);
}

void Pipeline::State::check_stages() const {
  std::set<int> mine;
  for (int stage = 0; stage < facts_.stages; ++stage) {
    const int rank = facts_.rank_of_stage[static_cast<size_t>(stage)];
    if (rank == group_->rank()) mine.insert(stage);
  }
  std::set<int> given;
  for (const auto& [index, stage] : stages_) given.insert(index);
  if (given == mine) return;
  const auto text = [](const std::set<int>& stages) {
    return stages.empty() ? std::string("none")
                          : c10::Join(", ", std::vector<int>(stages.begin(),
                                                             stages.end()));
  };
  throw std::invalid_argument(
      c10::str("the schedule gives this rank the stages ", text(mine),
               ", but it was given ", text(given)));
}

// Throws on all ranks if one has a problem, or if options differ.
void Pipeline::State::agree(std::exception_ptr problem) const {
  constexpr const char* kPlan = "the plan";
  internal::Agreement agreement(group_, {.way = internal::AgreementWay::store});
  if (!problem) {
    internal::Digest digest;
    digest.add(to_csv(options_.schedule));
    for (const TiedWeight& weight : options_.tied_weights) {
      for (const TiedWeight::Holder& holder : weight.holders) {
        digest.add(static_cast<uint64_t>(holder.stage));
        digest.add(holder.parameter);
      }
    }
    agreement.hold(kPlan, std::to_string(digest.value()));
    size_t number = 0;
    for (const std::string& shape : tied_->shapes()) {
      agreement.hold(c10::str("tied weight ", number++), shape);
    }
  }
  agreement.fail(std::move(problem));
  const auto difference = agreement.compare();
  if (!difference) return;
  throw std::invalid_argument(
      difference->name != kPlan
          ? difference->words()
          : c10::str("rank ", difference->rank,
                     " has another schedule, or other tied weights, for the "
                     "pipeline than rank ",
                     difference->first_rank, "; give all ranks the same"));
}

void Pipeline::State::attach_layouts() {
  Tensors buffers;
  for (const auto& [index, stage] : stages_) {
    for (at::Tensor& parameter : stage.module().parameters()) {
      parameters_.push_back(std::move(parameter));
    }
    for (at::Tensor& buffer : stage.module().buffers()) {
      if (buffer.defined()) buffers.push_back(std::move(buffer));
    }
  }
  parameters_ = distinct(std::move(parameters_));
  for (const at::Tensor& tensor : parameters_) give_layout(tensor);
  for (const at::Tensor& tensor : distinct(buffers)) give_layout(tensor);
}

void Pipeline::State::give_layout(const at::Tensor& tensor) const {
  const internal::TensorLayout* known = internal::layout_of(tensor);
  internal::TensorLayout layout =
      known != nullptr ? *known
                       : internal::TensorLayout{
                             .shape = tensor.sizes().vec(),
                             .box = internal::whole_box(tensor.sizes().vec())};
  // That of an earlier pipeline over this stage.
  if (layout.of_stage) layout.groups.erase(layout.groups.begin());
  layout.groups.insert(layout.groups.begin(), group_);
  layout.of_stage = true;
  layout.duplicate = tied_->is_duplicate(tensor);
  layout.tied = tied_->name_of(tensor);
  internal::set_layout(tensor, std::move(layout));
}

// The loss may have parameters of its own, which only this rank has, like those
// of the last stage: without a layout each rank would be taken to have them,
// and the norm of all gradients would count a part of theirs. Nothing tells of
// them but the graph between the outputs of the stage and the loss.
void Pipeline::State::give_layout_to_parameters_of_loss(
    const Chunk& chunk) const {
  std::set<const torch::autograd::Node*> outputs;
  for (const at::Tensor& output : with_gradient(chunk.outputs)) {
    outputs.insert(torch::autograd::impl::gradient_edge(output).function.get());
  }
  const auto leaves = internal::graph_leaves(
      {chunk.loss}, [&](const auto& node) { return !outputs.contains(&node); });
  for (const at::Tensor& leaf : leaves) {
    const auto is_leaf = [&](const at::Tensor& one) {
      return one.is_same(leaf);
    };
    // A loss that reads a member of the stage leads to both.
    if (std::ranges::any_of(parameters_, is_leaf) ||
        std::ranges::any_of(chunk.inputs, is_leaf)) {
      continue;
    }
    require_no_replicas_of(leaf);
    const internal::TensorLayout* known = internal::layout_of(leaf);
    const bool done =
        known != nullptr && known->of_stage && known->groups.front() == group_;
    if (!done) give_layout(leaf);
  }
}

// Replicas of the last stage average its parameters alone.
void Pipeline::State::require_no_replicas_of(
    const at::Tensor& parameter) const {
  const auto* replicas = stages_.at(facts_.stages - 1).replicas_.get();
  if (replicas == nullptr) return;
  for (const ProcessGroupPtr& group : replicas->groups()) {
    if (group->size() == 1) continue;
    throw internal::StageMistake(c10::str(
        "the loss has a parameter of its own, of shape ", parameter.sizes(),
        ", whose gradient nothing averages over the ", group->size(),
        " replicas of the last stage, so that they would drift apart; register "
        "it in the module of the last stage"));
  }
}

std::string Pipeline::State::problem_of(at::TensorList inputs,
                                        const at::Tensor& target,
                                        bool training) const {
  if (training && !at::GradMode::is_enabled()) {
    return "Pipeline::step() was called without grad mode; use eval()";
  }
  if (has_first()) {
    if (inputs.empty()) return "the rank of stage 0 was given no inputs";
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || input.dim() == 0) {
        return "an input of a pipeline has no rows (dimension 0)";
      }
      if (input.size(0) != inputs[0].size(0)) {
        return c10::str("the inputs of a pipeline have ", inputs[0].size(0),
                        " and ", input.size(0), " rows; give all the same");
      }
    }
    if (inputs[0].size(0) < facts_.micro_batches) {
      return c10::str("a batch of ", inputs[0].size(0),
                      " rows cannot be divided into ", facts_.micro_batches,
                      " micro-batches; give more rows, or a schedule with "
                      "fewer micro-batches");
    }
  }
  if (has_last() && training) {
    if (!options_.loss) return "PipelineOptions::loss is not set";
    if (!target.defined()) {
      return "the rank of the last stage was given no target";
    }
  }
  if (has_last() && target.defined()) {
    if (target.dim() == 0) return "the target has no rows (dimension 0)";
    if (!options_.loss) return "PipelineOptions::loss is not set";
  }
  return "";
}

std::vector<int64_t> Pipeline::State::shapes_of(
    const std::vector<Tensors>& inputs) {
  std::vector<int64_t> numbers;
  for (const Tensors& micro_batch : inputs) {
    std::vector<int64_t> shapes;
    for (const at::Tensor& input : micro_batch) {
      shapes.push_back(static_cast<int64_t>(input.scalar_type()));
      shapes.push_back(input.dim());
      shapes.insert(shapes.end(), input.sizes().begin(), input.sizes().end());
    }
    numbers.push_back(
        known_shapes_
            .try_emplace(shapes, static_cast<int64_t>(known_shapes_.size()))
            .first->second);
  }
  return numbers;
}

// The other conditions that decide which activations and gradients this rank
// sends: which parameters, and which inputs of the pipeline, require grad.
int64_t Pipeline::State::trained_parts(const Run& run) const {
  internal::Digest digest;
  const auto add = [&](const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      digest.add(tensor.requires_grad() ? "1" : "0");
    }
  };
  add(parameters_);
  if (!run.inputs.empty()) add(run.inputs.front());
  return static_cast<int64_t>(digest.value());
}

// Divides the batch, and tells all ranks of its shapes, and of mistakes.
Pipeline::State::Run Pipeline::State::begin(at::TensorList inputs,
                                            const at::Tensor& target,
                                            bool training) {
  Run run;
  run.training = training;
  const auto count = static_cast<size_t>(facts_.micro_batches);
  std::string problem = problem_of(inputs, target, training);
  if (problem.empty() && has_last() && target.defined() &&
      options_.loss_count) {
    try {
      run.count = options_.loss_count(target);
      if (!(*run.count >= 0)) {
        problem = c10::str("PipelineOptions::loss_count returned ", *run.count,
                           "; it must return 0 or more");
      }
    } catch (...) {
      problem = "PipelineOptions::loss_count failed: " +
                internal::words_of(std::current_exception());
    }
  }
  std::vector<int64_t> mine{-1, -1};  // rows of inputs and target
  run.shapes.assign(count, 0);
  if (problem.empty() && has_first()) {
    run.inputs.resize(count);
    for (const at::Tensor& input : inputs) {
      const Tensors parts = input.tensor_split(facts_.micro_batches);
      for (size_t i = 0; i < count; ++i) run.inputs[i].push_back(parts[i]);
    }
    run.shapes = shapes_of(run.inputs);
    mine[0] = inputs[0].size(0);
  }
  if (problem.empty() && has_last() && target.defined()) {
    run.targets = target.tensor_split(facts_.micro_batches);
    mine[1] = target.size(0);
  }
  mine.insert(mine.end(), run.shapes.begin(), run.shapes.end());
  const auto trained = tied_->trained();
  mine.insert(mine.end(), trained.begin(), trained.end());
  mine.push_back(trained_parts(run));

  internal::Agreement agreement(group_);
  agreement.hold("the call",
                 training ? "Pipeline::step()" : "Pipeline::eval()");
  agreement.tell(std::move(mine));
  if (!problem.empty()) {
    agreement.fail(std::make_exception_ptr(std::invalid_argument(problem)));
  }
  std::optional<internal::Agreement::Difference> difference;
  try {
    difference = agreement.compare();
  } catch (const c10::DistError&) {
    internal::fail_together(groups(), std::current_exception(),
                            "before the first action");
  }
  if (difference) {
    throw std::invalid_argument(c10::str(
        "rank ", difference->rank, " called ", difference->text, ", but rank ",
        difference->first_rank, " called ", difference->first_text));
  }
  const auto& header = agreement.told();
  for (size_t i = 0; training && i < trained.size(); ++i) {
    int64_t known = -1;
    bool differs = false;
    for (int rank = 0; rank < group_->size(); ++rank) {
      const int64_t value = header[rank][2 + count + i];
      if (value < 0) continue;
      differs |= value == 2 || (known >= 0 && value != known);
      known = value;
    }
    if (!differs) continue;
    const auto& holder = options_.tied_weights[i].holders.front();
    throw std::invalid_argument(c10::str(
        "tied weight ", i, " (\"", holder.parameter, "\" of stage ",
        holder.stage,
        ") has requires_grad true in some stages and false in others; set the "
        "same in all"));
  }
  const auto first = facts_.rank_of_stage.front();
  const auto last = facts_.rank_of_stage.back();
  run.rows = header[first][0];
  if (header[last][1] >= 0 && header[last][1] != run.rows) {
    throw std::invalid_argument(
        c10::str("the inputs of the pipeline have ", run.rows, " rows on rank ",
                 group_->global_rank(first), ", but the target has ",
                 header[last][1], " on rank ", group_->global_rank(last)));
  }
  // Ranks describe what they send once for each form of a batch.
  std::vector<int64_t> form{0};
  for (int rank = 0; rank < group_->size(); ++rank) {
    form.push_back(header[rank].back());
  }
  for (size_t i = 0; i < count; ++i) {
    form.front() = header[first][2 + i];
    run.shapes[i] =
        known_forms_
            .try_emplace(form, static_cast<int64_t>(known_forms_.size()))
            .first->second;
  }
  run.outputs.resize(count);
  run.losses.resize(count);
  return run;
}

int64_t Pipeline::State::rows_of(const Run& run, int micro_batch) const {
  const int64_t count = facts_.micro_batches;
  return run.rows / count + (micro_batch < run.rows % count ? 1 : 0);
}

double Pipeline::State::weight_of(const Run& run, int micro_batch) const {
  if (run.count) return *run.count > 0 ? 1 / *run.count : 0;
  if (!options_.scale_gradients) return 1;
  return static_cast<double>(rows_of(run, micro_batch)) /
         static_cast<double>(run.rows);
}

StageMessages::Place Pipeline::State::place(const Run& run, int sender,
                                            int receiver,
                                            int micro_batch) const {
  const int peer = stages_.contains(sender) ? receiver : sender;
  return {.stage = sender,
          .micro_batch = micro_batch,
          .peer = facts_.rank_of_stage[static_cast<size_t>(peer)],
          .shapes = 2 * run.shapes[static_cast<size_t>(micro_batch)] +
                    (run.training ? 1 : 0)};
}

void Pipeline::State::forward(Run& run, const PipelineAction& action) {
  const auto [stage, kind, micro_batch] = action;
  const auto i = static_cast<size_t>(micro_batch);
  Chunk& chunk = run.chunks[{stage, micro_batch}];
  if (stage == 0) {
    chunk.inputs = run.inputs[i];
  } else if (!stages_.contains(stage - 1)) {
    chunk.inputs = chunk.activations.wait();
    const auto& known =
        messages_->known(place(run, stage - 1, stage, micro_batch));
    for (size_t k = 0; k < chunk.inputs.size(); ++k) {
      chunk.inputs[k].requires_grad_(known[k].requires_grad);
    }
  }
  const Tensors given = internal::stage_inputs(chunk.inputs);
  chunk.outputs = stages_.at(stage).forward_(given);
  internal::report_changes(chunk.inputs, given);
  for (const at::Tensor& output : chunk.outputs) {
    if (!output.defined()) {
      throw internal::StageMistake("the stage returned an undefined tensor");
    }
  }
  if (stage + 1 == facts_.stages) {
    if (options_.return_outputs || !run.training) {
      for (const at::Tensor& output : chunk.outputs) {
        run.outputs[i].push_back(output.detach());
      }
    }
    if (run.targets.empty()) return;
    chunk.loss = options_.loss(chunk.outputs, run.targets[i]);
    if (!chunk.loss.defined() || chunk.loss.numel() != 1) {
      throw internal::StageMistake(
          "PipelineOptions::loss must return a tensor with one element");
    }
    if (run.training && !chunk.loss.requires_grad()) {
      throw internal::StageMistake(
          "the loss does not require grad, so nothing would be trained; "
          "PipelineOptions::loss must compute it from the outputs of the last "
          "stage, without detach(), and some parameter must require grad");
    }
    if (run.training) give_layout_to_parameters_of_loss(chunk);
    run.losses[i] = chunk.loss.detach();
  } else if (stages_.contains(stage + 1)) {
    Tensors& next = run.chunks[{stage + 1, micro_batch}].inputs;
    for (const at::Tensor& output : chunk.outputs) {
      next.push_back(output.detach().requires_grad_(output.requires_grad()));
    }
  }
}

void Pipeline::State::backward(Run& run, const PipelineAction& action) {
  const auto [stage, kind, micro_batch] = action;
  Chunk& chunk = run.chunks[{stage, micro_batch}];
  Tensors roots;
  Tensors gradients;
  if (stage + 1 == facts_.stages) {
    roots = with_gradient({chunk.loss});
    for (const at::Tensor& root : roots) {
      gradients.push_back(at::full_like(root, weight_of(run, micro_batch)));
    }
  } else {
    roots = with_gradient(chunk.outputs);
    gradients = stages_.contains(stage + 1)
                    ? std::exchange(chunk.output_gradients, {})
                    : chunk.gradients.wait();
  }
  // No gradient goes through what the stages after this one do not use, as in
  // one process: zeros would give the parameters before it gradients.
  for (size_t i = 0; i < roots.size(); ++i) {
    if (!gradients[i].defined()) roots[i].reset();
  }
  for (Tensors* tensors : {&roots, &gradients}) {
    std::erase_if(*tensors,
                  [](const at::Tensor& one) { return !one.defined(); });
  }
  // Gradients of the pipeline's inputs are accumulated as backward() does it.
  chunk.inputs = stage == 0 ? Tensors{} : with_gradient(chunk.inputs);
  if (kind == ActionKind::backward_input) {
    chunk.input_gradients = chunk.split.inputs(roots, gradients, chunk.inputs);
  } else {
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
    for (const at::Tensor& input : chunk.inputs) {
      chunk.input_gradients.push_back(input.grad());
    }
  }
  // The graph ends here, or what SplitBackward has not kept of it.
  chunk.outputs.clear();
  chunk.loss.reset();
  if (stage > 0 && stages_.contains(stage - 1)) {
    chunk.inputs.clear();
    run.chunks[{stage - 1, micro_batch}].output_gradients =
        std::exchange(chunk.input_gradients, {});
  }
}

void Pipeline::State::perform(Run& run, const PipelineAction& action) {
  const auto [stage, kind, micro_batch] = action;
  Chunk& chunk = run.chunks[{stage, micro_batch}];
  switch (kind) {
    case ActionKind::forward:
      return forward(run, action);
    case ActionKind::backward:
    case ActionKind::backward_input:
      backward(run, action);
      if (kind == ActionKind::backward) after_backward(stage);
      return;
    case ActionKind::backward_weight:
      chunk.split.parameters();
      return after_backward(stage);
    case ActionKind::send_forward:
      messages_->send_forward(place(run, stage, stage + 1, micro_batch),
                              chunk.outputs);
      if (!run.training) chunk = {};
      return;
    case ActionKind::recv_forward: {
      const auto parameters = stages_.at(stage).module().parameters();
      chunk.activations = messages_->recv_forward(
          place(run, stage - 1, stage, micro_batch),
          parameters.empty() ? group_->control_device()
                             : parameters.front().device());
      return;
    }
    case ActionKind::send_backward:
      return messages_->send_backward(place(run, stage, stage - 1, micro_batch),
                                      std::exchange(chunk.inputs, {}),
                                      std::exchange(chunk.input_gradients, {}));
    case ActionKind::recv_backward:
      chunk.gradients =
          messages_->recv_backward(place(run, stage + 1, stage, micro_batch),
                                   with_gradient(chunk.outputs));
      return;
    default:
      return;
  }
}

void Pipeline::State::after_backward(int stage) {
  if (const auto& replicas = stages_.at(stage).replicas_) {
    replicas->after_backward();
  }
}

void Pipeline::State::finish(bool training) {
  tied_->finish(training);
  for (const auto& [index, stage] : stages_) {
    if (training && stage.after_backward) stage.after_backward();
    if (const auto& replicas = stage.replicas_) replicas->finish(training);
  }
}

// Returns the pipeline's group, and those of its stages' replicas.
std::vector<ProcessGroupPtr> Pipeline::State::groups() const {
  std::vector<ProcessGroupPtr> groups{group_};
  for (const auto& [index, stage] : stages_) {
    if (!stage.replicas_) continue;
    for (const ProcessGroupPtr& group : stage.replicas_->groups()) {
      const bool known = std::ranges::find(groups, group) != groups.end();
      if (!known && group->size() > 1) groups.push_back(group);
    }
  }
  return groups;
}

void Pipeline::State::give_up() noexcept {
  for (const auto& [index, stage] : stages_) {
    if (const auto& replicas = stage.replicas_) replicas->give_up();
  }
}

PipelineResult Pipeline::State::result_of(Run& run) const {
  PipelineResult result;
  if (!has_last()) return result;
  if (!run.outputs.front().empty()) result.outputs = joined(run.outputs);
  if (run.targets.empty()) return result;
  for (int i = 0; i < facts_.micro_batches; ++i) {
    const at::Tensor& loss = run.losses[static_cast<size_t>(i)];
    const at::Tensor part = loss * weight_of(run, i);
    result.loss = result.loss.defined() ? result.loss + part : part;
  }
  result.losses = std::move(run.losses);
  return result;
}

PipelineResult Pipeline::State::run(at::TensorList inputs,
                                    const at::Tensor& target, bool training) {
  const internal::UserFunction named(training ? "Pipeline::step()"
                                              : "Pipeline::eval()");
  std::optional<internal::TrainingCounters::WholeStep> step;
  if (training) step.emplace();
  Run run = begin(inputs, target, training);
  std::string where = "before the first action";
  try {
    const at::AutoGradMode grad_mode(training);
    tied_->begin(training);
    for (const auto& [index, stage] : stages_) {
      if (const auto& replicas = stage.replicas_) replicas->begin(training);
    }
    for (const PipelineAction& action :
         training ? training_actions_ : forward_actions_) {
      where = c10::str("in ", to_string(action), " (stage ", action.stage,
                       ", micro-batch ", action.micro_batch, ")");
      const internal::Span span(
          "pipeline",
          internal::Span::observed() ? to_string(action) : std::string(),
          {{"stage", action.stage}, {"micro_batch", action.micro_batch}});
      perform(run, action);
    }
    where = "after the last action";
    messages_->finish_sends();
    finish(training);
  } catch (...) {
    try {
      internal::fail_together(groups(), std::current_exception(), where);
    } catch (...) {
      give_up();
      throw;
    }
  }
  return result_of(run);
}

Pipeline::Pipeline(std::vector<PipelineStage> stages, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), std::move(options))) {}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;

at::Tensor Pipeline::State::empty_parameter() const {
  at::Tensor parameter =
      at::empty({0}, at::TensorOptions().device(group_->control_device()));
  internal::set_layout(
      parameter,
      {.shape = {0}, .box = internal::whole_box({0}), .groups = {group_}});
  return parameter;
}

at::Tensor Pipeline::empty_parameter() const {
  return state_->empty_parameter();
}

PipelineResult Pipeline::step(at::TensorList inputs, const at::Tensor& target) {
  return state_->run(inputs, target, /*training=*/true);
}

PipelineResult Pipeline::eval(at::TensorList inputs, const at::Tensor& target) {
  return state_->run(inputs, target, /*training=*/false);
}

}  // namespace lockstep
