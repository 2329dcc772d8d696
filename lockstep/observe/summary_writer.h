#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

// Names and numbers, in the order in which they are written:
// {{"loss", 0.3}, {"lr", 1e-3}}.
using NamedScalars = std::vector<std::pair<std::string, double>>;

// A hyperparameter: a bool, any number, or a text.
class HParam {
 public:
  HParam(const char* text) : value_(std::string(text)) {}
  HParam(std::string text) : value_(std::move(text)) {}
  template <class Number>
    requires std::is_arithmetic_v<Number>
  HParam(Number number) {
    if constexpr (std::is_same_v<Number, bool>) {
      value_ = number;
    } else {
      value_ = static_cast<double>(number);
    }
  }
  const std::variant<bool, double, std::string>& value() const {
    return value_;
  }

 private:
  std::variant<bool, double, std::string> value_;
};
using NamedHParams = std::vector<std::pair<std::string, HParam>>;

struct SummaryWriterOptions {
  // ---- Behaviour ----

  // Is appended to the default of `log_dir`; nothing if a log_dir is given.
  std::string comment{};

  // For a training that was killed and goes on at this step, in the same
  // log_dir: TensorBoard hides what the earlier files have of this step and of
  // later ones.
  std::optional<int64_t> purge_step{};

  // Is appended to the name of each file.
  std::string filename_suffix{};

  // Whether each rank writes, into the folder rank_<rank> of `log_dir`, which
  // must be given then. TensorBoard shows each such folder as a run of its own.
  // If not, only rank 0 writes.
  bool every_rank{false};

  // ---- Performance ----

  // The thread of the writer writes when this many events wait, or when one has
  // waited for flush_secs. 1 or more, and 1 s or more.
  int64_t max_queue{10};
  std::chrono::seconds flush_secs{120};
};

// Writes files that TensorBoard shows (`tensorboard --logdir runs`): Python's
// torch.utils.tensorboard.SummaryWriter, with the same files.
//
//   lockstep::SummaryWriter writer("runs/first");
//   for (auto& batch : loader) {
//     ...
//     writer.add_scalar("train/loss", loss, step);
//   }
//
// - Ranks: only rank 0 writes (or each rank, SummaryWriterOptions::every_rank).
//   On the other ranks, the calls check their arguments and do nothing more:
//   they read no tensor and make no folder. No call communicates, so a program
//   may also make or use a writer on one rank only. The rank is that of the
//   default group when the writer is made, or else that of the launcher's
//   variable RANK, or else 0.
// - Time: add_...() makes the event, which reads a tensor to the CPU, and
//   leaves it to a thread, which writes to the file. It does not wait for the
//   disk unless 64 MiB wait already. add_hparams() writes itself.
// - Disk: a full disk, or another failure of writing, does not end the
//   training. The next add_...() warns once (TORCH_WARN), events wait in
//   memory, up to 64 MiB (later ones are dropped, and counted in a warning),
//   and are written as soon as that is possible. flush() and close() throw.
// - End: the destructor closes the writer. If the process ends in another way
//   (a signal, exit() while the writer is a local variable of main()), then the
//   events since the last flush are lost, at most max_queue of them or those of
//   flush_secs. The file can be read up to there.
// - fork(): a child process cannot use the writer, and calls throw
//   std::runtime_error; the child's copy leaves the file alone.
//
// Any thread may call. `tag` is the name in TensorBoard, where "train/loss" is
// in the group "train"; `step` the position on its axis; `wall_time` the time
// in seconds since 1970, default now. Throw std::invalid_argument if the tag is
// empty, is not UTF-8 or has control characters, or a tensor does not fit;
// std::logic_error after close().
class SummaryWriter {
 public:
  // Makes the folder and a file in it,
  // events.out.tfevents.<time>.<host>.<process>.<n><suffix>. `log_dir` empty:
  // runs/<date>_<host><comment>. Throws std::system_error if that fails, and
  // std::invalid_argument for an option out of range.
  explicit SummaryWriter(std::string log_dir = "",
                         SummaryWriterOptions options = {});
  // As close(); a failure is a warning (TORCH_WARN).
  ~SummaryWriter();
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;

  // Returns whether this rank writes; and its folder.
  bool writes() const { return impl_ != nullptr; }
  const std::string& log_dir() const { return log_dir_; }

  // A number, which is stored as float32; NaN and infinity are stored, too. A
  // tensor has one element, of a real dtype.
  void add_scalar(const std::string& tag, double value, int64_t step = 0,
                  std::optional<double> wall_time = {});
  void add_scalar(const std::string& tag, const at::Tensor& value,
                  int64_t step = 0, std::optional<double> wall_time = {});

  // Several curves in one diagram: each is a run of its own, in a folder of
  // log_dir, whose name is main_tag, "_" and the name of the value. A "/" of
  // main_tag is "_" there; a name may have "/", but not ".." as a part. The
  // first call with a name makes its file, and throws std::system_error if that
  // fails.
  void add_scalars(const std::string& main_tag, const NamedScalars& values,
                   int64_t step = 0, std::optional<double> wall_time = {});

  // How often which values occur. `values`: any shape, one element or more, any
  // real dtype, dense. `bins`: the edges, 2 or more that ascend; empty means
  // TensorBoard's, which grow by a factor of 1.1 from 1e-12 to 1e20 in both
  // directions. NaN and values outside of the edges are in no bin. Sorts the
  // values into the bins in the calling thread.
  void add_histogram(const std::string& tag, const at::Tensor& values,
                     int64_t step = 0, const std::vector<double>& bins = {},
                     std::optional<double> wall_time = {});

  // UTF-8, which TensorBoard shows as Markdown.
  void add_text(const std::string& tag, const std::string& text,
                int64_t step = 0, std::optional<double> wall_time = {});

  // An image of 1, 3 or 4 channels (gray, RGB, RGBA): uint8 from 0 to 255, or a
  // floating dtype from 0 to 1, outside of which values are clipped.
  // `dataformats`: the order of the dimensions, "CHW", "HWC" or "HW". Encodes a
  // PNG file in the calling thread. Throws std::invalid_argument if Lockstep
  // was built without libpng.
  void add_image(const std::string& tag, const at::Tensor& image,
                 int64_t step = 0, std::optional<double> wall_time = {},
                 const std::string& dataformats = "CHW");

  // Several images of one size, as one image with up to 8 in a row. `images`:
  // NCHW, otherwise as in add_image().
  void add_images(const std::string& tag, const at::Tensor& images,
                  int64_t step = 0, std::optional<double> wall_time = {});

  // Hyperparameters, and the metrics by which TensorBoard compares runs with
  // other hyperparameters: call it once, at the end of a training. It writes a
  // run of its own into the folder `run_name` of log_dir, which is not absolute
  // and has no ".." as a part; if it is empty, the time.
  // Blocks until that is written, and throws std::system_error if it cannot be.
  void add_hparams(const NamedHParams& hparams, const NamedScalars& metrics,
                   const std::string& run_name = "", int64_t step = 0);

  // Blocks until all events are written. They are with the operating system
  // then, and survive a SIGKILL, but not a power failure. Throws
  // std::system_error that names the file if the disk is full, say.
  void flush();
  // Flushes and closes the files. The second call does nothing. If it throws,
  // the events that were not written are lost.
  void close();

 private:
  class Impl;
  std::string log_dir_;
  std::unique_ptr<Impl> impl_;  // null if this rank does not write
};

}  // namespace lockstep
