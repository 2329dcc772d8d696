#include "tests/parallel/fuzz/print_case.h"

#include <algorithm>
#include <sstream>

#include "tests/parallel/fuzz/operations.h"

namespace lockstep::internal::fuzz {
namespace {

constexpr const char* kThreeWeights = R"(
// x A * x B + x C, with the gradients of A, B and C from one node.
struct ThreeWeights : torch::autograd::Function<ThreeWeights> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& x, const torch::Tensor& a,
                               const torch::Tensor& b,
                               const torch::Tensor& c) {
    context->save_for_backward({x, a, b, c});
    return x.mm(a) * x.mm(b) + x.mm(c);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list grads) {
    auto saved = context->get_saved_variables();
    auto to_a = grads[0] * saved[0].mm(saved[2]);
    auto to_b = grads[0] * saved[0].mm(saved[1]);
    return {to_a.mm(saved[1].t()) + to_b.mm(saved[2].t()) +
                grads[0].mm(saved[3].t()),
            saved[0].t().mm(to_a), saved[0].t().mm(to_b),
            saved[0].t().mm(grads[0])};
  }
};
)";

constexpr const char* kThrowing = R"(
struct Throwing : torch::autograd::Function<Throwing> {
  static torch::Tensor forward(torch::autograd::AutogradContext*,
                               const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("on purpose");
  }
};
)";

constexpr const char* kEveryOther = R"(
torch::Tensor every_other(const torch::Tensor& like) {
  return torch::arange(like.numel()).remainder(2).eq(0).view(like.sizes());
}
)";

