#include "lockstep/observe/kineto_trace.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/kineto_shim.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "lockstep/observe/log_names.h"

namespace lockstep::internal {
namespace {

namespace kineto = torch::autograd::profiler;
namespace fs = std::filesystem;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

// As torch.profiler.supported_activities().
std::set<ActivityType> activities() {
  std::set<ActivityType> all{ActivityType::CPU};
  if (at::hasCUDA()) all.insert(ActivityType::CUDA);
  if (at::hasXPU()) all.insert(ActivityType::XPU);
  if (at::hasHPU()) all.insert(ActivityType::HPU);
  if (at::hasMTIA()) all.insert(ActivityType::MTIA);
  return all;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why,
                         const char* what = "the trace ") {
  throw std::runtime_error("Profiler: " + (what + path) +
                           " cannot be written: " + why +
                           "; give a folder on a disk with room in which this "
                           "process may write");
}

}  // namespace

class KinetoTrace::State {
 public:
  explicit State(const KinetoOptions& options)
      : config(ProfilerState::KINETO, options.record_shapes,
               options.profile_memory) {}

  const ProfilerConfig config;
  std::unique_ptr<kineto::ProfilerResult> result{};
  bool runs = false;
};

KinetoTrace::KinetoTrace(KinetoOptions options)
    : state_(std::make_unique<State>(options)) {
  kineto::prepareProfiler(state_->config, activities());
}

KinetoTrace::~KinetoTrace() = default;

void KinetoTrace::check_folder(const std::string& folder) {
  // Kineto takes what stands before "://" for the name of a protocol, changes
  // backslashes and ends of lines, and writes the name into the trace as it is.
  require_name("Profiler: the folder", folder);
  if (folder.find("://") != folder.npos ||
      folder.find_first_of("\"\\") != folder.npos) {
    throw std::invalid_argument(
        "Profiler: Kineto cannot write traces in the folder " + folder +
        "; give one on a disk, without '\"', '\\' and \"://\" in its name");
  }
  constexpr const char* kFolder = "a trace in the folder ";
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (failure) refuse(folder, failure.message(), kFolder);
  std::string trial = (fs::path(folder) / "trial.XXXXXX").string();
  const int file = ::mkstemp(trial.data());
  if (file < 0) refuse(folder, std::strerror(errno), kFolder);
  ::close(file);
  ::unlink(trial.c_str());
}

bool KinetoTrace::is_profiling() {
  return torch::profiler::impl::profilerEnabled();
}

void KinetoTrace::start() {
  kineto::enableProfiler(state_->config, activities());
  state_->runs = true;
}

void KinetoTrace::add_metadata(const std::string& key,
                               const std::string& json) {
  kineto::addMetadataJson(key, json);
}

void KinetoTrace::stop() {
  if (!std::exchange(state_->runs, false)) return;
  state_->result = kineto::disableProfiler();
}

void KinetoTrace::save(const std::string& path) {
  // Kineto reports no failure. So find out beforehand whether there can be a
  // file, and give it its name only when it is whole.
  const std::string part = path + ".part";
  std::error_code failure;
  const auto folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, failure);
  if (failure) refuse(path, failure.message());
  if (!std::ofstream(part)) refuse(path, std::strerror(errno));
  state_->result->save(part);
  // The last byte of a whole trace closes its object.
  char last = 0;
  std::ifstream written(part, std::ios::binary);
  written.seekg(0, std::ios::end);
  for (auto at = static_cast<int64_t>(written.tellg()); --at >= 0;) {
    written.seekg(at);
    last = static_cast<char>(written.get());
    if (last != '\n' && last != ' ') break;
  }
  written.close();
  if (last != '}') {
    fs::remove(part, failure);
    fs::remove(part + ".tmp", failure);  // Kineto's own
    refuse(path, "the file is not whole");
  }
  fs::rename(part, path, failure);
  if (failure) refuse(path, failure.message());
}

}  // namespace lockstep::internal
