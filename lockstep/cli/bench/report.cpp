#include "lockstep/cli/bench/report.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "lockstep/cli/machine.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal::bench {
namespace {

// Keeps the order in which fields are written here.
using nlohmann::ordered_json;

constexpr int kFormat = 1;  // of the JSON
constexpr double kIdleLoad = 0.5;

// Returns a time with about four digits, in 9 columns.
std::string microseconds(double value) {
  return format(value < 1000      ? "%9.2f"
                : value < 100'000 ? "%9.1f"
                                  : "%9.0f",
                value);
}

// The same, in 8 columns.
std::string short_microseconds(double value) {
  return format(value < 1000     ? "%8.2f"
                : value < 10'000 ? "%8.1f"
                                 : "%8.0f",
                value);
}

std::string times_ours(double ratio) {
  return format(ratio < 100 ? " %5.2fx" : " %5.0fx", ratio);
}

std::string bandwidth(double value) {
  return format(value < 1 ? "%8.4f" : "%8.2f", value);
}

// Rounds to three decimals: to the double that prints with no more.
ordered_json thousandth(double value) {
  return std::strtod(format("%.3f", value).c_str(), nullptr);
}

// Rounds to four digits, for values that may be 0.0001 or 5,000.
ordered_json four_figures(double value) {
  return std::strtod(format("%.4g", value).c_str(), nullptr);
}

ordered_json millionth(double value) {
  return std::strtod(format("%.6f", value).c_str(), nullptr);
}

ordered_json latencies_json(const Latencies& latencies) {
  return {{"min", thousandth(latencies.min)},
          {"p50", thousandth(latencies.p50)},
          {"p90", thousandth(latencies.p90)},
          {"p99", thousandth(latencies.p99)},
          {"max", thousandth(latencies.max)}};
}

void add_figures(ordered_json& entry, const Configuration& configuration,
                 const Figures& figures) {
  const Latencies latencies = figures.latencies();
  const double factor =
      bus_factor(configuration.operation, configuration.ranks);
  const auto bandwidth =
      bandwidths(configuration.bytes(), latencies.p50, factor);
  entry["iterations"] = latencies.iterations;
  entry["latency_us"] = latencies_json(latencies);
  entry["algbw_gbps"] = nullptr;
  entry["busbw_gbps"] = nullptr;
  if (bandwidth) {
    entry["algbw_gbps"] = millionth(bandwidth->algorithm);
    entry["busbw_gbps"] = millionth(bandwidth->bus);
  }
  entry["wrong"] = figures.wrong;
  entry["rounds"] = ordered_json::array();
  for (const auto& round : figures.rounds) {
    ordered_json one = latencies_json(round);
    one["iterations"] = round.iterations;
    entry["rounds"].push_back(std::move(one));
  }
}

double percentile(const std::vector<int64_t>& sorted, double share) {
  const double place = std::ceil(share * static_cast<double>(sorted.size()));
  const auto index = static_cast<size_t>(std::max(place, 1.0)) - 1;
  return static_cast<double>(sorted[index]) / 1000;
}

}  // namespace

Ratio ratio(const Figures& peer, const Figures& ours) {
  std::vector<double> by_round;
  for (size_t i = 0; i < std::min(peer.rounds.size(), ours.rounds.size());
       ++i) {
    by_round.push_back(peer.rounds[i].p50 / ours.rounds[i].p50);
  }
  const auto [least, greatest] = std::ranges::minmax_element(by_round);
  return {peer.latencies().p50 / ours.latencies().p50, *least, *greatest};
}

Table::Table(std::FILE* out, const Options& options,
             std::vector<std::string> peer_names)
    : out_(out), options_(options), peer_names_(std::move(peer_names)) {}

void Table::add_machine(const ordered_json& machine) {
  const double load = machine.at("load_before");
  std::fprintf(out_, "# %d cores, %s; torch %s; backend %s; %d round%s\n",
               machine.at("cores").get<int>(),
               machine.at("cpu").get<std::string>().c_str(),
               machine.at("torch").get<std::string>().c_str(),
               options_.backend.c_str(), options_.rounds,
               options_.rounds == 1 ? "" : "s");
  if (options_.competing > 0) {
    std::fprintf(out_, "# %d competing process%s\n", options_.competing,
                 options_.competing == 1 ? "" : "es");
  }
  if (load > kIdleLoad) {
    std::fprintf(out_,
                 "# The machine was not idle (load %.2f): trust ratios, not "
                 "times.\n",
                 load);
  }
}

void Table::add_heading(const Configuration& configuration) {
  const auto& [operation, dtype, ranks, elements] = configuration;
  std::string what(operation.name);
  if (operation.reduces) what += " " + options_.reduce_op;
  if (operation.volume != Volume::none) what += " " + std::string(dtype.name);
  if (options_.async_op) what += " async";
  std::fprintf(out_, "\n# %s, %d ranks; times in us, bandwidths in GB/s\n",
               what.c_str(), ranks);
  std::fprintf(out_, "%11s %11s %7s %9s %9s %9s %9s %9s %8s %8s %6s", "bytes",
               "elements", "iters", "min", "p50", "p90", "p99", "max", "algbw",
               "busbw", "wrong");
  std::fputc('\n', out_);
  std::fflush(out_);
}

