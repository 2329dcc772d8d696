#include "lockstep/parallel/module/registered_parameters.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

namespace lockstep::internal {
namespace {

// Reads the member Module::children_, which is private: an explicit
// instantiation may name it. Its public accessors copy the list and its names,
// which would cost several microseconds in each forward.
using Children =
    torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;
const Children& children_of(const torch::nn::Module& module);
template <Children torch::nn::Module::*member>
struct ReadsChildren {
  friend const Children& children_of(const torch::nn::Module& module) {
    return module.*member;
  }
};
template struct ReadsChildren<&torch::nn::Module::children_>;

struct OwnParameters : torch::nn::Module {
  static const auto& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

// Calls `visit` with each parameter, in the order of named_parameters(),
// including undefined ones.
template <typename Visit>
void visit_parameters(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& own : OwnParameters::of(module)) visit(own.value());
  for (const auto& child : children_of(module)) {
    visit_parameters(*child.value(), visit);
  }
}

}  // namespace

std::vector<at::Tensor> registered_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  visit_parameters(module, [&all](const at::Tensor& parameter) {
    all.push_back(parameter);
  });
  return all;
}

void require_registered(const torch::nn::Module& module,
                        const std::vector<at::Tensor>& before,
                        const char* wrapper, const char* consequence) {
  size_t number = 0;
  bool same = true;
  visit_parameters(module, [&](const at::Tensor& parameter) {
    same &= number < before.size() && before[number].is_same(parameter);
    ++number;
  });
  if (same && number == before.size()) return;
  std::string what = "but not the same ones";
  std::string reason = "it still has the others";
  for (const auto& item : module.named_parameters()) {
    if (std::ranges::any_of(before, [&](const at::Tensor& known) {
          return known.is_same(item.value());
        })) {
      continue;
    }
    what = c10::str("and '", item.key(), "' of ", item.value().sizes(),
                    " was not among them");
    reason = c10::str("added or replaced ones ", consequence);
    break;
  }
  throw std::invalid_argument(c10::str(
      wrapper, ": the module has ", number, " parameters, ", what, ", but ",
      before.size(), " when it was wrapped; ", reason,
      ". Wrap the module, and make its optimizer, after the last change"));
}

}  // namespace lockstep::internal