std::string list_of(const std::vector<int64_t>& sizes) {
  std::string text = "{";
  for (int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "}";
}

std::string condition_of(Use use) {
  switch (use) {
    case Use::always:
      return "true";
    case Use::never:
      return "false";
    case Use::even_steps:
      return "step % 2 == 0";
    case Use::rank_zero:
      return "rank == 0";
    case Use::one_rank_in_turn:
      return "rank == step % lockstep::get_world_size()";
  }
  return "true";
}

class Program {
 public:
  Program(const Case& fuzz_case, const std::string& reason)
      : case_(fuzz_case), reason_(reason) {}

  std::string text() {
    out_ << "// Seed " << case_.seed << ", " << case_.world_size
         << " ranks: " << reason_ << "\n"
         << "// lockstep run --standalone --nproc-per-node=" << case_.world_size
         << " ./program\n"
         << "#include <lockstep/lockstep.h>\n#include <torch/torch.h>\n\n"
         << "#include <functional>\n#include <iostream>\n#include <map>\n"
         << "#include <optional>\n#include <sstream>\n#include <vector>\n";
    print_functions();
    out_ << "\nint rank = 0;\nint step = 0;\n"
         << "bool throws_in_forward = false, throws_in_backward = false;\n";
    print_parameters();
    for (int i = 0; i < case_.wrappers; ++i) print_module(i);
    print_main();
    return out_.str();
  }

 private:
  bool has_op(OpKind kind) const {
    return std::ranges::any_of(case_.ops,
                               [&](const Op& op) { return op.kind == kind; });
  }
  bool has_exception() const {
    return std::ranges::any_of(case_.events, [](const Event& event) {
      return event.exception != Deliberate::none;
    });
  }

  void print_functions() {
    if (has_op(OpKind::custom)) out_ << kThreeWeights;
    if (has_op(OpKind::where)) out_ << kEveryOther;
    if (has_exception()) out_ << kThrowing;
  }

  std::string name(size_t parameter) const {
    return "p[" + std::to_string(parameter) + "]";
  }

  void print_parameters() {
    out_ << "\nstd::vector<torch::Tensor> make_parameters() {\n"
         << "  torch::manual_seed(0);\n"
         << "  std::vector<torch::Tensor> p;\n"
         << "  auto random = [](at::IntArrayRef sizes) {\n"
         << "    return torch::randn(sizes, torch::kDouble) / " << case_.width
         << ";\n  };\n";
    for (size_t i = 0; i < case_.parameters.size(); ++i) {
      const auto& parameter = case_.parameters[i];
      auto sizes = parameter.sizes;
      std::string text;
      if (parameter.layout == Layout::transposed && sizes.size() > 1) {
        std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
        text = "random(" + list_of(sizes) + ").transpose(-2, -1)";
      } else if (parameter.layout == Layout::gapped) {
        ++sizes.back();
        text = "random(" + list_of(sizes) + ").narrow(-1, 0, " +
               std::to_string(parameter.sizes.back()) + ")";
      } else {
        text = "random(" + list_of(sizes) + ")";
      }
      if (parameter.is_complex) {
        text = "torch::complex(" + text + ", " + text + ")";
      }
      out_ << "  p.push_back(" << text << ".set_requires_grad("
           << (parameter.is_frozen ? "false" : "true") << "));  // p" << i
           << "\n";
      if (parameter.has_hook && !parameter.is_frozen) {
        out_ << "  p.back().register_hook([](torch::Tensor g) { return g * 2; "
                "});\n";
      }
    }
    out_ << "  return p;\n}\n";
  }

  std::string module_name(int wrapper) const {
    return case_.wrappers == 1 ? "Net" : std::string("Net") + "ABC"[wrapper];
  }

  void print_module(int wrapper) {
    const auto type = module_name(wrapper);
    out_ << "\nstruct " << type << " : torch::nn::Module {\n  explicit " << type
         << "(std::vector<torch::Tensor> tensors) : p(tensors) {\n";
    for (size_t i : parameters_of(case_, wrapper)) {
      const auto& parameter = case_.parameters[i];
      const auto quoted = "\"p" + std::to_string(i);
      const auto trained =
          parameter.is_frozen ? ", " + name(i) + ".requires_grad()" : "";
      if (parameter.is_sparse) {
        out_ << "    sparse = register_module(" << quoted
             << "\", torch::nn::Embedding(\n        "
                "torch::nn::EmbeddingOptions("
             << parameter.sizes[0] << ", " << parameter.sizes[1]
             << ").sparse(true)._weight(" << name(i) << ")));\n";
        continue;
      }
      out_ << "    register_parameter(" << quoted << "\", " << name(i)
           << trained << ");\n";
      if (parameter.is_registered_twice) {
        out_ << "    register_parameter(" << quoted << "_again\", " << name(i)
             << trained << ");\n";
      }
    }
    if (has_op(OpKind::running_mean)) {
      out_ << "    mean = register_buffer(\"mean\", torch::zeros({"
           << case_.width << "}, torch::kDouble));\n";
    }
    out_ << "  }\n";
    print_forward(wrapper);
    out_ << "  std::vector<torch::Tensor> p;\n  torch::Tensor aux, mean;\n"
         << "  torch::nn::Embedding sparse{nullptr};\n};\n";
  }

  // Its outputs are a vector, whatever type the fuzzer used.
  void print_forward(int wrapper) {
    out_ << "  // The last activation, then other outputs.\n"
         << "  std::vector<torch::Tensor> forward(torch::Tensor x) {\n"
         << "    std::vector<torch::Tensor> outputs(1);\n"
         << "    torch::Tensor y;\n";
    bool is_within = false;
    auto leave = [&] {
      if (is_within) out_ << "      return x;\n    }, x);\n";
      is_within = false;
    };
    for (size_t i : ops_of(case_, wrapper)) {
      const auto& op = case_.ops[i];
      if (op.is_checkpointed && !is_within) {
        out_ << "    x = lockstep::checkpoint({.early_stop = false}, "
             << "[this](torch::Tensor x) {\n"
             << "      torch::Tensor y;\n";
        is_within = true;
      } else if (!op.is_checkpointed) {
        leave();
      }
      print_op(i, is_within ? "      " : "    ");
    }
    leave();
    out_ << "    outputs[0] = x" << (case_.modifies_result ? " * 1.0" : "")
         << ";\n    return outputs;\n  }\n";
  }

  void print_op(size_t index, std::string indent) {
    const auto& op = case_.ops[index];
    if (index == case_.throwing_op && has_exception()) {
      out_ << indent
           << "if (throws_in_forward) throw std::runtime_error(\"\");\n"
           << indent << "if (throws_in_backward) x = Throwing::apply(x);\n";
    }
    const bool is_conditional = op.use != Use::always;
    if (is_conditional) {
      out_ << indent << "if (" << condition_of(op.use) << ") {\n";
      indent += "  ";
    }
    std::vector<std::string> names;
    for (size_t i : op.parameters) names.push_back(name(i));
    if (op.kind == OpKind::running_mean) {
      out_ << indent << "{\n"
           << indent << "  at::NoGradGuard no_grad;\n"
           << indent << "  mean.mul_(0.9).add_(x.detach().mean(0), 0.1);\n"
           << indent << "}\n"
           << indent << "y = x + mean.clone();\n";
    } else if (op.kind == OpKind::embedding) {
      const auto& parameter = case_.parameters[op.parameters[0]];
      const auto rows = "torch::arange(x.size(0)).remainder(" +
                        std::to_string(parameter.sizes[0]) + ")";
      out_ << indent << "y = x + "
           << (parameter.is_sparse
                   ? "sparse->forward(" + rows + ")"
                   : "torch::embedding(" + names[0] + ", " + rows + ")")
           << ";\n";
    } else {
      out_ << indent << "y = " << text_of(op.kind, names) << ";\n";
    }
    if (op.activation != Activation::none) {
      out_ << indent << "y = y."
           << (op.activation == Activation::tanh ? "tanh" : "relu") << "();\n";
    }
    if (op.is_output) {
      // An output that the loss leaves out exists all the same.
      out_ << indent << "outputs.push_back("
           << (op.loss_use == Use::always
                   ? "y"
                   : condition_of(op.loss_use) + " ? y : torch::Tensor()")
           << ");\n";
    }
    if (!op.is_branch) out_ << indent << "x = y;\n";
    if (is_conditional) out_ << indent.substr(2) << "}\n";
  }

  template <class T>
  void print_value(const T& value) {
    out_ << value;
  }
  void print_value(const std::optional<double>& value) { out_ << *value; }

  void print_options() {
    out_ << "  lockstep::DistributedDataParallelOptions options;\n"
         << std::boolalpha;
    const Options plain;
    for_each_ddp_option([&](const char* name, auto of) {
      const auto& value = of(case_.options);
      if (value == of(plain)) return;
      out_ << "  options." << name << " = ";
      print_value(value);
      out_ << ";\n";
    });
    for (size_t i = 0; i < case_.parameters.size(); ++i) {
      const auto& parameter = case_.parameters[i];
      const auto quoted = "\"p" + std::to_string(i) + "\"";
      if (parameter.is_ignored) {
        out_ << "  options.params_and_buffers_to_ignore.push_back(" << quoted
             << ");\n";
      }
    }
  }

  void print_main() {
    out_ << "\nint main() {\n"
         << "  auto group = lockstep::init_process_group();\n"
         << "  rank = lockstep::get_rank();\n"
         << "  auto p = make_parameters();\n";
    print_options();
    for (int i = 0; i < case_.wrappers; ++i) {
      const auto type = module_name(i);
      out_ << "  auto net" << i << " = std::make_shared<" << type << ">(p);\n"
           << "  std::optional<lockstep::DistributedDataParallel<"
           << "std::shared_ptr<" << type << ">>>\n      wrapper" << i
           << "(std::in_place, net" << i << ", options);\n"
           << "  auto& model" << i << " = *wrapper" << i << ";\n";
    }
    if (case_.options.has_comm_hook) {
      out_ << "  model0.register_comm_hook(lockstep::allreduce_hook());\n";
    }
    print_optimizer();
    out_ << R"(  std::map<int, torch::Tensor> losses;
  std::vector<torch::Tensor> kept;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> held;
  auto input = [](int batch) {
    torch::manual_seed(100 + step * 100 + batch * 10 + rank);
    return torch::randn({)"
         << case_.rows << ", " << case_.width << R"(}, torch::kDouble);
  };
  auto loss_of = [](auto& net, const std::vector<torch::Tensor>& outputs) {
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
)"
         << (case_.modifies_result ? "    auto first = outputs[0];\n"
                                     "    first.mul_(0.5).add_(0.1);\n"
                                   : "")
         << R"(    for (const auto& output : outputs) {
      if (output.defined()) loss = loss + (output.tanh() - 0.3).square().mean();
    }
    if (net.aux.defined()) loss = loss + 0.1 * net.aux.tanh();
    return loss;
  };
  auto show = [&](const char* when) {
    for (size_t i = 0; i < p.size(); ++i) {
      std::ostringstream line;
      line << "step " << step << ", rank " << rank << ", " << when << ": p"
           << i << " " << torch::real(p[i].sum()).item<double>()
           << ", gradient ";
      if (p[i].grad().defined()) {
        line << torch::real(p[i].grad().to_dense().sum()).item<double>();
      } else {
        line << "none";
      }
      std::cout << line.str() + "\n";
    }
  };
)";
    int step = -1;
    for (const auto& event : case_.events) {
      if (event.step != step) {
        step = event.step;
        out_ << "\n  step = " << step << ";\n";
      }
      print_event(event);
    }
    out_ << "}\n";
  }

  void print_optimizer() {
    const auto& options = case_.options;
    const bool adamw = options.optimizer == Optimizer::adamw;
    const std::string kind = adamw ? "AdamW" : "SGD";
    switch (options.stepping) {
      case Stepping::plain:
        out_ << "  torch::optim::" << kind << " optimizer(p, 0.05);\n";
        return;
      case Stepping::in_backward:
        out_ << "  model0.apply_optimizer_in_backward([](auto one) {\n"
             << "    return std::make_unique<torch::optim::SGD>(one, 0.05);\n"
             << "  });\n";
        return;
      case Stepping::zero_of_list:
        out_ << "  lockstep::ZeroRedundancyOptimizer<lockstep::optim::" << kind
             << "> optimizer(p, {.lr = 0.05});\n";
        return;
      default:
        out_ << "  lockstep::ZeroRedundancyOptimizer<lockstep::optim::" << kind
             << "> optimizer(\n      model0, {.lr = 0.05}, {";
        if (options.stepping == Stepping::zero_shared) {
          out_ << ".shared_parameters = true";
        } else if (options.stepping == Stepping::zero_in_backward) {
          out_ << ".step_in_backward = true";
        }
        out_ << "});\n";
    }
  }

  std::string sum_of(const std::vector<int>& slots) const {
    std::string sum;
    for (int slot : slots) {
      sum +=
          (sum.empty() ? "losses[" : " + losses[") + std::to_string(slot) + "]";
    }
    return slots.size() == 1 ? sum : "(" + sum + ")";
  }

  void print_event(const Event& event) {
    const std::string indent = event.is_on_rank_zero_only ? "    " : "  ";
    if (event.is_on_rank_zero_only) out_ << "  if (rank == 0) {\n";
    out_ << indent;
    const std::string zero = event.sets_to_none ? "" : "/*set_to_none=*/false";
    switch (event.kind) {
      case EventKind::forward:
        print_forward_event(event, indent);
        break;
      case EventKind::backward:
        out_ << (throws_ ? "try { " : "") << sum_of(event.slots) << ".backward("
             << (event.retains_graph ? "{}, /*retain_graph=*/true" : "") << ")"
             << (throws_ ? "; } catch (const std::exception&) {}" : ";")
             << "\n";
        throws_ = false;
        if (!event.is_on_rank_zero_only) {
          out_ << indent << "show(\"backward\");\n";
        }
        break;
      case EventKind::gradient:
        out_ << "torch::autograd::grad({" << sum_of(event.slots)
             << "}, model0->parameters(), {}, true, false, true);\n";
        break;
      case EventKind::zero_grad:
        out_ << (case_.options.stepping == Stepping::in_backward
                     ? "net0->zero_grad("
                     : "optimizer.zero_grad(")
             << zero << ");\n";
        break;
      case EventKind::keep_gradients:
        out_ << "kept.clear();\n"
             << indent << "for (auto& one : p) {\n"
             << indent << "  kept.push_back(one.grad().defined() ? "
             << "one.grad().clone() : torch::Tensor());\n"
             << indent << "}\n";
        break;
      case EventKind::restore_gradients:
        out_ << "for (size_t i = 0; i < p.size(); ++i) p[i].mutable_grad() = "
             << "kept[i];\n"
             << indent << "show(\"put back\");\n";
        break;
      case EventKind::hold_gradients: {
        static constexpr const char* kHolds[] = {
            "", ".detach()", ".variable_data()", ".flatten()"};
        out_ << "for (auto& one : p) {\n"
             << indent << "  if (!one.grad().defined()) continue;\n"
             << indent << "  held.emplace_back(one.grad()"
             << kHolds[static_cast<size_t>(event.hold)]
             << ", one.grad().clone());\n"
             << indent << "}\n";
        break;
      }
      case EventKind::change_gradients: {
        static constexpr const char* kChanges[] = {
            "set_data(torch::full_like(grad, rank + 1))",
            "resize_({grad.numel() + 3})", "resize_({grad.numel() / 2})",
            "t_()"};
        out_ << "for (auto& one : p) {\n"
             << indent << "  const auto& grad = one.grad();\n"
             << indent << "  if (!grad.defined()) continue;\n"
             << indent << "  grad."
             << kChanges[static_cast<size_t>(event.change)] << ";\n";
        if (event.change != Change::rebound) {
          out_ << indent << "  one.mutable_grad().reset();\n";
        }
        out_ << indent << "}\n";
        break;
      }
      case EventKind::round_trip:
        for (int i = 0; i < case_.wrappers; ++i) {
          out_ << (i == 0 ? "" : indent) << "net" << i
               << "->to(torch::kFloat);\n";
        }
        for (int i = 0; i < case_.wrappers; ++i) {
          out_ << indent << "net" << i << "->to(torch::kDouble);\n";
        }
        break;
      case EventKind::set_frozen:
        out_ << "p[" << event.parameter << "].set_requires_grad("
             << (event.is_frozen ? "false" : "true") << ");\n";
        break;
      case EventKind::wrap_again: {
        const auto number = std::to_string(event.wrapper);
        const auto type = module_name(event.wrapper);
        out_ << "losses.clear();\n  wrapper" << number << ".reset();\n  net"
             << number << " = std::make_shared<" << type << ">(p);\n  wrapper"
             << number << ".emplace(net" << number << ", options);\n";
        break;
      }
      case EventKind::step:
        if (case_.options.stepping != Stepping::in_backward) {
          out_ << "optimizer.step();\n" << indent;
        }
        if (case_.options.stepping == Stepping::zero_shared) {
          out_ << "optimizer.synchronize();\n" << indent;
        }
        out_ << "show(\"step\");\n";
        break;
    }
    if (event.is_on_rank_zero_only) out_ << "  }\n";
  }

  void print_forward_event(const Event& event, const std::string& indent) {
    const auto number = std::to_string(event.wrapper);
    const auto slot = "losses[" + std::to_string(event.slot) + "]";
    const bool needs_grad =
        event.has_penalty ||
        std::ranges::any_of(case_.ops, &Op::is_checkpointed);
    const bool throws = event.exception != Deliberate::none;
    const char* flag = event.exception == Deliberate::in_forward
                           ? "throws_in_forward"
                           : "throws_in_backward";
    if (throws) {
      out_ << flag << " = "
           << (event.throws_on_rank_zero_only ? "rank == 0" : "true") << ";\n"
           << indent;
    }
    const bool has_own_step = event.use_step != event.step;
    if (has_own_step) out_ << "step = " << event.use_step << ";\n" << indent;
    out_ << (event.exception == Deliberate::in_forward ? "try {\n" : "{\n");
    const auto inner = indent + "  ";
    if (event.has_no_grad) out_ << inner << "at::NoGradGuard no_grad;\n";
    if (!event.is_plain && !event.synchronises) {
      out_ << inner << "auto guard = model" << number << ".no_sync();\n";
    }
    out_ << inner << "auto x = input(" << event.batch << ")"
         << (needs_grad ? ".requires_grad_()" : "") << ";\n"
         << inner << "auto outputs = "
         << (event.is_plain ? "net" + number + "->forward(x)"
                            : "model" + number + "(x)")
         << ";\n";
    if (!event.has_no_grad) {
      out_ << inner << slot << " = loss_of(*net" << number << ", outputs);\n";
    }
    if (event.has_penalty) {
      out_ << inner
           << "auto slope = torch::autograd::grad({outputs[0].square().sum()}, "
           << "{x}, {}, true, true)[0];\n"
           << inner;
      if (event.keeps_penalty_apart) {
        out_ << "losses[" << event.slot + kPenalties << "] =";
      } else {
        out_ << slot << " = " << slot << " +";
      }
      out_ << " 0.1 * slope.tanh().square().mean();\n";
    }
    out_ << indent
         << (event.exception == Deliberate::in_forward
                 ? "} catch (const std::exception&) {}\n"
                 : "}\n");
    if (throws) out_ << indent << flag << " = false;\n";
    if (has_own_step) out_ << indent << "step = " << event.step << ";\n";
    throws_ |= event.exception == Deliberate::in_backward;
  }

  const Case& case_;
  const std::string& reason_;
  std::ostringstream out_;
  bool throws_ = false;  // the next backward
};

}  // namespace

std::string program_of(const Case& fuzz_case, const std::string& reason) {
  return Program(fuzz_case, reason).text();
}

}  // namespace lockstep::internal::fuzz
