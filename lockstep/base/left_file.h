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

}  // namespace lockstep::internal
