#include "lockstep/parallel/pipeline/schedule.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace lockstep {
namespace {

using ActionKind = PipelineActionKind;

struct NamedKind {
  std::string_view name;
  ActionKind kind;
  bool has_micro_batch;
};

constexpr std::array<NamedKind, 11> kNamedKinds{
    {{"F", ActionKind::forward, true},
     {"B", ActionKind::backward, true},
     {"I", ActionKind::backward_input, true},
     {"W", ActionKind::backward_weight, true},
     {"SEND_F", ActionKind::send_forward, true},
     {"RECV_F", ActionKind::recv_forward, true},
     {"SEND_B", ActionKind::send_backward, true},
     {"RECV_B", ActionKind::recv_backward, true},
     {"UNSHARD", ActionKind::unshard, false},
     {"RESHARD", ActionKind::reshard, false},
     {"REDUCE_GRAD", ActionKind::reduce_grad, false}}};

const NamedKind& named(ActionKind kind) {
  return *std::ranges::find(kNamedKinds, kind, &NamedKind::kind);
}

constexpr std::string_view kOverlap = "OVERLAP_F_B";

// Takes the digits at the beginning of `text` off; false if there are none or
// too many.
bool take_number(std::string_view& text, int& number) {
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end == text.data()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number >= 0;
}

std::string_view trimmed(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> divided(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

}  // namespace

bool is_compute(ActionKind kind) {
  return kind == ActionKind::forward || kind == ActionKind::backward ||
         kind == ActionKind::backward_input ||
         kind == ActionKind::backward_weight;
}

bool is_message(ActionKind kind) {
  return kind == ActionKind::send_forward || kind == ActionKind::recv_forward ||
         kind == ActionKind::send_backward || kind == ActionKind::recv_backward;
}

std::string to_string(const PipelineAction& action) {
  const NamedKind& kind = named(action.kind);
  std::string text = std::to_string(action.stage);
  text += kind.name;
  if (kind.has_micro_batch) text += std::to_string(action.micro_batch);
  return text;
}

std::string to_string(const PipelineSlot& slot) {
  if (slot.empty()) return "";
  if (slot.size() == 1) return to_string(slot.front());
  std::string text = "(";
  for (const PipelineAction& action : slot) {
    if (text.size() > 1) text += ';';
    text += to_string(action);
  }
  return text + ')' + std::string(kOverlap);
}

PipelineAction parse_pipeline_action(const std::string& text) {
  std::string_view rest = trimmed(text);
  PipelineAction action;
  if (take_number(rest, action.stage)) {
    for (const NamedKind& kind : kNamedKinds) {
      if (!rest.starts_with(kind.name)) continue;
      std::string_view number = rest.substr(kind.name.size());
      const bool complete =
          kind.has_micro_batch ? take_number(number, action.micro_batch) : true;
      if (!complete || !number.empty()) continue;
      action.kind = kind.kind;
      return action;
    }
  }
  throw std::invalid_argument(
      "\"" + text +
      "\" is not an action of a pipeline; one is a stage, F, B, I, W, SEND_F, "
      "RECV_F, SEND_B or RECV_B, and a micro-batch, as in \"2F0\"");
}

PipelineSlot parse_pipeline_slot(const std::string& text) {
  const std::string_view whole = trimmed(text);
  if (whole.empty()) return {};
  if (whole.front() != '(') return {parse_pipeline_action(text)};
  const size_t end = whole.find(')');
  if (end == std::string_view::npos || whole.substr(end + 1) != kOverlap) {
    throw std::invalid_argument(
        "\"" + text +
        "\" is not a slot of a pipeline; two actions in one slot are written "
        "\"(0F4;3B1)OVERLAP_F_B\"");
  }
  PipelineSlot slot;
  for (std::string_view part : divided(whole.substr(1, end - 1), ';')) {
    slot.push_back(parse_pipeline_action(std::string(part)));
  }
  return slot;
}

std::string to_csv(const PipelineSchedule& schedule) {
  std::string csv;
  for (const auto& slots : schedule.ranks) {
    // A line with one empty field would be an empty line, which has none.
    if (slots.size() == 1 && slots.front().empty()) csv += "\"\"";
    for (size_t i = 0; i < slots.size(); ++i) {
      if (i > 0) csv += ',';
      csv += to_string(slots[i]);
    }
    csv += "\r\n";
  }
  return csv;
}

PipelineSchedule parse_pipeline_csv(const std::string& text) {
  PipelineSchedule schedule;
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    auto& slots = schedule.ranks.emplace_back();
    if (line.empty()) continue;
    for (std::string_view field : divided(line, ',')) {
      if (field == "\"\"") field = {};
      try {
        slots.push_back(parse_pipeline_slot(std::string(field)));
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(
            "line " + std::to_string(schedule.ranks.size()) + ", field " +
            std::to_string(slots.size() + 1) + ": " + error.what());
      }
    }
  }
  return schedule;
}

void save_pipeline_csv(const PipelineSchedule& schedule,
                       const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << to_csv(schedule) << std::flush;
  if (!file) {
    throw std::runtime_error("cannot write the schedule " + path + ": " +
                             std::strerror(errno));
  }
}

PipelineSchedule load_pipeline_csv(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read the schedule " + path + ": " +
                             std::strerror(errno));
  }
  return parse_pipeline_csv({std::istreambuf_iterator<char>(file), {}});
}

std::string to_table(const PipelineSchedule& schedule) {
  std::vector<size_t> widths;
  for (const auto& slots : schedule.ranks) {
    widths.resize(std::max(widths.size(), slots.size()), 0);
    for (size_t i = 0; i < slots.size(); ++i) {
      widths[i] = std::max(widths[i], to_string(slots[i]).size());
    }
  }
  const size_t label = std::to_string(schedule.ranks.size()).size();
  std::string table;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    std::string line = "rank " + padded(std::to_string(rank), label) + " |";
    const auto& slots = schedule.ranks[rank];
    for (size_t i = 0; i < slots.size(); ++i) {
      line += " " + padded(to_string(slots[i]), widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    table += line + "\n";
  }
  return table;
}

}  // namespace lockstep
