#include "lockstep/cli/report/scaling_result.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

constexpr int kFormat = 1;  // of the JSON

double median_of_rounds(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle]
                                : (values[middle - 1] + values[middle]) / 2;
}

ScalingRow row_of(const ScalingCase& which,
                  const std::vector<ScalingMeasurement>& rounds) {
  std::vector<double> rates;
  std::vector<double> seconds;
  std::vector<double> targets;
  for (const auto& round : rounds) {
    rates.push_back(round.samples_per_s);
    seconds.push_back(round.seconds);
    if (round.target_s) targets.push_back(*round.target_s);
  }
  const double rate = median_of_rounds(rates);
  return {.which = which,
          .samples_per_s = rate,
          .least_samples_per_s = std::ranges::min(rates),
          .most_samples_per_s = std::ranges::max(rates),
          .seconds = median_of_rounds(seconds),
          .target_s = targets.size() == rounds.size()
                          ? std::optional(median_of_rounds(targets))
                          : std::nullopt,
          .speed_up = 0,
          .efficiency = 0,
          .core_seconds = 1000 * which.nproc / rate};
}

// A number with about three digits, without an exponent.
std::string number(double value) {
  return format(value >= 100 ? "%.0f" : value >= 10 ? "%.1f" : "%.2f", value);
}

}  // namespace

std::vector<ScalingTable> make_tables(
    const std::vector<ScalingCase>& cases,
    const std::vector<std::vector<ScalingMeasurement>>& measured) {
  std::vector<ScalingRow> rows;
  for (size_t i = 0; i < cases.size(); ++i) {
    rows.push_back(row_of(cases[i], measured[i]));
    rows.back().speed_up =
        rows.back().samples_per_s / rows.front().samples_per_s;
    rows.back().efficiency = rows.back().speed_up / cases[i].nproc;
  }
  std::vector<ScalingTable> tables{{.scaling = Scaling::weak, .rows = {}}};
  for (const auto& row : rows) {
    if (row.which.scaling != tables.back().scaling) {
      // One process scales in neither way.
      tables.push_back({.scaling = row.which.scaling, .rows = {}});
      for (const auto& common : rows) {
        if (common.which.nproc == 1) tables.back().rows.push_back(common);
      }
    }
    tables.back().rows.push_back(row);
  }
  for (auto& table : tables) {
    std::ranges::stable_sort(table.rows, {}, [](const ScalingRow& row) {
      return std::pair(row.which.side, row.which.nproc);
    });
  }
  return tables;
}

std::string title_of(Scaling scaling) {
  return scaling == Scaling::weak
             ? "Weak scaling: each process has as many samples in a step as "
               "one "
               "process alone"
             : "Strong scaling: all processes together have as many samples in "
               "a step as one process alone";
}

std::vector<std::vector<std::string>> cells_of(const ScalingTable& table,
                                               const std::string& target) {
  std::vector<std::vector<std::string>> rows{{"", "samples/s", "least", "most",
                                              "speed-up", "efficiency",
                                              "core-seconds per 1000"}};
  if (!target.empty()) rows.front().push_back("seconds to " + target);
  for (const auto& row : table.rows) {
    rows.push_back(
        {row.which.label(), number(row.samples_per_s),
         number(row.least_samples_per_s), number(row.most_samples_per_s),
         format("%.2f", row.speed_up), format("%.0f %%", 100 * row.efficiency),
         number(row.core_seconds)});
    if (!target.empty()) {
      rows.back().push_back(row.target_s ? number(*row.target_s) : "not met");
    }
  }
  return rows;
}

std::string result_text(const std::vector<ScalingTable>& tables) {
  std::string text;
  bool threads_win = false;
  for (const auto& table : tables) {
    const ScalingRow* ranks = nullptr;
    for (const auto& row : table.rows) {
      if (row.which.side == ScalingSide::ranks) ranks = &row;
    }
    const int nproc = ranks->which.nproc;
    if (nproc == 1) {
      return "Only one process was measured, with " +
             number(ranks->samples_per_s) + " samples/s.";
    }
    text += (text.empty() ? "" : " ") + ranks->which.label() + " train ";
    std::vector<std::string> parts{
        format("%.2f times as fast as one (%.0f %% of ideal)", ranks->speed_up,
               100 * ranks->efficiency)};
    for (const auto& row : table.rows) {
      if (row.which.nproc != nproc || row.which.side == ScalingSide::ranks) {
        continue;
      }
      threads_win |= row.which.side == ScalingSide::threads &&
                     row.samples_per_s > ranks->samples_per_s;
      parts.push_back(format("%.2f times as fast as ",
                             ranks->samples_per_s / row.samples_per_s) +
                      (row.which.side == ScalingSide::compared
                           ? "the compared command"
                           : format("one process with %d threads", nproc)));
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      text += (i == 0                  ? ""
               : i + 1 == parts.size() ? ", and "
                                       : ", ") +
              parts[i];
    }
    text += table.scaling == Scaling::weak
                ? "."
                : ", if they divide the batch of one process.";
  }
  if (threads_win) {
    text +=
        " Threads are faster here. Change the line of the optimizer first: "
        "from "
        "torch::optim to lockstep::optim, and then to a "
        "ZeroRedundancyOptimizer "
        "with shared_parameters; more samples in a step help next.";
  }
  return text;
}

