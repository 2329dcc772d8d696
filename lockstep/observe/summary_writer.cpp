#include "lockstep/observe/summary_writer.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/observe/background_files.h"
#include "lockstep/observe/event.h"
#include "lockstep/observe/histogram.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/observe/png_encoder.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep {
namespace {

using internal::BackgroundFiles;
using internal::EventTime;
using internal::FileDescriptor;
using internal::require_name;

double seconds_since_1970() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// As Python's: "runs/Nov24_03-50-12_host".
std::string default_log_dir(const std::string& comment) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, 64> date{};
  std::strftime(date.data(), date.size(), "%b%d_%H-%M-%S", &local);
  return std::string("runs/") + date.data() + "_" + internal::host_name() +
         comment;
}

struct EventFile {
  FileDescriptor descriptor;
  std::string path;
};

// Makes a new file in `folder`, and the folder.
EventFile make_event_file(const std::string& folder,
                          const std::string& suffix) {
  static std::atomic<int64_t> files{0};
  std::filesystem::create_directories(folder);
  std::array<char, 32> time{};
  std::snprintf(time.data(), time.size(), "%010lld",
                static_cast<long long>(std::time(nullptr)));
  const std::string begin = folder + "/events.out.tfevents." + time.data() +
                            "." + internal::host_name() + "." +
                            std::to_string(::getpid()) + ".";
  while (true) {
    const std::string path = begin + std::to_string(files++) + suffix;
    FileDescriptor file(
        ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC,
               0666));
    if (file) return {std::move(file), path};
    // Processes of several containers may have the same name and number.
    if (errno != EEXIST) {
      internal::throw_errno("cannot make the log file \"" + path + "\"");
    }
  }
}

[[noreturn]] void refuse_tensor(const std::string& call,
                                const at::Tensor& tensor,
                                const std::string& allowed) {
  std::string given = "an undefined tensor";
  if (tensor.defined()) {
    given = std::string("a ") +
            (tensor.layout() == at::kStrided ? "" : "sparse ") +
            c10::toString(tensor.scalar_type()) + " tensor of shape " +
            c10::str(tensor.sizes());
  }
  throw std::invalid_argument(call + " was given " + given + "; give " +
                              allowed);
}

// Whether the tensor has real values that can be read.
bool is_real_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided &&
         !tensor.is_complex() && !tensor.is_quantized() && !tensor.is_meta();
}

std::string tag_of(const char* call) { return std::string(call) + ": the tag"; }

void check_edges(const std::vector<double>& bins) {
  if (bins.empty()) return;
  const bool ascend =
      std::adjacent_find(bins.begin(), bins.end(), [](double a, double b) {
        return !(a < b);
      }) == bins.end();
  const bool finite = std::all_of(bins.begin(), bins.end(),
                                  [](double x) { return std::isfinite(x); });
  if (bins.size() >= 2 && ascend && finite) return;
  throw std::invalid_argument(
      "add_histogram(): the bins must be the edges, 2 or more finite numbers "
      "that ascend, or none for TensorBoard's; " +
      std::to_string(bins.size()) + " were given" +
      (bins.size() < 2 ? "" : ", which are not such"));
}

// Returns the image as [height, width, channels].
at::Tensor rows_of(const at::Tensor& image, const std::string& dataformats) {
  const std::string call = "add_image(dataformats=\"" + dataformats + "\")";
  if (dataformats != "CHW" && dataformats != "HWC" && dataformats != "HW") {
    throw std::invalid_argument(call + " is not known; give CHW, HWC or HW");
  }
  at::Tensor rows = image;
  if (is_real_tensor(image) &&
      image.dim() == static_cast<int64_t>(dataformats.size())) {
    if (dataformats == "CHW") rows = image.permute({1, 2, 0});
    if (dataformats == "HW") rows = image.unsqueeze(2);
  }
  constexpr int64_t kMost = 1 << 20;
  const bool fits =
      is_real_tensor(rows) && rows.dim() == 3 &&
      (rows.is_floating_point() || rows.scalar_type() == at::kByte) &&
      rows.size(0) > 0 && rows.size(1) > 0 && rows.size(0) < kMost &&
      rows.size(1) < kMost &&
      (rows.size(2) == 1 || rows.size(2) == 3 || rows.size(2) == 4);
  if (!fits) {
    refuse_tensor(
        call, image,
        "an image of these dimensions, with 1, 3 or 4 channels, as uint8 "
        "from 0 to 255 or as floating-point numbers from 0 to 1");
  }
  return rows;
}

internal::HParamValues checked_hparams(const NamedHParams& hparams) {
  internal::HParamValues values;
  for (const auto& [name, value] : hparams) {
    require_name("add_hparams(): the name of a hyperparameter", name);
    if (const auto* text = std::get_if<std::string>(&value.value())) {
      internal::require_utf8("add_hparams(): the text of \"" + name + "\"",
                             *text);
    }
    values.emplace_back(name, value.value());
  }
  return values;
}

