#include "tests/optim/scheduler_cases.h"

#include <cmath>

namespace lockstep::internal::testing {
namespace {

using namespace lockstep::optim;  // NOLINT
using torch::optim::OptimizerParamGroup;

template <class Options>
std::function<Scheduled(torch::optim::Optimizer&)> of(Options options) {
  return [options](torch::optim::Optimizer& optimizer) {
    auto made = std::make_unique<SchedulerWith<Options>>(optimizer, options);
    auto* scheduler = made.get();
    return Scheduled{std::move(made), [=](int) { scheduler->step(); },
                     [=] { return scheduler->get_last_lr(); }};
  };
}

// Falls, stays for long, falls again, rises.
double metric(int step) {
  return step < 8 ? 1.0 / (1 + step) : step < 40 ? 0.11 : 0.05 + step * 1e-3;
}

std::function<Scheduled(torch::optim::Optimizer&)> plateau(
    ReduceLROnPlateauOptions options) {
  return [options](torch::optim::Optimizer& optimizer) {
    auto made = std::make_unique<ReduceLROnPlateau>(optimizer, options);
    auto* scheduler = made.get();
    return Scheduled{std::move(made),
                     [=](int step) { scheduler->step(metric(step)); },
                     [=] { return scheduler->get_last_lr(); }};
  };
}

double falling(int64_t epoch) { return 1.0 / (1 + static_cast<double>(epoch)); }
double power(int64_t epoch) { return std::pow(0.95, epoch); }
double nearly(int64_t epoch) { return epoch % 7 == 0 ? 0.5 : 1.01; }

std::vector<SchedulerCase> make_cases() {
  const LinearLROptions warmup{.start_factor = 0.1, .total_iters = 5};
  const CosineAnnealingLROptions cosine{.T_max = 40, .eta_min = 1e-3};
  return {
      {"step", false, of(StepLROptions{.step_size = 7})},
      {"step_gamma", true, of(StepLROptions{.step_size = 3, .gamma = 0.9})},
      {"step_added", false, of(StepLROptions{.step_size = 4, .gamma = 0.7}),
       10},
      {"multi_step", false,
       of(MultiStepLROptions{.milestones = {30, 5, 30, 50}, .gamma = 0.3})},
      {"multi_step_empty", false,
       of(MultiStepLROptions{.milestones = std::vector<int64_t>()})},
      {"constant", false, of(ConstantLROptions{})},
      {"constant_long", false,
       of(ConstantLROptions{.factor = 0.3, .total_iters = 40})},
      {"linear", false, of(LinearLROptions{})},
      {"linear_down", false,
       of(LinearLROptions{
           .start_factor = 0.9, .end_factor = 0.1, .total_iters = 37})},
      {"linear_added", false, of(LinearLROptions{.total_iters = 30}), 10},
      {"exponential", false, of(ExponentialLROptions{.gamma = 0.93})},
      {"exponential_added", false, of(ExponentialLROptions{.gamma = 0.9}), 10},
      {"polynomial", false, of(PolynomialLROptions{})},
      {"polynomial_power", false,
       of(PolynomialLROptions{.total_iters = 45, .power = 2.5})},
      {"cosine", false, of(CosineAnnealingLROptions{.T_max = 50})},
      {"cosine_again", false,
       of(CosineAnnealingLROptions{.T_max = 9, .eta_min = 0.005})},
      {"cosine_one", false, of(CosineAnnealingLROptions{.T_max = 1})},
      {"restarts", false, of(CosineAnnealingWarmRestartsOptions{.T_0 = 11})},
      {"restarts_longer", false,
       of(CosineAnnealingWarmRestartsOptions{
           .T_0 = 4, .T_mult = 2, .eta_min = 0.001})},
      {"one_cycle", false,
       of(OneCycleLROptions{.max_lr = 0.5, .total_steps = 60})},
      {"one_cycle_adam", true,
       of(OneCycleLROptions{.max_lr = {0.5, 0.2},
                            .epochs = 7,
                            .steps_per_epoch = 10,
                            .pct_start = 0.4,
                            .anneal_strategy = AnnealStrategy::linear,
                            .div_factor = 10,
                            .final_div_factor = 100,
                            .three_phase = true,
                            .base_momentum = {0.8, 0.7},
                            .max_momentum = 0.9})},
      {"one_cycle_plain", true,
       of(OneCycleLROptions{
           .max_lr = 0.5, .total_steps = 61, .cycle_momentum = false})},
      {"cyclic", false,
       of(CyclicLROptions{.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 5})},
      {"cyclic_half", true,
       of(CyclicLROptions{.base_lr = {0.01, 0.02},
                          .max_lr = {0.1, 0.3},
                          .step_size_up = 7,
                          .step_size_down = 4,
                          .mode = CyclicMode::triangular2,
                          .base_momentum = 0.6,
                          .max_momentum = {0.9, 0.95}})},
      {"cyclic_range", false,
       of(CyclicLROptions{.base_lr = 0.01,
                          .max_lr = 0.1,
                          .step_size_up = 6,
                          .mode = CyclicMode::exp_range,
                          .gamma = 0.98,
                          .cycle_momentum = false})},
      {"cyclic_function", false,
       of(CyclicLROptions{.base_lr = 0.01,
                          .max_lr = 0.1,
                          .step_size_up = 6,
                          .scale_fn = [](double x) { return 1 / (5 * x + 1); },
                          .scale_mode = CyclicScaleMode::iterations})},
      {"lambda", false, of(LambdaLROptions{.lr_lambda = falling})},
      {"lambda_each", false,
       of(LambdaLROptions{.lr_lambda = {falling, power}})},
      {"multiplicative", false,
       of(MultiplicativeLROptions{.lr_lambda = nearly})},
      {"multiplicative_each", false,
       of(MultiplicativeLROptions{.lr_lambda = {nearly, power}})},
      {"swa", false, of(SWALROptions{.swa_lr = 0.05})},
      {"swa_each", false,
       of(SWALROptions{.swa_lr = {0.05, 0.5},
                       .anneal_epochs = 33,
                       .anneal_strategy = AnnealStrategy::linear})},
      {"swa_at_once", false,
       of(SWALROptions{.swa_lr = 0.3, .anneal_epochs = 0})},
      {"warmup_cosine", false,
       of(SequentialLROptions{.schedulers = {warmup, cosine},
                              .milestones = {5}})},
      {"sequence_of_three", false,
       of(SequentialLROptions{
           .schedulers = {ConstantLROptions{.factor = 0.5, .total_iters = 9},
                          ExponentialLROptions{.gamma = 0.9},
                          MultiStepLROptions{.milestones = {0, 4, 20}}},
           .milestones = {10, 30}})},
      {"sequence_of_closed", false,
       of(SequentialLROptions{
           .schedulers = {warmup, StepLROptions{.step_size = 3},
                          PolynomialLROptions{.total_iters = 12},
                          LinearLROptions{}, ConstantLROptions{}},
           .milestones = {5, 20, 35, 45}})},
      {"sequence_of_open", false,
       of(SequentialLROptions{
           .schedulers = {warmup, CosineAnnealingWarmRestartsOptions{.T_0 = 4},
                          LambdaLROptions{.lr_lambda = falling},
                          MultiplicativeLROptions{.lr_lambda = nearly},
                          SWALROptions{.swa_lr = 0.05, .anneal_epochs = 4}},
           .milestones = {5, 20, 30, 45}})},
      {"sequence_of_cycles", false,
       of(SequentialLROptions{
           .schedulers = {CyclicLROptions{.base_lr = 0.01,
                                          .max_lr = 0.1,
                                          .step_size_up = 5},
                          OneCycleLROptions{.max_lr = 0.5, .total_steps = 50}},
           .milestones = {20}})},
      {"sequence_of_cycles_last", false,
       of(SequentialLROptions{
           .schedulers = {warmup, CyclicLROptions{.base_lr = 0.01,
                                                  .max_lr = 0.1,
                                                  .step_size_up = 5}},
           .milestones = {20}})},
      {"sequence_skips_first", false,
       of(SequentialLROptions{.schedulers = {warmup, cosine},
                              .milestones = {0}})},
      {"sequence_of_chain", false,
       of(SequentialLROptions{
           .schedulers = {ChainedSchedulerOptions{
                              .schedulers = {warmup,
                                             ExponentialLROptions{.gamma =
                                                                      0.95}}},
                          cosine},
           .milestones = {12}})},
      {"sequence_of_sequence", false,
       of(SequentialLROptions{
           .schedulers =
               {SequentialLROptions{
                    .schedulers = {warmup, ExponentialLROptions{.gamma = 0.95}},
                    .milestones = {6}},
                cosine},
           .milestones = {20}})},
      {"chain", false,
       of(ChainedSchedulerOptions{
           .schedulers = {ConstantLROptions{.factor = 0.1, .total_iters = 20},
                          ExponentialLROptions{.gamma = 0.9}}})},
      {"chain_of_sequence", false,
       of(ChainedSchedulerOptions{
           .schedulers = {SequentialLROptions{.schedulers = {warmup, cosine},
                                              .milestones = {5}},
                          StepLROptions{.step_size = 11, .gamma = 0.5}}})},
      {"plateau", false, plateau({})},
      {"plateau_max", false,
       plateau({.mode = PlateauMode::max,
                .factor = 0.5,
                .patience = 2,
                .threshold = 0.01,
                .threshold_mode = ThresholdMode::abs,
                .cooldown = 3,
                .min_lr = {1e-3, 1e-2}})},
      {"plateau_rel", false,
       plateau({.mode = PlateauMode::max, .patience = 1, .eps = 1e-3})},
      {"plateau_abs", false,
       plateau({.patience = 4,
                .threshold_mode = ThresholdMode::abs,
                .min_lr = 1e-4})},
      {"plateau_added", false, plateau({.patience = 3}), 10},
  };
}

}  // namespace

Trained::Trained(bool adam) : is_adam(adam) {
  std::vector<OptimizerParamGroup> groups;
  const auto add = [&](const at::Tensor& parameter, double lr) {
    if (adam) {
      groups.emplace_back(std::vector<at::Tensor>{parameter},
                          std::make_unique<torch::optim::AdamOptions>(lr));
    } else {
      groups.emplace_back(std::vector<at::Tensor>{parameter},
                          std::make_unique<torch::optim::SGDOptions>(
                              torch::optim::SGDOptions(lr).momentum(0.9)));
    }
  };
  add(model->weight, 0.1);
  add(model->bias, 0.02);
  if (adam) {
    optimizer = std::make_unique<optim::Adam>(groups);
  } else {
    optimizer = std::make_unique<optim::SGD>(
        groups, optim::SGDOptions{.momentum = 0.9});
  }
}

void Trained::add_group() const {
  optimizer->add_param_group(OptimizerParamGroup(
      {extra}, std::make_unique<torch::optim::SGDOptions>(
                   torch::optim::SGDOptions(0.4).momentum(0.9))));
}

std::vector<double> Trained::rates() const {
  std::vector<double> all;
  for (const auto& group : optimizer->param_groups()) {
    all.push_back(group.options().get_lr());
  }
  return all;
}

std::vector<double> Trained::momenta() const {
  std::vector<double> all;
  for (auto& group : optimizer->param_groups()) {
    if (is_adam) {
      const auto& options =
          static_cast<const torch::optim::AdamOptions&>(group.options());
      all.push_back(std::get<0>(options.betas()));
    } else {
      all.push_back(
          static_cast<const torch::optim::SGDOptions&>(group.options())
              .momentum());
    }
  }
  return all;
}

const std::vector<SchedulerCase>& scheduler_cases() {
  static const std::vector<SchedulerCase> cases = make_cases();
  return cases;
}

}  // namespace lockstep::internal::testing
