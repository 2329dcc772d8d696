#pragma once

#include <filesystem>

namespace lockstep::internal::testing {

// Makes `folder` this process's working directory while the object lives. The
// first rank that comes makes the folder if it does not exist.
class InFolder {
 public:
  explicit InFolder(const std::filesystem::path& folder)
      : before_(std::filesystem::current_path()) {
    std::filesystem::create_directories(folder);
    std::filesystem::current_path(folder);
  }
  InFolder(const InFolder&) = delete;
  InFolder& operator=(const InFolder&) = delete;
  ~InFolder() { std::filesystem::current_path(before_); }

 private:
  std::filesystem::path before_;
};

}  // namespace lockstep::internal::testing
