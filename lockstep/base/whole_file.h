#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/file_descriptor.h"

// Files in a folder in which the processes of a job write as they like. A name
// may belong to a link to a file elsewhere, a pipe at which a reader waits for
// ever, or an endless file.
namespace lockstep::internal {

// Opens the regular file `name`, a path below `folder`, for reading. Nothing
// below `folder` may be a link. Never blocks. If there is no such file, returns
// an empty descriptor and sets errno: ENOENT if there is nothing, EINVAL if it
// is not a regular file or not below `folder`, else as open(2).
FileDescriptor open_left_file(const std::filesystem::path& folder,
                              const std::filesystem::path& name);

// Returns the first `most` bytes of that file; nothing, with errno, if it
// cannot be read.
std::optional<std::string> read_left_file(const std::filesystem::path& folder,
                                          const std::filesystem::path& name,
                                          size_t most);
// Returns the last ones.
std::optional<std::string> read_end_of_left_file(
    const std::filesystem::path& folder, const std::filesystem::path& name,
    size_t most);

// Makes a new file for writing in the place of any file of its name;
// `flags` are more ones of open(2). Never blocks, and follows no link.
// Returns an empty descriptor, with errno, if it cannot.
FileDescriptor make_own_file(const std::filesystem::path& path, int flags = 0);
// Makes such a file with this text. If it cannot, as on a full disk, returns
// false and leaves nothing.
bool write_own_file(const std::filesystem::path& path, std::string_view text);

// Returns whether a new file must not take the place of what is at `path`: a
// pipe, a device, or the file that is this process's stdout. A link to itself
// is so, too, and then cannot be opened.
bool is_written_through(const std::string& path);

// Writes a new file under a random name in the same folder and then renames it,
// so that no reader sees a part of it. Only this user may read it if
// `is_private`. What is_written_through() is written as it is; a pipe without a
// reader is ENXIO. Returns 0, or the errno of what failed; then nothing is
// left. Throws std::system_error if the system has no random numbers.
int write_aside(const std::string& path, std::string_view bytes,
                bool is_private = true);

}  // namespace lockstep::internal
