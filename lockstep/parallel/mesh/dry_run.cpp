#include "lockstep/parallel/mesh/dry_run.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "lockstep/parallel/mesh/mesh_layout.h"

namespace lockstep {
namespace {

int64_t rounded_part(int64_t whole, int64_t parts) {
  return (whole + parts - 1) / parts;
}

void require_dry_run_number(const char* what, int64_t given, int64_t least) {
  if (given >= least) return;
  throw std::invalid_argument("dry_run: " + std::string(what) + " is " +
                              std::to_string(given) + "; give at least " +
                              std::to_string(least));
}

void check_dry_run(const DryRunModel& model) {
  require_dry_run_number("parameters", model.parameters, 1);
  require_dry_run_number("parameter_bytes", model.parameter_bytes, 0);
  require_dry_run_number("gradient_bytes", model.gradient_bytes, 0);
  require_dry_run_number("optimizer_bytes", model.optimizer_bytes, 0);
  if (model.zero_stage < 0 || model.zero_stage > 3) {
    throw std::invalid_argument("dry_run: zero_stage is " +
                                std::to_string(model.zero_stage) +
                                "; allowed are 0, 1, 2 and 3");
  }
  require_dry_run_number("units", model.units, 1);
  require_dry_run_number("layers", model.layers, 0);
  if (model.layers == 0) return;
  require_dry_run_number("hidden", model.hidden, 1);
  require_dry_run_number("sequence", model.sequence, 1);
  require_dry_run_number("micro_batch", model.micro_batch, 1);
  require_dry_run_number("micro_batches", model.micro_batches, 1);
  require_dry_run_number("activation_bytes", model.activation_bytes, 1);
}

int axis_size_or_one(const MeshLayout& layout, const char* axis) {
  return layout.has(axis) ? layout.size(axis) : 1;
}

// Collects what is sent along one axis. A ring of n ranks moves n - 1 parts of
// n of a tensor to gather it or to reduce and scatter it, and twice as much to
// reduce it to all.
class AxisTraffic {
 public:
  AxisTraffic(std::vector<DryRunTraffic>& traffic, std::string name, int ranks)
      : traffic_(traffic), name_(std::move(name)), ranks_(ranks) {}

  // `bytes` are those of all calls together.
  void all_reduce(const char* what, int64_t calls, int64_t bytes) {
    add("all_reduce", what, calls, bytes, 2 * around(bytes));
  }
  void all_reduce_coalesced(const char* what, int64_t calls, int64_t bytes) {
    add("all_reduce_coalesced", what, calls, bytes, 2 * around(bytes));
  }
  void all_gather(const char* what, int64_t calls, int64_t bytes) {
    add("all_gather_into_tensor", what, calls, bytes, around(bytes));
  }
  void reduce_scatter(const char* what, int64_t calls, int64_t bytes) {
    add("reduce_scatter_tensor", what, calls, bytes, around(bytes));
  }
  void send(const char* what, int64_t calls, int64_t bytes) {
    add("isend", what, calls, bytes, bytes);
  }

 private:
  int64_t around(int64_t bytes) const {
    return (ranks_ - 1) * rounded_part(bytes, ranks_);
  }
  void add(const char* operation, const char* what, int64_t calls,
           int64_t bytes, int64_t sent) {
    if (ranks_ == 1 || calls == 0) return;
    traffic_.push_back({.axis = name_,
                        .ranks = ranks_,
                        .operation = operation,
                        .what = what,
                        .calls = calls,
                        .bytes = bytes,
                        .sent = sent});
  }

