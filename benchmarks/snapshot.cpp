// One side of `./dev bench snapshot`: saves or loads a model of float32
// parameters. Prints one line of JSON (docs/internals/benchmarks.md):
//
//   snapshot --do save --folder /dev/shm/here --bytes 1073741824
//   lockstep run --standalone --nproc-per-node=2 snapshot --do save ...
//   snapshot --do load --folder /dev/shm/here      what `--do prepare` has
//   saved
//
// benchmarks/peers/snapshot_peer.py does the same in Python.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "benchmarks/ddp_step/resources.h"
#include "lockstep/checkpoint/model_file.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string what;
  std::string folder;
  int64_t bytes = int64_t{1} << 30;
  int64_t repeats = 3;
  int64_t tensors = 0;  // 0 means a few large ones and some hundred small ones
};

constexpr int64_t kLarge = 6;    // tensors with three quarters of the bytes
constexpr int64_t kMedium = 64;  // tensors with almost all of the last quarter
constexpr int64_t kSmall = 256;  // vectors
constexpr int64_t kSmallElements = 1024;
constexpr size_t kPiece = size_t{4} << 20;
constexpr double kComputing = 2;  // seconds, while an asynchronous save goes on

// Some large tensors, many small ones. Parameter i is filled with i + 1, so all
// memory is touched. Nothing else is allocated, so that the peak of the memory
// is that of loading.
struct Model : torch::nn::Module {
  explicit Model(const Options& options) {
    const int64_t floats = options.bytes / 4;
    const int64_t equal = options.tensors;
    const int64_t large = floats / 8;
    const int64_t medium = (floats / 4 - kSmall * kSmallElements) / kMedium;
    if (equal > 0 ? floats < equal : medium < 1) {
      throw std::invalid_argument("--bytes is too small");
    }
    const torch::NoGradGuard no_grad;
    const auto add = [&](const char* kind, int64_t count, int64_t elements) {
      for (int64_t i = 0; i < count; ++i) {
        register_parameter(kind + std::to_string(i), torch::empty({elements}));
      }
    };
    if (equal > 0) {
      add("equal", equal, floats / equal);
    } else {
      add("large", kLarge, large);
      add("medium", kMedium, medium);
      add("small", kSmall, kSmallElements);
    }
    fill(1);
  }

  void fill(int64_t first) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.fill_(static_cast<double>(first));
      if (first != 0) ++first;
    }
  }

  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& parameter : parameters()) {
      sum += static_cast<int64_t>(parameter.nbytes());
    }
    return sum;
  }

  // Throws unless the first and the last element of each parameter are loaded.
  void check() const {
    double expected = 1;
    for (const auto& parameter : parameters()) {
      if (parameter[0].item<double>() != expected ||
          parameter[-1].item<double>() != expected) {
        throw std::runtime_error(
            "a parameter has not the value that was saved");
      }
      ++expected;
    }
  }
};

// Returns the slowest rank's seconds.
template <class Work>
double timed(Work work) {
  lockstep::barrier();
  const auto begin = Clock::now();
  work();
  auto seconds = torch::tensor(
      {std::chrono::duration<double>(Clock::now() - begin).count()},
      torch::kDouble);
  lockstep::all_reduce(seconds, {.op = lockstep::ReduceOp::MAX});
  return seconds.item<double>();
}

void require(bool succeeded, const char* what) {
  if (!succeeded) {
    throw std::system_error(errno, std::generic_category(), what);
  }
}

// Writes one file as plainly as can be, the floor of every save.
void plain_write(const std::string& path, const char* data, size_t size) {
  const int fd = ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644);
  require(fd >= 0, "open");
  for (size_t at = 0; at < size;) {
    const ssize_t count = ::write(fd, data + at, std::min(kPiece, size - at));
    require(count > 0, "write");
    at += static_cast<size_t>(count);
  }
  require(::fsync(fd) == 0, "fsync");
  require(::close(fd) == 0, "close");
}

// Calls work() once without and then `repeats` times with a clock; before() is
// called before each and not timed.
template <class Before, class Work>
std::vector<double> repeated(int64_t repeats, Before before, Work work) {
  std::vector<double> seconds;
  for (int64_t i = 0; i <= repeats; ++i) {
    before();
    const double one = timed(work);
    if (i > 0) seconds.push_back(one);
  }
  before();
  return seconds;
}

struct Asynchronous {
  std::vector<double> seconds;    // until the snapshot was complete
  std::vector<double> stalls;     // how long the training waited
  std::vector<double> slowdowns;  // how much longer its computing took
};

// Stands for forward and backward, which read parameters and change none.
class Computing {
 public:
  void products(int64_t count) {
    for (int64_t i = 0; i < count; ++i) result_ = torch::mm(inputs_, weights_);
  }

 private:
  torch::Tensor inputs_ = torch::rand({256, 1024});
  torch::Tensor weights_ = torch::rand({1024, 1024});
  torch::Tensor result_;
};