std::string load_warning(const ordered_json& machine) {
  const double load = machine.at("load_before");
  const int cores = machine.at("cores");
  if (load < 0.2 * cores) return "";
  return format(
      "The machine was busy before the runs (a load of %.2f on %d "
      "cores), so the figures may be too low.",
      load, cores);
}

std::string scaling_text(const ScalingResult& result) {
  std::string text = result_text(result.tables) + "\n";
  text += format("# %d cores, ", result.machine.at("cores").get<int>()) +
          result.machine.at("cpu").get<std::string>() + "; medians of " +
          std::to_string(result.rounds) +
          (result.rounds == 1 ? " round" : " rounds") + "\n";
  for (const auto& table : result.tables) {
    text += "\n" + title_of(table.scaling) + "\n\n" +
            table_text(cells_of(table, result.target), {1, 2, 3, 4, 5, 6, 7});
  }
  return text;
}

ordered_json scaling_json(const ScalingResult& result) {
  ordered_json tables = ordered_json::array();
  for (const auto& table : result.tables) {
    ordered_json rows = ordered_json::array();
    for (const auto& row : table.rows) {
      rows.push_back({{"side", name_of(row.which.side)},
                      {"nproc", row.which.nproc},
                      {"command", row.which.command},
                      {"samples_per_s",
                       {{"median", row.samples_per_s},
                        {"min", row.least_samples_per_s},
                        {"max", row.most_samples_per_s}}},
                      {"speed_up", row.speed_up},
                      {"efficiency", row.efficiency},
                      {"core_seconds_per_1000_samples", row.core_seconds},
                      {"seconds", row.seconds},
                      {"target_s", row.target_s ? ordered_json(*row.target_s)
                                                : ordered_json()}});
    }
    tables.push_back(
        {{"scaling", name_of(table.scaling)}, {"rows", std::move(rows)}});
  }
  const std::string busy = load_warning(result.machine);
  return {{"format", kFormat},
          {"date", result.date},
          {"lockstep", result.lockstep},
          {"torch", result.torch},
          {"result", result_text(result.tables)},
          {"warning", busy.empty() ? ordered_json() : ordered_json(busy)},
          {"command", result.command},
          {"compare", result.compare.empty() ? ordered_json()
                                             : ordered_json(result.compare)},
          {"target", result.target.empty() ? ordered_json()
                                           : ordered_json(result.target)},
          {"rounds", result.rounds},
          {"machine", result.machine},
          {"tables", std::move(tables)}};
}

namespace {

// In pixels.
constexpr double kWidth = 760;
constexpr double kHeight = 360;
constexpr double kLeft = 80;
constexpr double kRight = 180;  // for the legend
constexpr double kTop = 20;
constexpr double kBottom = 50;
constexpr double kLegendLine = 22;
// Colours that colour-blind readers can tell apart too (Okabe and Ito, "Color
// Universal Design", 2008).
constexpr const char* kRanksColour = "#0072b2";
constexpr const char* kThreadsColour = "#d55e00";
constexpr const char* kComparedColour = "#009e73";
constexpr const char* kIdealColour = "#999999";

constexpr const char* kStyle = R"(
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a;
       max-width: 60em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0.2em; }
