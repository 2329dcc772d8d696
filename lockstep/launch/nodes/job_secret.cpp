#include "lockstep/launch/nodes/job_secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

constexpr size_t kLeast = 16;
constexpr size_t kMost = 1024;

[[noreturn]] void refuse_file(const std::string& file, const std::string& why) {
  throw std::invalid_argument("--rdzv-secret-file is \"" + file + "\", " + why);
}

std::string first_line_of_secret(const std::string& file) {
  const FileDescriptor fd(
      open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!fd || fstat(fd.get(), &status) != 0) {
    refuse_file(file, std::string("which cannot be read: ") +
                          std::strerror(errno) +
                          "; give a file that holds the job's secret");
  }
  if (!S_ISREG(status.st_mode)) {
    refuse_file(file,
                "which is not a file; give a file that holds the job's "
                "secret");
  }
  if ((status.st_mode & 077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", status.st_mode & 07777);
    refuse_file(file, std::string("whose mode is ") + mode +
                          ": others may read or write it; say chmod 600");
  }
  std::string text(kMost + 2, '\0');
  const ssize_t count = read(fd.get(), text.data(), text.size());
  if (count < 0) {
    refuse_file(file,
                std::string("which cannot be read: ") + std::strerror(errno));
  }
  text.resize(static_cast<size_t>(count));
  text.resize(std::min(text.size(), text.find('\n')));
  return text;
}

}  // namespace

std::optional<std::string> job_secret(const std::string& file) {
  const auto variable = get_env(kJobSecretVariable);
  if (file.empty() && !variable) return std::nullopt;
  std::string secret = file.empty() ? *variable : first_line_of_secret(file);
  // A variable that was read from a file may have the newline at its end.
  if (secret.ends_with('\n')) secret.pop_back();
  if (secret.ends_with('\r')) secret.pop_back();
  if (secret.size() < kLeast || secret.size() > kMost) {
    throw std::invalid_argument(
        (file.empty()
             ? "environment variable " + std::string(kJobSecretVariable)
             : "the first line of --rdzv-secret-file=" + file) +
        " has " + std::to_string(secret.size()) +
        " characters; a secret has from 16 to 1024, chosen at random: "
        "head -c 32 /dev/urandom | base64");
  }
  return secret;
}

}  // namespace lockstep::internal