void check_run_name(const std::string& run_name) {
  if (run_name.empty()) return;
  const std::string what = "add_hparams(): run_name";
  require_name(what, run_name);
  internal::require_inside(what, run_name);
  if (run_name.front() == '/') {
    throw std::invalid_argument(what + " \"" + run_name +
                                "\" is an absolute path; give the name of a "
                                "folder in log_dir");
  }
}

}  // namespace

class SummaryWriter::Impl {
 public:
  Impl(std::string log_dir, const SummaryWriterOptions& options)
      : log_dir_(std::move(log_dir)),
        suffix_(options.filename_suffix),
        files_({.most_records = static_cast<size_t>(options.max_queue),
                .interval = options.flush_secs}),
        main_(add_file(log_dir_)) {
    if (options.purge_step) {
      write(main_, internal::restart_event(
                       {seconds_since_1970(), *options.purge_step}));
    }
    files_.flush();
  }

  void add(const std::string& event) { write(main_, event); }

  void add_scalar_of(const std::string& main_tag, const std::string& name,
                     double value, const EventTime& time) {
    std::string folder = main_tag;
    std::replace(folder.begin(), folder.end(), '/', '_');
    write(file_in(log_dir_ + "/" + folder + "_" + name),
          internal::scalar_event(time, main_tag, value));
  }

  void add_run(const std::string& name,
               const std::vector<std::string>& events) {
    BackgroundFiles files(internal::BackgroundFilesOptions{});
    EventFile made = make_event_file(log_dir_ + "/" + name, suffix_);
    const size_t file =
        files.add(std::move(made.descriptor), std::move(made.path));
    files.append(file, internal::record_of(
                           internal::version_event(seconds_since_1970())));
    for (const std::string& event : events) {
      files.append(file, internal::record_of(event));
    }
    files.close();
  }

  void flush() { files_.flush(); }

  void close() {
    files_.close();
    warn();
  }

 private:
  size_t add_file(const std::string& folder) {
    EventFile made = make_event_file(folder, suffix_);
    const size_t file =
        files_.add(std::move(made.descriptor), std::move(made.path));
    write(file, internal::version_event(seconds_since_1970()));
    return file;
  }

  size_t file_in(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    const auto found = others_.find(folder);
    if (found != others_.end()) return found->second;
    return others_[folder] = add_file(folder);
  }

  void write(size_t file, const std::string& event) {
    files_.append(file, internal::record_of(event));
    warn();
  }

  void warn() {
    const std::string notice = files_.take_notice();
    if (!notice.empty()) TORCH_WARN("lockstep: SummaryWriter: ", notice);
  }

  const std::string log_dir_;
  const std::string suffix_;
  BackgroundFiles files_;
  const size_t main_;
  std::mutex mutex_;
  std::map<std::string, size_t> others_;  // by their folders
};

SummaryWriter::SummaryWriter(std::string log_dir, SummaryWriterOptions options)
    : log_dir_(std::move(log_dir)) {
  if (options.max_queue < 1 || options.flush_secs < std::chrono::seconds(1)) {
    throw std::invalid_argument("SummaryWriterOptions::max_queue is " +
                                std::to_string(options.max_queue) +
                                " and flush_secs " +
                                std::to_string(options.flush_secs.count()) +
                                " s; give 1 or more for each");
  }
  if (options.every_rank && log_dir_.empty()) {
    throw std::invalid_argument(
        "SummaryWriterOptions::every_rank needs a log_dir, because the ranks' "
        "clocks give different default ones; name the folder");
  }
  options.flush_secs = std::min(options.flush_secs, internal::kLongestInterval);
  const int rank = internal::log_rank();
  if (log_dir_.empty()) log_dir_ = default_log_dir(options.comment);
  if (options.every_rank) log_dir_ += "/rank_" + std::to_string(rank);
  if (rank != 0 && !options.every_rank) return;
  impl_ = std::make_unique<Impl>(log_dir_, options);
}

SummaryWriter::~SummaryWriter() {
  try {
    if (impl_) impl_->close();
  } catch (const std::system_error& error) {
    TORCH_WARN("lockstep: SummaryWriter: ", error.what());
  } catch (const std::runtime_error&) {
    // In a forked child.
  }
}

void SummaryWriter::add_scalar(const std::string& tag, double value,
                               int64_t step, std::optional<double> wall_time) {
  require_name(tag_of("add_scalar()"), tag);
  if (!impl_) return;
  internal::TrainingSummary::note_metric(tag, value);
  impl_->add(internal::scalar_event(
      {wall_time.value_or(seconds_since_1970()), step}, tag, value));
}

void SummaryWriter::add_scalar(const std::string& tag, const at::Tensor& value,
                               int64_t step, std::optional<double> wall_time) {
  require_name(tag_of("add_scalar()"), tag);
  if (!is_real_tensor(value) || value.numel() != 1) {
    refuse_tensor("add_scalar(\"" + tag + "\")", value,
                  "a number, or a tensor of one element and a real dtype");
  }
  if (!impl_) return;
  add_scalar(tag, value.item().toDouble(), step, wall_time);
}