h2 { font-size: 1.15em; margin-top: 2em; }
pre { background: #f4f4f4; padding: 0.7em 1em; border-radius: 6px;
      white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3em 0.9em; text-align: right;
         border-bottom: 1px solid #dddddd; }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
svg { max-width: 100%; min-width: 600px; height: auto; }
.small { color: #555555; font-size: 0.9em; }
.warning { border-left: 4px solid #d55e00; padding-left: 0.8em; }
@media (prefers-color-scheme: dark) {
  body { background: #1a1a1a; color: #e6e6e6; }
  pre { background: #2a2a2a; }
  th, td { border-color: #444444; }
  .small { color: #aaaaaa; }
  /* Black on white becomes white on black; colours stay what they are. */
  svg { filter: invert(0.9) hue-rotate(180deg); }
}
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// A white picture in SVG 1.1. Places are in pixels from the upper left corner.
class Picture {
 public:
  struct Point {
    double x = 0;
    double y = 0;
  };

  // `anchor`: which part of the text lies there, "start", "middle" or "end".
  void text(Point at, const char* anchor, const std::string& text) {
    svg_ += format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", at.x,
                   at.y, anchor) +
            escaped(text) + "</text>\n";
  }
  // Text that is read from bottom to top, with its middle there.
  void upward_text(Point middle, const std::string& text) {
    svg_ += format(
                "<text transform=\"translate(%.1f %.1f) rotate(-90)\" "
                "text-anchor=\"middle\">",
                middle.x, middle.y) +
            escaped(text) + "</text>\n";
  }
  void line(Point from, Point to, const char* colour, bool is_dashed = false) {
    svg_ += format(
        "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" "
        "stroke=\"%s\"%s/>\n",
        from.x, from.y, to.x, to.y, colour, dashes(is_dashed));
  }
  // `id` must be unique in the page.
  void polyline(const std::string& id, const std::vector<Point>& points,
                const char* colour, bool is_dashed) {
    svg_ += "<polyline id=\"" + id +
            format(
                "\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s "
                "points=\"",
                colour, dashes(is_dashed));
    for (const auto& [x, y] : points) svg_ += format("%.1f,%.1f ", x, y);
    svg_ += "\"/>\n";
  }
  void dot(Point middle, const char* colour) {
    svg_ += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                   middle.x, middle.y, colour);
  }
  // A browser shows `title` over what is drawn until end_group().
  void begin_group(const std::string& title) {
    svg_ += "<g>\n<title>" + escaped(title) + "</title>\n";
  }
  void end_group() { svg_ += "</g>\n"; }

  std::string element() const { return svg_ + "</svg>\n"; }

 private:
  static const char* dashes(bool is_dashed) {
    return is_dashed ? " stroke-dasharray=\"6 4\"" : "";
  }

  std::string svg_ = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" "
      "width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
      kWidth, kHeight, kWidth, kHeight);
};

// Returns 1, 2 or 5 times a power of ten, such that about `parts` of it make
// `whole`.
double tick(double whole, double parts) {
  const double least = whole / parts;
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least) return factor * power;
  }
  return 10 * power;
}

std::string plain(double value) {
  return value == std::floor(value) ? format("%.0f", value)
                                    : format("%.3g", value);
}

struct Curve {
  std::string name;
  std::string id;
  const char* colour;
  bool is_measured = true;
  std::vector<std::pair<int, double>> points{};  // nproc, samples per second
};

std::vector<Curve> curves_of(const ScalingTable& table) {
  Curve ranks{.name = "ranks", .id = "ranks", .colour = kRanksColour};
  Curve threads{.name = "threads of one process",
                .id = "threads",
                .colour = kThreadsColour};
  Curve compared{
      .name = "compared command", .id = "compared", .colour = kComparedColour};
  Curve ideal{.name = "ideal, not measured",
              .id = "ideal",
              .colour = kIdealColour,
              .is_measured = false};
  for (const auto& row : table.rows) {
    const std::pair point{row.which.nproc, row.samples_per_s};
    switch (row.which.side) {
      case ScalingSide::ranks:
        ranks.points.push_back(point);
        ideal.points.emplace_back(
            row.which.nproc,
            row.which.nproc * table.rows.front().samples_per_s);
        // One process has one thread.
        if (row.which.nproc == 1) threads.points.push_back(point);
        break;
      case ScalingSide::threads:
        threads.points.push_back(point);
        break;
      case ScalingSide::compared:
        compared.points.push_back(point);
        break;
    }
  }
  std::vector<Curve> curves{ideal, ranks, threads};
  if (!compared.points.empty()) curves.push_back(compared);
  return curves;
}

std::string picture_of(const ScalingTable& table) {
  const auto curves = curves_of(table);
  int most_processes = 1;
  double most_samples = 0;
  for (const auto& curve : curves) {
    for (const auto& [nproc, rate] : curve.points) {
      most_processes = std::max(most_processes, nproc);
      most_samples = std::max(most_samples, rate);
    }
  }
  Picture picture;
  const double right = kWidth - kRight;
  const double bottom = kHeight - kBottom;
  const double step = tick(most_samples, 6);
  const double top_value = std::ceil(most_samples / step) * step;
  const auto x = [&](int nproc) {
    return kLeft + (right - kLeft) * nproc / (most_processes + 0.3);
  };
  const auto y = [&](double rate) {
    return bottom - (bottom - kTop) * rate / top_value;
  };
  for (double value = 0; value <= top_value * 1.001; value += step) {
    picture.line({kLeft, y(value)}, {right, y(value)}, "#dddddd");
    picture.text({kLeft - 6, y(value) + 4}, "end", plain(value));
  }
  for (const auto& [nproc, rate] : curves.front().points) {
    picture.line({x(nproc), bottom}, {x(nproc), bottom + 5}, "#000000");
    picture.text({x(nproc), bottom + 20}, "middle", std::to_string(nproc));
  }
  picture.line({kLeft, bottom}, {right, bottom}, "#000000");
  picture.line({kLeft, kTop}, {kLeft, bottom}, "#000000");
  picture.text({(kLeft + right) / 2, bottom + 40}, "middle",
               "processes, or threads");
  picture.upward_text({16, (kTop + bottom) / 2}, "samples per second");
  double level = kTop + 10;
  for (const auto& curve : curves) {
    std::vector<Picture::Point> points;
    for (const auto& [nproc, rate] : curve.points) {
      points.push_back({x(nproc), y(rate)});
    }
    picture.begin_group(curve.name);
    // The ideal line was not measured, so it has no dots.

    picture.polyline(std::string(name_of(table.scaling)) + "-" + curve.id,
                     points, curve.colour, !curve.is_measured);
    if (curve.is_measured) {
      for (const auto& point : points) picture.dot(point, curve.colour);
    }
    picture.line({right + 10, level}, {right + 30, level}, curve.colour,
                 !curve.is_measured);
    picture.text({right + 36, level + 4}, "start", curve.name);
    picture.end_group();
    level += kLegendLine;
  }
  return picture.element();
}

std::string table_html(const ScalingTable& table, const std::string& target) {
  std::string html = "<div class=\"wide\"><table>\n";
  const auto rows = cells_of(table, target);
  for (size_t i = 0; i < rows.size(); ++i) {
    const char* tag = i == 0 ? "th" : "td";
    html += "<tr>";
    for (const auto& cell : rows[i]) {
      html += format("<%s>", tag) + escaped(cell) + format("</%s>", tag);
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

}  // namespace

std::string scaling_page(const ScalingResult& result) {
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, "
      "initial-scale=1\">\n"
      "<title>Scaling of " +
      escaped(result.command) + "</title>\n<style>" + kStyle +
      "</style>\n</head>\n<body>\n<h1>How the training scales</h1>\n"
      "<p>" +
      escaped(result_text(result.tables)) + "</p>\n";
  if (const std::string busy = load_warning(result.machine); !busy.empty()) {
    html += "<p class=\"warning\">" + escaped(busy) + "</p>\n";
  }
  html += "<p class=\"small\">" + escaped(result.date) + "; Lockstep " +
          escaped(result.lockstep) + ", built with LibTorch " +
          escaped(result.torch) + "; " +
          escaped(result.machine.at("system").get<std::string>()) + "; " +
          std::to_string(result.machine.at("cores").get<int>()) + " cores, " +
          escaped(result.machine.at("cpu").get<std::string>()) +
          "; medians of " + std::to_string(result.rounds) +
          (result.rounds == 1 ? " round" : " rounds") +
          ", in which the rows took turns.</p>\n<pre>" +
          escaped(result.command) + "</pre>\n";
  if (!result.compare.empty()) {
    html +=
        "<p>Compared with</p>\n<pre>" + escaped(result.compare) + "</pre>\n";
  }
  for (const auto& table : result.tables) {
    html += "<h2>" + escaped(title_of(table.scaling)) + "</h2>\n" +
            table_html(table, result.target) + "<div class=\"wide\">" +
            picture_of(table) + "</div>\n";
  }
  return html +
         "<p class=\"small\">Speed-up: compared with one process of one "
         "thread. Efficiency: the speed-up divided by the number of processes "
         "or threads. Core-seconds per 1000: what 1,000 samples cost all cores "
         "together.</p>\n</body>\n</html>\n";
}

}  // namespace lockstep::internal