Asynchronous save_asynchronously(const Options& options,
                                 const lockstep::TrainingState& state,
                                 const std::string& folder, bool overlaps,
                                 const std::function<void()>& remove) {
  Asynchronous figures;
  Computing computing;
  const double one = timed([&] { computing.products(20); }) / 20;
  const auto count = static_cast<int64_t>(kComputing / one) + 1;
  lockstep::SavedSnapshot saved;
  lockstep::SnapshotSaver saver(
      folder, state,
      {.stop_signals = {},
       .on_saved = [&](const auto& result) { saved = result; },
       .overlap_copy = overlaps});
  for (int64_t i = 0; i <= options.repeats; ++i) {
    remove();
    const double alone = timed([&] { computing.products(count); });
    double busy = 0;
    lockstep::barrier();
    {
      saver.save();
      const auto begin = Clock::now();
      computing.products(count);
      busy = std::chrono::duration<double>(Clock::now() - begin).count();
      saver.wait_for_copy();
      saver.wait();
    }
    if (!saved.error.empty()) throw std::runtime_error(saved.error);
    auto slowest = torch::tensor(
        {saved.blocked.count(), busy - alone, saved.total.count()},
        torch::kDouble);
    lockstep::all_reduce(slowest, {.op = lockstep::ReduceOp::MAX});
    if (i == 0) continue;
    figures.stalls.push_back(slowest[0].item<double>());
    figures.slowdowns.push_back(slowest[1].item<double>());
    figures.seconds.push_back(slowest[2].item<double>());
  }
  remove();
  return figures;
}

void run(const Options& options) {
  const auto group = lockstep::init_process_group();
  const bool is_first = lockstep::get_rank() == 0;
  const int64_t rss_before = benchmarks::memory().rss;
  nlohmann::json line{{"do", options.what},
                      {"ranks", lockstep::get_world_size()}};
  const auto finish = [&](int64_t bytes, const std::vector<double>& seconds) {
    line["bytes"] = bytes;
    line["seconds"] = seconds;
    if (is_first) std::printf("%s\n", line.dump().c_str());
  };
  const std::string folder = options.folder + "/saved/";
  const auto remove = [&] {
    if (is_first) fs::remove_all(folder);
    lockstep::barrier();
  };
  if (options.what == "plain_write") {
    const auto memory = torch::full({options.bytes / 4}, 1.0F);
    const std::string path = options.folder + "/plain";
    auto seconds = repeated(
        options.repeats, [&] { fs::remove(path); },
        [&] {
          plain_write(path, static_cast<const char*>(memory.const_data_ptr()),
                      memory.nbytes());
        });
    return finish(static_cast<int64_t>(memory.nbytes()), seconds);
  }

  const auto model = std::make_shared<Model>(options);
  lockstep::TrainingState state{.model = model};
  if (options.what == "prepare") {
    lockstep::save_snapshot(folder, state);
    return finish(model->bytes(), {});
  }
  if (options.what == "save") {
    auto seconds = repeated(options.repeats, remove,
                            [&] { lockstep::save_snapshot(folder, state); });
    return finish(model->bytes(), seconds);
  }
  if (options.what.starts_with("async")) {
    const bool overlaps = options.what == "async_overlapped";
    Asynchronous figures =
        save_asynchronously(options, state, folder, overlaps, remove);
    line["stall_seconds"] = std::move(figures.stalls);
    if (overlaps) line["slowdown_seconds"] = std::move(figures.slowdowns);
    return finish(model->bytes(), figures.seconds);
  }
  const auto clear = [&] { model->fill(0); };
  std::vector<double> seconds;
  if (options.what == "load") {
    for (int64_t i = 0; i <= options.repeats; ++i) {
      clear();
      const double one = timed([&] {
        if (!lockstep::load_snapshot(folder, state, {.will_save = false})) {
          throw std::runtime_error("there is no snapshot in " + folder);
        }
      });
      model->check();
      if (i > 0) seconds.push_back(one);
    }
    const auto memory = benchmarks::memory();
    line["peak_bytes"] = (memory.peak_rss - rss_before) * 1024;
  } else {
    for (int64_t i = 0; i <= options.repeats; ++i) {
      // A model of its own each time: the last one's parameters are views of
      // the file.
      Model fresh(options);
      fresh.fill(0);
      const double one =
          timed([&] { lockstep::load_model(folder, fresh, {.mmap = true}); });
      fresh.check();
      if (i > 0) seconds.push_back(one);
    }
  }
  finish(model->bytes(), seconds);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Saves or loads a model: one side of ./dev bench snapshot.");
  app.add_option("--do", options.what)
      ->required()
      ->check(CLI::IsMember({"plain_write", "prepare", "save", "load",
                             "load_mapped", "async", "async_overlapped"}));
  app.add_option("--folder", options.folder, "where; exists")->required();
  app.add_option("--bytes", options.bytes)->check(CLI::PositiveNumber);
  app.add_option("--tensors", options.tensors,
                 "how many of equal size, instead of some large and some small")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--repeats", options.repeats)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "snapshot: %s\n", error.what());
    return 1;
  }
  return 0;
}
