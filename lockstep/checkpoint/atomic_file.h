#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep {

// Replaces a file as a whole: at every moment, that of a SIGKILL or of a power
// failure included, its path holds either the old content or the new.
//
// The new content is written aside, in the same directory, to a file named
// ".NAME.lockstep-XXXXXXXXXXXXXXXX.tmp" (16 random hexadecimal digits), which
// is synchronised to the disk and then renamed over NAME; the directory is
// synchronised last. A killed process leaves such a file behind. Its writer
// holds a lock (flock) on it for as long as it lives, so the next save of the
// same NAME can tell, and removes it.
//
// A symbolic link at the path stays; the file it points to is replaced. The
// permissions of a file that is replaced are kept.
class AtomicFile {
 public:
  // Throws std::system_error that names the path and the cause, and
  // std::invalid_argument if something that is not a regular file is there.
  explicit AtomicFile(const std::string& path);

  // Removes the file aside unless commit() has succeeded.
  ~AtomicFile();

  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Appends. Throws std::system_error (a full disk: ENOSPC).
  void write(const void* data, size_t size);

  // Blocks until the content and its name are on the disk. Throws
  // std::system_error; the old file is then as it was, except that a failure
  // of the very last step, synchronising the directory, leaves the new one
  // there, complete, but not certain to outlast a power failure.
  void commit();

 private:
  [[noreturn]] void fail(const std::string& step) const;
  void open_aside();
  void remove_left_overs() const;

  std::string path_;       // as given, for messages
  std::string directory_;  // of the file itself, links resolved
  std::string name_;
  std::string aside_;  // full path; empty once it is renamed or removed
  FileDescriptor fd_;
};

// Throws, with the path and the cause, unless a file can be made where an
// AtomicFile of `path` would make it. Nothing stays there: for finding out
// before hours of training, not after them, that the folder is missing.
void check_can_save(const std::string& path);

// Whether `name` (without a directory) is one that AtomicFile gives a file
// aside for `target`.
bool is_aside_name(const std::string& name, const std::string& target);

}  // namespace lockstep
