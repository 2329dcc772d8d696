#include "lockstep/cli/bench/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "lockstep/base/svg.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal::bench {
namespace {

using nlohmann::ordered_json;
using Anchor = SvgPicture::Anchor;

// In pixels; a panel is drawn from its upper left corner.
constexpr double kWidth = 760;
constexpr double kHeight = 420;
constexpr double kTop = 40;     // of the picture, for its title
constexpr double kLeft = 70;    // of a panel, for the axis
constexpr double kRight = 130;  // for the legend
constexpr double kAbove = 30;
constexpr double kBelow = 50;
constexpr double kLegendLine = 20;

std::string bytes_text(double bytes) {
  const char* units[] = {" B", " KiB", " MiB", " GiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 3; ++unit) bytes /= 1024;
  return format("%.4g%s", bytes, units[unit]);
}

std::string time_text(double microseconds) {
  if (microseconds >= 1e6) return format("%.4g s", microseconds / 1e6);
  if (microseconds >= 1e3) return format("%.4g ms", microseconds / 1e3);
  return format("%.4g us", microseconds);
}

// The places of values on a logarithmic axis.
class Axis {
 public:
  Axis(double lowest, double highest, double from, double to)
      : low_(std::log(lowest)),
        // A single value lies at the beginning of the axis.
        span_(std::max(std::log(highest) - low_, 1e-9)),
        from_(from),
        to_(to) {}
  double at(double value) const {
    return from_ + (std::log(value) - low_) / span_ * (to_ - from_);
  }

 private:
  double low_;
  double span_;
  double from_;
  double to_;
};

struct Line {
  std::string side;
  std::vector<std::pair<double, double>> points{};  // bytes, microseconds
};

struct Panel {
  std::string title;
  std::vector<Line> lines{};

  Line& line(const std::string& side) {
    for (auto& one : lines) {
      if (one.side == side) return one;
    }
    return lines.emplace_back(Line{.side = side});
  }
};

std::vector<Panel> panels_of(const ordered_json& results) {
  std::vector<Panel> panels;
  for (const auto& entry : results) {
    if (entry.at("bytes") == 0) continue;
    std::string title = entry.at("operation").get<std::string>();
    if (entry.at("reduce_op").is_string()) {
      title += " " + entry["reduce_op"].get<std::string>();
    }
    title += " " + entry.at("dtype").get<std::string>() + ", " +
             std::to_string(entry.at("ranks").get<int>()) + " ranks";
    if (entry.at("async").get<bool>()) title += ", asynchronous";
    if (panels.empty() || panels.back().title != title) {
      panels.push_back({.title = title});
    }
    auto& line = panels.back().line(entry.at("side"));
    if (entry.contains("error")) continue;
    // A coarse clock may measure 0, which has no logarithm.
    const double p50 = entry.at("latency_us").at("p50");
    line.points.emplace_back(entry["bytes"].get<double>(),
                             std::max(p50, 0.001));
  }
  for (auto& panel : panels) {
    for (auto& line : panel.lines) std::ranges::sort(line.points);
  }
  return panels;
}

void draw(const Panel& panel, double top, SvgPicture& picture) {
  double least = 1e300;
  double greatest = 0;
  double fewest = 1e300;
  double most = 0;
  for (const auto& line : panel.lines) {
    for (const auto& [bytes, time] : line.points) {
      fewest = std::min(fewest, bytes);
      most = std::max(most, bytes);
      least = std::min(least, time);
      greatest = std::max(greatest, time);
    }
  }
  picture.text({kLeft, top + 18}, Anchor::start, panel.title, true);
  if (most == 0) return;
  const double bottom = top + kHeight - kBelow;
  const double right = kWidth - kRight;
  const double low = std::pow(10, std::floor(std::log10(least)));
  const double high = std::pow(10, std::max(std::ceil(std::log10(greatest)),
                                            std::floor(std::log10(least)) + 1));
  const Axis x(fewest, most, kLeft, right);
  const Axis y(low, high, bottom, top + kAbove);
  for (double time = low; time <= high * 1.01; time *= 10) {
    picture.line({kLeft, y.at(time)}, {right, y.at(time)}, "#dddddd");
    picture.text({kLeft - 6, y.at(time) + 4}, Anchor::end, time_text(time));
  }
  for (double bytes = std::exp2(std::ceil(std::log2(fewest)));
       bytes <= most * 1.01; bytes *= 16) {
    const double place = x.at(bytes);
    picture.line({place, top + kAbove}, {place, bottom}, "#dddddd");
    picture.text({place, bottom + 16}, Anchor::middle, bytes_text(bytes));
  }
  picture.line({kLeft, bottom}, {right, bottom}, "#000000");
  picture.line({kLeft, top + kAbove}, {kLeft, bottom}, "#000000");
  picture.text({(kLeft + right) / 2, bottom + 36}, Anchor::middle,
               "bytes of a rank");
  picture.upward_text({14, (top + kAbove + bottom) / 2}, "median latency");
  for (size_t i = 0; i < panel.lines.size(); ++i) {
    const auto& line = panel.lines[i];
    const char* colour = kSvgColours[i % kSvgColours.size()];
    std::vector<SvgPicture::Point> points;
    for (const auto& [bytes, time] : line.points) {
      points.push_back({x.at(bytes), y.at(time)});
    }
    const double level =
        top + kAbove + 10 + kLegendLine * static_cast<double>(i);
    picture.begin_group(line.side);
    picture.polyline(line.side + format("-%.0f", top), points, colour);
    for (const auto& point : points) picture.dot(point, colour);
    picture.line({right + 14, level}, {right + 34, level}, colour);
    picture.text({right + 40, level + 4}, Anchor::start, line.side);
    picture.end_group();
  }
}

}  // namespace

std::string plot(const ordered_json& machine, const ordered_json& results) {
  const auto panels = panels_of(results);
  const double height = kTop + kHeight * static_cast<double>(panels.size());
  SvgPicture picture(kWidth, height);
  picture.text({kLeft, 24}, Anchor::start,
               std::to_string(machine.at("cores").get<int>()) + " cores, " +
                   machine.at("cpu").get<std::string>());
  for (size_t i = 0; i < panels.size(); ++i) {
    draw(panels[i], kTop + kHeight * static_cast<double>(i), picture);
  }
  return picture.file();
}

}  // namespace lockstep::internal::bench