void SummaryWriter::add_scalars(const std::string& main_tag,
                                const NamedScalars& values, int64_t step,
                                std::optional<double> wall_time) {
  require_name(tag_of("add_scalars()"), main_tag);
  for (const auto& [name, value] : values) {
    const std::string what =
        "add_scalars(\"" + main_tag + "\"): the name of a value";
    require_name(what, name);
    internal::require_inside(what, name);
  }
  if (!impl_) return;
  const EventTime time{wall_time.value_or(seconds_since_1970()), step};
  for (const auto& [name, value] : values) {
    impl_->add_scalar_of(main_tag, name, value, time);
  }
}

void SummaryWriter::add_histogram(const std::string& tag,
                                  const at::Tensor& values, int64_t step,
                                  const std::vector<double>& bins,
                                  std::optional<double> wall_time) {
  require_name(tag_of("add_histogram()"), tag);
  check_edges(bins);
  if (!is_real_tensor(values) || values.numel() == 0) {
    refuse_tensor("add_histogram(\"" + tag + "\")", values,
                  "a dense tensor of one element or more and a real dtype");
  }
  if (!impl_) return;
  const auto histogram = internal::count_histogram(
      values, bins.empty() ? internal::default_bin_edges() : bins);
  impl_->add(internal::histogram_event(
      {wall_time.value_or(seconds_since_1970()), step}, tag, histogram));
}

void SummaryWriter::add_text(const std::string& tag, const std::string& text,
                             int64_t step, std::optional<double> wall_time) {
  require_name(tag_of("add_text()"), tag);
  internal::require_utf8("add_text(\"" + tag + "\"): the text", text);
  if (!impl_) return;
  impl_->add(internal::text_event(
      {wall_time.value_or(seconds_since_1970()), step}, tag, text));
}

void SummaryWriter::add_image(const std::string& tag, const at::Tensor& image,
                              int64_t step, std::optional<double> wall_time,
                              const std::string& dataformats) {
  require_name(tag_of("add_image()"), tag);
  at::Tensor rows = rows_of(image, dataformats);
  internal::require_png();
  if (!impl_) return;
  const at::NoGradGuard no_grad;
  rows = rows.detach().to(at::kCPU);
  if (rows.is_floating_point()) {
    // As Python: what lies between two bytes is rounded towards 0.
    rows =
        rows.to(at::kFloat).mul(255).nan_to_num(0).clamp(0, 255).to(at::kByte);
  }
  // Gray images have three equal channels, as Python's.
  if (rows.size(2) == 1) rows = rows.expand({-1, -1, 3});
  rows = rows.contiguous();
  const std::string png = internal::encode_png(
      rows.const_data_ptr<uint8_t>(), static_cast<uint32_t>(rows.size(0)),
      static_cast<uint32_t>(rows.size(1)), static_cast<int>(rows.size(2)));
  impl_->add(internal::image_event(
      {wall_time.value_or(seconds_since_1970()), step}, tag, rows.size(0),
      rows.size(1), rows.size(2), png));
}

void SummaryWriter::add_images(const std::string& tag, const at::Tensor& images,
                               int64_t step, std::optional<double> wall_time) {
  require_name(tag_of("add_images()"), tag);
  if (!is_real_tensor(images) || images.dim() != 4 || images.numel() == 0) {
    refuse_tensor("add_images(\"" + tag + "\")", images,
                  "one image or more, as [images, channels, height, width]");
  }
  constexpr int64_t kMostColumns = 8;
  const int64_t columns = std::min(images.size(0), kMostColumns);
  const int64_t rows = (images.size(0) + columns - 1) / columns;
  const int64_t height = images.size(2);
  const int64_t width = images.size(3);
  const at::NoGradGuard no_grad;
  at::Tensor grid;
  if (impl_) {
    grid = at::zeros({images.size(1), rows * height, columns * width},
                     images.options());
    for (int64_t at = 0; at < images.size(0); ++at) {
      grid.narrow(1, at / columns * height, height)
          .narrow(2, at % columns * width, width)
          .copy_(images[at]);
    }
  } else {
    grid = images[0];  // is checked only
  }
  add_image(tag, grid, step, wall_time);
}

void SummaryWriter::add_hparams(const NamedHParams& hparams,
                                const NamedScalars& metrics,
                                const std::string& run_name, int64_t step) {
  const internal::HParamValues values = checked_hparams(hparams);
  std::vector<std::string> names;
  for (const auto& [name, value] : metrics) {
    require_name("add_hparams(): the name of a metric", name);
    names.push_back(name);
  }
  check_run_name(run_name);
  if (!impl_) return;
  const EventTime time{seconds_since_1970(), step};
  auto events = internal::hparams_events(time, values, names);
  for (const auto& [name, value] : metrics) {
    events.push_back(internal::scalar_event(time, name, value));
  }
  impl_->add_run(run_name.empty() ? std::to_string(time.wall_time) : run_name,
                 events);
}

void SummaryWriter::flush() {
  if (impl_) impl_->flush();
}

void SummaryWriter::close() {
  if (impl_) impl_->close();
}

}  // namespace lockstep