void Table::add_row(const Configuration& configuration,
                    const std::vector<Figures>& figures) {
  const Figures& ours = figures.at(0);
  const Latencies times = ours.latencies();
  const auto width =
      bandwidths(configuration.bytes(), times.p50,
                 bus_factor(configuration.operation, configuration.ranks));
  std::string line = format("%11lld %11lld %7lld",
                            static_cast<long long>(configuration.bytes()),
                            static_cast<long long>(configuration.elements),
                            static_cast<long long>(times.iterations));
  for (const double time :
       {times.min, times.p50, times.p90, times.p99, times.max}) {
    line += ' ' + microseconds(time);
  }
  line += ' ' + (width ? bandwidth(width->algorithm) : format("%8s", "-"));
  line += ' ' + (width ? bandwidth(width->bus) : format("%8s", "-"));
  line += format(" %6lld", static_cast<long long>(ours.wrong));
  std::fprintf(out_, "%s\n", line.c_str());
  std::fflush(out_);

  line = format("%9lld", static_cast<long long>(configuration.bytes())) + ' ' +
         short_microseconds(times.p50);
  for (size_t i = 1; i < figures.size(); ++i) {
    if (figures[i].rounds.empty()) {
      line += format(" %8s %6s", "-", "-");
      continue;
    }
    line += ' ' + short_microseconds(figures[i].latencies().p50) +
            times_ours(ratio(figures[i], ours).value);
    if (figures[i].wrong > 0) line += " WRONG";
  }
  comparison_.push_back(std::move(line));
}

void Table::add_comparison() {
  if (!peer_names_.empty()) {
    std::fprintf(out_, "\n# p50 in us, and its ratio to ours\n%9s %8s", "bytes",
                 "lockstep");
    for (const auto& name : peer_names_) {
      std::fprintf(out_, " %8s %6s", name.substr(0, 8).c_str(), "ratio");
    }
    std::fputc('\n', out_);
    for (const auto& line : comparison_) {
      std::fprintf(out_, "%s\n", line.c_str());
    }
    std::fflush(out_);
  }
  comparison_.clear();
}

ordered_json to_json(const Configuration& configuration, const Options& options,
                     const std::vector<Figures>& figures) {
  const Operation& operation = configuration.operation;
  const bool has_data = operation.volume != Volume::none;
  ordered_json entries = ordered_json::array();
  for (const auto& one : figures) {
    ordered_json entry{
        {"operation", operation.name},
        {"side", one.side},
        {"ranks", configuration.ranks},
        {"dtype", nullptr},
        {"reduce_op", nullptr},
        {"async", options.async_op},
        {"bytes", configuration.bytes()},
        {"elements", configuration.elements},
        {"bus_factor", bus_factor(operation, configuration.ranks)}};
    // There is no "backend" here: peers have their own, which the JSON's
    // "sides" name.
    if (has_data) entry["dtype"] = configuration.dtype.name;
    if (operation.reduces) entry["reduce_op"] = options.reduce_op;
    if (one.rounds.empty()) {
      entry["error"] = one.error;
    } else {
      add_figures(entry, configuration, one);
      if (&one != &figures.front()) {
        const Ratio by = ratio(one, figures.front());
        entry["ratio"] = four_figures(by.value);
        entry["ratio_min"] = four_figures(by.min);
        entry["ratio_max"] = four_figures(by.max);
      }
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

ordered_json document(const Options& options, const ordered_json& machine,
                      const ordered_json& sides, ordered_json results,
                      double seconds) {
  return {{"format", kFormat},
          {"date", utc_date()},
          {"seconds", thousandth(seconds)},
          {"machine", machine},
          {"sides", sides},
          {"rounds", options.rounds},
          {"warmup", options.warmup},
          {"competing", options.competing},
          {"results", std::move(results)}};
}

Latencies of_slowest_rank(const std::vector<std::vector<int64_t>>& by_rank) {
  if (by_rank.empty() || by_rank[0].empty()) {
    throw std::runtime_error("a measurement without iterations");
  }
  std::vector<int64_t> slowest = by_rank[0];
  for (const auto& times : by_rank) {
    if (times.size() != slowest.size()) {
      throw std::runtime_error(
          "the ranks timed different numbers of iterations");
    }
    for (size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], times[i]);
    }
  }
  std::ranges::sort(slowest);
  return {.iterations = static_cast<int64_t>(slowest.size()),
          .min = percentile(slowest, 0),
          .p50 = percentile(slowest, 0.5),
          .p90 = percentile(slowest, 0.9),
          .p99 = percentile(slowest, 0.99),
          .max = percentile(slowest, 1)};
}

Latencies of_rounds(const std::vector<Latencies>& rounds) {
  const auto median_of = [&rounds](double Latencies::*field) {
    std::vector<double> values;
    for (const auto& round : rounds) values.push_back(round.*field);
    return median(std::move(values));
  };
  Latencies all{.iterations = 0,
                .min = rounds.at(0).min,
                .p50 = median_of(&Latencies::p50),
                .p90 = median_of(&Latencies::p90),
                .p99 = median_of(&Latencies::p99),
                .max = 0};
  for (const auto& round : rounds) {
    all.iterations += round.iterations;
    all.min = std::min(all.min, round.min);
    all.max = std::max(all.max, round.max);
  }
  return all;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values.at(middle)
                                : (values.at(middle - 1) + values[middle]) / 2;
}

std::optional<Bandwidths> bandwidths(int64_t bytes, double microseconds,
                                     double bus_factor) {
  if (bytes == 0 || microseconds <= 0) return std::nullopt;
  const double algorithm = static_cast<double>(bytes) / microseconds / 1000;
  return Bandwidths{algorithm, algorithm * bus_factor};
}

}  // namespace lockstep::internal::bench
