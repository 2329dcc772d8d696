#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// All changes that the save of a folder makes to the file system. Each function
// is one system call, except that write_at() writes a large piece in several
// parts, and repeats a write that was cut short. So a test can stop a save
// before, or let it fail at, each of its calls (before() below); a save that
// made a change in another way would escape the test.
//
// Functions throw std::system_error that names the path; for a full disk its
// code is ENOSPC. They may be called from any thread.
class SaveFiles {
 public:
  SaveFiles() = default;
  virtual ~SaveFiles() = default;
  SaveFiles(const SaveFiles&) = delete;
  SaveFiles& operator=(const SaveFiles&) = delete;

  void make_folder(const std::string& path);
  // Opens a file for locking, and makes it if it is missing. It can be written,
  // because NFS locks no other.
  FileDescriptor open_lock(const std::string& path);
  // Makes a file for writing. A file that exists already is an error.
  FileDescriptor create(const std::string& path);
  void write_at(const FileDescriptor& file, const std::string& path,
                uint64_t offset, const void* data, size_t size);
  // Returns how many bytes were written so far.
  uint64_t bytes_written() const { return bytes_written_; }
  // Blocks until the file's content is on the disk.
  void sync(const FileDescriptor& file, const std::string& path);
  // Blocks until the names in the folder are on the disk.
  void sync_folder(const std::string& path);
  // Replaces a file or a symbolic link at `to`; a folder only if it is empty.
  void rename(const std::string& from, const std::string& to);
  // Makes a symbolic link at `path` that points to `target`.
  void link(const std::string& target, const std::string& path);
  // Nothing happens if there is no such file or folder. remove_folder() needs
  // an empty one.
  void remove_file(const std::string& path);
  void remove_folder(const std::string& path);

 protected:
  // Called before each system call, with its name. May throw what the system
  // call shall throw, or end the process.
  virtual void before([[maybe_unused]] const char* call,
                      [[maybe_unused]] const std::string& path) {}

 private:
  std::atomic<uint64_t> bytes_written_{0};
};

}  // namespace lockstep::internal
