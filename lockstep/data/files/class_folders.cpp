#include "lockstep/data/files/class_folders.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/data/data_file_error.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

struct Entries {
  std::vector<std::string> folders;
  std::vector<std::string> files;
};

// Returns the names in a folder, sorted. Links count as what they lead to; a
// broken one counts as a file.
Entries entries_of(const std::string& folder) {
  Entries entries;
  try {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      std::error_code ignored;
      auto& names =
          entry.is_directory(ignored) ? entries.folders : entries.files;
      names.push_back(entry.path().filename().string());
    }
  } catch (const fs::filesystem_error& error) {
    throw std::system_error(
        error.code(), "folder of images \"" + folder + "\" cannot be read");
  }
  std::sort(entries.folders.begin(), entries.folders.end());
  std::sort(entries.files.begin(), entries.files.end());
  return entries;
}

using Identity = std::pair<dev_t, ino_t>;

Identity identity_of(const std::string& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) {
    throw_errno("folder of images \"" + folder + "\" cannot be read");
  }
  return {status.st_dev, status.st_ino};
}

// Adds `folder` and all folders below it to `found`. `above` are the folders
// that lead to it: a link to one of them would never end.
void walk(const std::string& folder, std::set<Identity>& above,
          std::vector<std::pair<std::string, Entries>>& found) {
  const auto [place, entered] = above.insert(identity_of(folder));
  if (!entered) {
    throw DataFileError(
        folder, "is a link to a folder that it lies in; remove the link");
  }
  Entries entries = entries_of(folder);
  const std::vector<std::string> below = std::move(entries.folders);
  found.emplace_back(folder, std::move(entries));
  for (const std::string& name : below) walk(folder + "/" + name, above, found);
  above.erase(place);
}

std::string list_of(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

}  // namespace

bool has_extension(const std::string& name,
                   const std::vector<std::string>& extensions) {
  return std::any_of(
      extensions.begin(), extensions.end(), [&](const std::string& extension) {
        return name.size() >= extension.size() &&
               std::equal(extension.rbegin(), extension.rend(), name.rbegin(),
                          [](char lower, char c) {
                            if (c >= 'A' && c <= 'Z')
                              c = static_cast<char>(c - 'A' + 'a');
                            return c == lower;
                          });
      });
}

ClassFolders::ClassFolders(const std::string& root, const Options& options) {
  classes_ = entries_of(root).folders;
  if (classes_.empty()) {
    throw DataFileError(root,
                        "has no folders; give a folder that has one folder of "
                        "images for each class");
  }
  std::string empty;
  for (size_t label = 0; label < classes_.size(); ++label) {
    const size_t before = files_.size();
    add_class(root + "/" + classes_[label], options);
    for (size_t i = before; i < files_.size(); ++i) {
      files_[i].label = static_cast<uint32_t>(label);
    }
    if (files_.size() == before) {
      empty += (empty.empty() ? "\"" : ", \"") + classes_[label] + "\"";
    }
  }
  if (!empty.empty() && !options.allow_empty) {
    throw DataFileError(root, "has classes without a file that ends in " +
                                  list_of(options.extensions) + ": " + empty +
                                  "; remove these folders, or set allow_empty");
  }
}

void ClassFolders::add_class(const std::string& folder,
                             const Options& options) {
  std::vector<std::pair<std::string, Entries>> found;
  std::set<Identity> above;
  walk(folder, above, found);
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [path, entries] : found) {
    folders_.push_back(path);
    for (const std::string& name : entries.files) {
      if (has_extension(name, options.refused_extensions)) {
        throw DataFileError(
            path + "/" + name,
            "is an image of a format that cannot be decoded; convert it to "
            "JPEG or PNG, or give `extensions` to leave such files out");
      }
      if (!has_extension(name, options.extensions)) continue;
      files_.push_back({.name_begin = names_.size(),
                        .folder = static_cast<uint32_t>(folders_.size() - 1)});
      names_ += name;
      names_ += '\0';
    }
  }
}

std::string ClassFolders::path(size_t file) const {
  const File& entry = files_[file];
  return folders_[entry.folder] + "/" + (names_.c_str() + entry.name_begin);
}

}  // namespace lockstep::internal
