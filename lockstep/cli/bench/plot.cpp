#include "lockstep/cli/bench/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

// In pixels; a panel is drawn from its upper left corner.
constexpr double kWidth = 760;
constexpr double kHeight = 420;
constexpr double kTop = 40;     // of the picture, for its title
constexpr double kLeft = 70;    // of a panel, for the axis
constexpr double kRight = 130;  // for the legend
constexpr double kAbove = 30;
constexpr double kBelow = 50;
constexpr double kLegendLine = 20;

// Colours that colour-blind readers can tell apart too (Okabe and Ito, "Color
// Universal Design", 2008).
constexpr std::array<const char*, 7> kColours{"#000000", "#0072b2", "#56b4e9",
                                              "#009e73", "#d55e00", "#cc79a7",
                                              "#e69f00"};

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string text_at(double x, double y, const char* anchor,
                    const std::string& text, const char* more = "") {
  return format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" %s>", x, y,
                anchor, more) +
         escaped(text) + "</text>\n";
}

std::string line_at(double x1, double y1, double x2, double y2,
                    const char* colour) {
  return format(
      "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n",
      x1, y1, x2, y2, colour);
}

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

std::vector<Panel> panels_of(const json& results) {
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

std::string draw(const Panel& panel, double top) {
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
  std::string svg =
      text_at(kLeft, top + 18, "start", panel.title, "font-weight=\"bold\"");
  if (most == 0) return svg;
  const double bottom = top + kHeight - kBelow;
  const double right = kWidth - kRight;
  const double low = std::pow(10, std::floor(std::log10(least)));
  const double high = std::pow(10, std::max(std::ceil(std::log10(greatest)),
                                            std::floor(std::log10(least)) + 1));
  const Axis x(fewest, most, kLeft, right);
  const Axis y(low, high, bottom, top + kAbove);
  for (double time = low; time <= high * 1.01; time *= 10) {
    svg += line_at(kLeft, y.at(time), right, y.at(time), "#dddddd");
    svg += text_at(kLeft - 6, y.at(time) + 4, "end", time_text(time));
  }
  for (double bytes = std::exp2(std::ceil(std::log2(fewest)));
       bytes <= most * 1.01; bytes *= 16) {
    svg += line_at(x.at(bytes), top + kAbove, x.at(bytes), bottom, "#dddddd");
    svg += text_at(x.at(bytes), bottom + 16, "middle", bytes_text(bytes));
  }
  svg += line_at(kLeft, bottom, right, bottom, "#000000");
  svg += line_at(kLeft, top + kAbove, kLeft, bottom, "#000000");
  svg += text_at((kLeft + right) / 2, bottom + 36, "middle", "bytes of a rank");
  svg += format(
      "<text transform=\"translate(14 %.1f) rotate(-90)\" "
      "text-anchor=\"middle\">median latency</text>\n",
      (top + kAbove + bottom) / 2);
  for (size_t i = 0; i < panel.lines.size(); ++i) {
    const auto& line = panel.lines[i];
    const char* colour = kColours[i % kColours.size()];
    std::string points;
    std::string marks;
    for (const auto& [bytes, time] : line.points) {
      const auto place = std::pair(x.at(bytes), y.at(time));
      points += format("%s%.1f,%.1f", points.empty() ? "" : " ", place.first,
                       place.second);
      marks += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                      place.first, place.second, colour);
    }
    const double level =
        top + kAbove + 10 + kLegendLine * static_cast<double>(i);
    svg += "<g>\n<title>" + escaped(line.side) + "</title>\n";
    svg += "<polyline id=\"" + escaped(line.side) +
           format(
               "-%.0f\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\" "
               "points=\"",
               top, colour) +
           points + "\"/>\n" + marks;
    svg += line_at(right + 14, level, right + 34, level, colour);
    svg += text_at(right + 40, level + 4, "start", line.side);
    svg += "</g>\n";
  }
  return svg;
}

}  // namespace

std::string plot(const json& machine, const json& results) {
  const auto panels = panels_of(results);
  const double height = kTop + kHeight * static_cast<double>(panels.size());
  std::string svg = format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" "
      "width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
      kWidth, height, kWidth, height);
  svg += text_at(kLeft, 24, "start",
                 std::to_string(machine.at("cores").get<int>()) + " cores, " +
                     machine.at("cpu").get<std::string>());
  for (size_t i = 0; i < panels.size(); ++i) {
    svg += draw(panels[i], kTop + kHeight * static_cast<double>(i));
  }
  return svg + "</svg>\n";
}

}  // namespace lockstep::bench
