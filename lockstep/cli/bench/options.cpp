#include "lockstep/cli/bench/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iostream>
#include <stdexcept>

#include "lockstep/cli/command_line.h"

namespace lockstep::internal::bench {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 40;
constexpr int kMostRanks = 1024;
constexpr int kMostCompeting = 1024;
constexpr const char* kDefaultSizes = "4,1K,16K,256K,4M";

// The options as they were written.
struct Arguments {
  std::vector<std::string> operations;
  std::vector<std::string> sizes;
  std::string min_bytes;
  std::string max_bytes;
  int64_t factor = 0;
  std::vector<std::string> dtypes{"float32"};
  std::vector<int> ranks;
  std::string backend = "lockstep";
  std::string reduce_op = "sum";
  bool async_op = false;
  int64_t iterations = 0;
  int64_t warmup = 5;
  double seconds = 0;
  int rounds = 0;
  int competing = 0;
  std::string peers;
  std::string python;
  double timeout = 300;
  std::string json;
};

// The error names the range if it is violated; without a description the help
// is shorter.
template <typename Number>
CLI::Validator between(Number lowest, Number highest) {
  return CLI::Range(lowest, highest).description("");
}

void declare(CLI::App& app, Arguments& to) {
  app.formatter(make_help_formatter(
      "lockstep bench [OPTIONS] OPERATION...\n"
      "  Times operations between ranks of this host. OPERATION: all_reduce,\n"
      "  all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather,\n"
      "  scatter, send_recv, barrier, or all. Lists are separated by commas."));
  app.get_help_ptr()->description("Print this help and exit");
  app.add_option("OPERATION", to.operations, "What to time, or all")
      ->delimiter(',');
  const auto add = [&app](const char* name, auto& value, const char* text,
                          const char* group, const char* type = "N") {
    return app.add_option(name, value, text)->group(group)->type_name(type);
  };
  add("--sizes", to.sizes, "Bytes, such as 4,1K,1M [4,1K,16K,256K,4M]", "What",
      "LIST")
      ->delimiter(',');
  add("-b,--min-bytes", to.min_bytes, "Or from this size [4] ...", "What",
      "BYTES");
  add("-e,--max-bytes", to.max_bytes, "... to this one [4M] ...", "What",
      "BYTES");
  add("-f,--factor", to.factor, "... each this many times the last [4]", "What")
      ->check(between(int64_t{2}, int64_t{1} << 30));
  add("-d,--dtype", to.dtypes, "Element types [float32]", "What", "LIST")
      ->delimiter(',');
  add("-o,--op", to.reduce_op,
      "Reduce by sum, avg, product, min, max, band, bor or bxor [sum]", "What",
      "OP");
  app.add_flag("--async", to.async_op,
               "Asynchronously: start, then wait for the Work")
      ->group("What");
  add("--ranks,--nproc-per-node", to.ranks, "Processes, such as 2,4 [2]",
      "What", "LIST")
      ->delimiter(',')
      ->check(between(2, kMostRanks));
  add("--backend", to.backend, "Backend of our ranks [lockstep]", "What",
      "NAME");
  add("-n,--iters", to.iterations,
      "Iterations of a measurement [as many as fit --seconds]", "How long")
      ->check(between(int64_t{1}, int64_t{1'000'000}));
  add("-w,--warmup", to.warmup, "Iterations before them [5]", "How long")
      ->check(between(int64_t{0}, int64_t{1'000'000}));
  add("--seconds", to.seconds, "Of a measurement, about [0.3]", "How long")
      ->check(between(0.0, 3600.0));
  add("--rounds", to.rounds, "Measurements of each [1; with --peers 3]",
      "How long")
      ->check(between(1, 1000));
  add("--competing", to.competing,
      "Processes that compute meanwhile, as on a busy machine [0]", "How long")
      ->check(between(0, kMostCompeting));
  add("--timeout", to.timeout,
      "Seconds that a start or a measurement may take [300]", "How long")
      ->check(between(1.0, 86400.0));
  app.add_flag("--peers{all}", to.peers,
               "Measure peers too, in turns; --peers=LIST: these of "
               "registered, gloo, python, python-lockstep, and programs as "
               "NAME=PROGRAM")
      ->group("Peers");
  add("--python", to.python,
      "The Python that has torch [LOCKSTEP_PYTHON, .venv, python3]", "Peers",
      "PATH");
  add("--json", to.json, "Write the figures here; -: to stdout", "Output",
      "FILE");
}

std::vector<int64_t> sizes_of(const Arguments& arguments) {
  std::vector<int64_t> sizes;
  const bool has_range = !arguments.min_bytes.empty() ||
                         !arguments.max_bytes.empty() || arguments.factor != 0;
  if (!has_range) {
    std::vector<std::string> texts = arguments.sizes;
    if (texts.empty()) texts = CLI::detail::split(kDefaultSizes, ',');
    for (const auto& text : texts) sizes.push_back(parse_bytes(text));
    return sizes;
  }
  if (!arguments.sizes.empty()) {
    throw std::invalid_argument(
        "--sizes is given, and so is --min-bytes, --max-bytes or --factor; "
        "give a list or a range");
  }
  const auto bytes_or = [](const std::string& text, int64_t otherwise) {
    return text.empty() ? otherwise : parse_bytes(text);
  };
  const int64_t factor = arguments.factor == 0 ? 4 : arguments.factor;
  const int64_t first = bytes_or(arguments.min_bytes, 4);
  const int64_t last =
      bytes_or(arguments.max_bytes, std::max(first, int64_t{4} << 20));
  if (last < first) {
    throw std::invalid_argument("--max-bytes is " + arguments.max_bytes +
                                ", less than --min-bytes (" +
                                std::to_string(first) + ")");
  }
  for (int64_t bytes = first;; bytes *= factor) {
    sizes.push_back(bytes);
    if (bytes > last / factor) break;  // the next product may overflow
  }
  return sizes;
}

std::vector<Operation> operations_of(const Arguments& arguments) {
  if (arguments.operations.empty()) {
    throw std::invalid_argument(
        "no operation was given; say lockstep bench all_reduce, or all");
  }
  std::vector<Operation> operations;
  for (const auto& name : arguments.operations) {
    if (name == "all") {
      operations.insert(operations.end(), kOperations.begin(),
                        kOperations.end());
    } else {
      operations.push_back(find_operation(name));
    }
  }
  return operations;
}

std::vector<Peer> peers_of(const std::string& text) {
  std::vector<Peer> peers;
  if (text.empty()) return peers;
  const auto add = [&peers](const std::string& name,
                            const std::string& program = {}) {
    const bool is_new =
        std::ranges::find(peers, name, &Peer::name) == peers.end();
    if (is_new && name != "lockstep") return peers.push_back({name, program});
    if (program.empty()) return;
    throw std::invalid_argument("--peers names two sides \"" + name +
                                "\"; give each program a name of its own");
  };
  for (const auto& given : CLI::detail::split(text, ',')) {
    const auto equals = given.find('=');
    if (given == "all") {
      for (const auto name : kPeers) {
        if (name != kPythonLockstep) add(std::string(name));
      }
    } else if (std::ranges::find(kPeers, given) != kPeers.end()) {
      add(given);
    } else if (equals > 0 && equals < given.size() - 1) {
      add(given.substr(0, equals), given.substr(equals + 1));
    } else {
      throw std::invalid_argument(
          "unknown peer \"" + given +
          "\"; allowed are registered, gloo, python, python-lockstep, all, and "
          "NAME=PROGRAM");
    }
  }
  return peers;
}

Options checked(const Arguments& arguments) {
  Options options;
  options.operations = operations_of(arguments);
  options.sizes = sizes_of(arguments);
  const bool reduces = std::ranges::any_of(
      options.operations, [](const auto& one) { return one.reduces; });
  for (const auto& name : arguments.dtypes) {
    options.dtypes.push_back(find_dtype(name));
    if (reduces) check_reduce_op(arguments.reduce_op, options.dtypes.back());
  }
  options.ranks =
      arguments.ranks.empty() ? std::vector<int>{2} : arguments.ranks;
  options.backend = arguments.backend;
  options.reduce_op = arguments.reduce_op;
  options.async_op = arguments.async_op;
  if (arguments.iterations > 0) options.iterations = arguments.iterations;
  options.seconds = arguments.seconds > 0 ? arguments.seconds : 0.3;
  options.warmup = arguments.warmup;
  options.peers = peers_of(arguments.peers);
  options.rounds = arguments.rounds > 0    ? arguments.rounds
                   : options.peers.empty() ? 1
                                           : 3;
  options.competing = arguments.competing;
  options.python = arguments.python;
  options.timeout =
      std::chrono::milliseconds(std::llround(arguments.timeout * 1000));
  options.json = arguments.json;
  return options;
}

}  // namespace

int64_t parse_bytes(const std::string& text) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  int shift = 0;
  if (error == std::errc() && end - rest == 1) {
    switch (std::toupper(static_cast<unsigned char>(*rest))) {
      case 'K':
        shift = 10;
        break;
      case 'M':
        shift = 20;
        break;
      case 'G':
        shift = 30;
        break;
      default:
        number = 0;
    }
  } else if (error != std::errc() || rest != end) {
    number = 0;
  }
  if (number < 1 || number > kMostBytes >> shift) {
    throw std::invalid_argument(
        "\"" + text +
        "\" is not a size; allowed are 1 to 1024G bytes, "
        "such as 4, 64K, 1M or 1G");
  }
  return number << shift;
}

std::optional<Options> parse_options(int argc, char** argv) {
  CLI::App app("", "lockstep bench");
  Arguments arguments;
  declare(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    app.exit(help, std::cout, std::cerr);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    std::string line = error.what();
    std::ranges::replace(line, '\n', ' ');
    throw std::invalid_argument(line + "; see lockstep bench --help");
  }
  return checked(arguments);
}

}  // namespace lockstep::internal::bench
