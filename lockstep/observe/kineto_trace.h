#pragma once

#include <memory>
#include <string>

namespace lockstep::internal {

struct KinetoOptions {
  bool record_shapes = false;
  bool profile_memory = false;
};

// One trace of LibTorch's profiler, Kineto, of whose headers only this class's
// source knows. It records the thread that calls start(), and what autograd
// runs for this thread. Call all functions in that thread, each once and in
// this order; add_metadata() any number of times.
class KinetoTrace {
 public:
  // Prepares to record. Takes a moment for the first trace of a process.
  explicit KinetoTrace(KinetoOptions options);
  KinetoTrace(const KinetoTrace&) = delete;
  KinetoTrace& operator=(const KinetoTrace&) = delete;
  ~KinetoTrace();

  // Makes the folder if it is missing. Throws std::invalid_argument if Kineto
  // can write no trace in a folder of this name, and std::runtime_error if no
  // file can be made there.
  static void check_folder(const std::string& folder);

  // Whether this thread is being profiled, by this class or otherwise.
  static bool is_profiling();

  void start();
  // Adds a member to the top of the trace; `json` is its value as JSON.
  void add_metadata(const std::string& key, const std::string& json);
  void stop();
  // Writes the trace in Chrome's format. Throws std::runtime_error if the file
  // cannot be written; then there is no file at `path`.
  void save(const std::string& path);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::internal
