#include "lockstep/optim/fused_optimizer.h"

#include <cstddef>
#include <memory>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/fused_step.h"
#include "lockstep/optim/sgd.h"

namespace lockstep::optim {
namespace {

// Throws std::invalid_argument if a group has options of another optimizer.
template <class TorchOptions>
void check_options(const internal::ParamGroups& groups) {
  for (const auto& group : groups) {
    if (!group.has_options() ||
        dynamic_cast<const TorchOptions*>(&group.options())) {
      continue;
    }
    internal::refuse_options(internal::kOptimizerName<TorchOptions>,
                             group.options(), typeid(TorchOptions));
  }
}

// Gives the last of `groups`, which LibTorch has made from `given`, the options
// that were given. LibTorch 2.13 replaces each of them that equals the default
// of its class by the one in `defaults`.
template <class TorchOptions>
void keep_options(const internal::ParamGroups& given,
                  const TorchOptions& defaults, internal::ParamGroups& groups) {
  using Meant = internal::MeantOptions<TorchOptions>;
  auto group = groups.end() - static_cast<std::ptrdiff_t>(given.size());
  for (const auto& each : given) {
    auto& kept = *group++;
    if (!each.has_options()) continue;
    const auto& options = static_cast<const TorchOptions&>(each.options());
    if (!dynamic_cast<const Meant*>(&options)) {
      internal::warn_of_unset(internal::kOptimizerName<TorchOptions>,
                              internal::numbers_of(options),
                              internal::numbers_of(TorchOptions(1e-3)),
                              internal::numbers_of(defaults));
    }
    kept.set_options(std::make_unique<Meant>(options));
  }
}

}  // namespace

template <class Base, class Options, class Group>
FusedOptimizer<Base, Options, Group>::FusedOptimizer(
    const ParamGroups& groups, const TorchOptions& options, bool maximize)
    : Base((check_options<TorchOptions>(groups),
            internal::distinct_groups(internal::kOptimizerName<TorchOptions>,
                                      groups)),
           options),
      maximize_(maximize) {
  keep_options(groups, options, this->param_groups_);
}

template <class Base, class Options, class Group>
void FusedOptimizer<Base, Options, Group>::add_param_group(
    const OptimizerParamGroup& group) {
  const auto& defaults = static_cast<TorchOptions&>(*this->defaults_);
  check_options<TorchOptions>({group});
  Base::add_param_group(
      internal::distinct_groups(internal::kOptimizerName<TorchOptions>, {group},
                                this->param_groups_)
          .front());
  keep_options({group}, defaults, this->param_groups_);
}

template class FusedOptimizer<torch::optim::SGD, SGDOptions, SGDGroup>;
template class FusedOptimizer<torch::optim::Adam, AdamOptions, AdamGroup>;
template class FusedOptimizer<torch::optim::AdamW, AdamWOptions, AdamWGroup>;

}  // namespace lockstep::optim