  std::vector<DryRunTraffic>& traffic_;
  const std::string name_;
  const int ranks_;
};

void add_gradient_traffic(DryRun& run, int64_t parameters) {
  const auto& model = run.model;
  const int shard = axis_size_or_one(run.layout, "shard");
  const bool sharded = model.zero_stage > 0;
  AxisTraffic along_shard(run.traffic, "shard", shard);
  const auto bytes = parameters * model.parameter_bytes;
  const auto gradients = parameters * model.gradient_bytes;
  if (model.zero_stage == 1) {
    along_shard.all_reduce("gradients", model.units, gradients);
    along_shard.all_gather("parameters, after the step", model.units, bytes);
  } else if (sharded) {
    along_shard.all_gather("parameters, forward", model.units, bytes);
    if (model.zero_stage == 3) {
      along_shard.all_gather("parameters, backward", model.units, bytes);
    }
    along_shard.reduce_scatter("gradients", model.units, gradients);
  }
  std::string names;
  int replicas = 1;
  for (const auto& [name, size] : run.layout.axes()) {
    if (size == 1 || name == "tensor" || name == "pipeline" ||
        (name == "shard" && sharded)) {
      continue;
    }
    names += (names.empty() ? "" : " x ") + name;
    replicas *= size;
  }
  AxisTraffic(run.traffic, names, replicas)
      .all_reduce("gradients", model.units,
                  (sharded ? rounded_part(parameters, shard) : parameters) *
                      model.gradient_bytes);
}

void add_activation_traffic(DryRun& run) {
  const auto& model = run.model;
  const int tensor = axis_size_or_one(run.layout, "tensor");
  const int pipeline = axis_size_or_one(run.layout, "pipeline");
  const int context = axis_size_or_one(run.layout, "context");
  // The bytes are those of one rank, micro-batch and layer.
  const auto activations = model.micro_batch *
                           rounded_part(model.sequence, context) *
                           model.hidden * model.activation_bytes;
  const auto layers =
      rounded_part(model.layers, pipeline) * model.micro_batches;
  AxisTraffic along_tensor(run.traffic, "tensor", tensor);
  if (model.sequence_parallel) {
    along_tensor.all_gather("activations", 4 * layers,
                            4 * layers * activations);
    along_tensor.reduce_scatter("activations", 4 * layers,
                                4 * layers * activations);
    const auto feature = model.hidden * model.gradient_bytes;
    along_tensor.all_reduce("gradients of biases", 2 * layers,
                            2 * layers * feature);
    along_tensor.all_reduce_coalesced("gradients of norms", 2 * layers,
                                      4 * layers * feature);
  } else {
    along_tensor.all_reduce("activations", 4 * layers,
                            4 * layers * activations);
  }
  AxisTraffic along_pipeline(run.traffic, "pipeline", pipeline);
  const auto messages = (pipeline > 2 ? 2 : 1) * model.micro_batches;
  along_pipeline.send("activations and gradients", messages,
                      messages * activations);
  const auto keys_and_values = 2 * rounded_part(activations, tensor);
  AxisTraffic along_context(run.traffic, "context", context);
  const auto hops = layers * (context - 1);
  along_context.send("keys and values, forward", hops, hops * keys_and_values);
  along_context.send("keys and values, backward", hops, hops * keys_and_values);
  along_context.send("their gradients", layers * context,
                     layers * context * keys_and_values);
}

std::string in_thousands(int64_t number) {
  const auto digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

// Writes rows with columns as wide as their widest cell; the first `texts`
// columns are texts, the others numbers.
void write_dry_run_table(std::ostream& out,
                         const std::vector<std::vector<std::string>>& rows,
                         size_t texts) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line +=
          (i > 0 ? "  " : "") + (i < texts ? row[i] + space : space + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  }
}

}  // namespace

DryRun dry_run(const MeshLayout& layout, const DryRunModel& model) {
  check_dry_run(model);
  DryRun run{.layout = layout, .model = model, .memory = {}, .traffic = {}};
  const auto parameters = rounded_part(
      model.parameters, int64_t{axis_size_or_one(layout, "tensor")} *
                            axis_size_or_one(layout, "pipeline"));
  const int shard = axis_size_or_one(layout, "shard");
  const auto kept = [&](int from_stage) {
    return model.zero_stage >= from_stage ? rounded_part(parameters, shard)
                                          : parameters;
  };
  run.memory = {.parameters = kept(3) * model.parameter_bytes,
                .gradients = kept(2) * model.gradient_bytes,
                .optimizer = kept(1) * model.optimizer_bytes};
  add_gradient_traffic(run, parameters);
  if (model.layers > 0) add_activation_traffic(run);
  return run;
}

std::string DryRun::to_string() const {
  std::ostringstream out;
  out << "mesh " << layout.to_string() << ", "
      << in_thousands(layout.world_size()) << " ranks; "
      << in_thousands(model.parameters) << " parameters, ZeRO stage "
      << model.zero_stage << "\n\n";
  std::vector<std::vector<std::string>> rows{
      {"axis", "group of rank 0", "size", "groups"}};
  for (const auto& [name, size] : layout.axes()) {
    rows.push_back({name, internal::ranks_text(layout.group_of(0, name)),
                    in_thousands(size),
                    in_thousands(layout.world_size() / size)});
  }
  write_dry_run_table(out, rows, 2);
  out << '\n';
  write_dry_run_table(out,
                      {{"memory of a rank", "bytes"},
                       {"parameters", in_thousands(memory.parameters)},
                       {"gradients", in_thousands(memory.gradients)},
                       {"optimizer", in_thousands(memory.optimizer)},
                       {"together", in_thousands(memory.total())}},
                      1);
  out << '\n';
  rows = {{"axis", "operation", "of", "calls of a step", "bytes",
           "sent by a rank"}};
  for (const auto& each : traffic) {
    rows.push_back({each.axis, each.operation, each.what,
                    in_thousands(each.calls), in_thousands(each.bytes),
                    in_thousands(each.sent)});
  }
  if (traffic.empty())
    out << "nothing is communicated\n";
  else
    write_dry_run_table(out, rows, 3);
  return out.str();
}

}  // namespace lockstep
