#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::internal {

// Whether a file name ends in one of `extensions` (lower case, with the dot),
// in upper or lower case.
bool has_extension(const std::string& name,
                   const std::vector<std::string>& extensions);

// The files of a folder that has one folder for each class, in the order of
// torchvision.datasets.ImageFolder (torchvision documentation, DatasetFolder):
// classes by name; in a class, folders by path and files by name, all by their
// bytes. Links are followed. Immutable; any thread may read.
class ClassFolders {
 public:
  struct Options {
    // Lower case, with the dot.
    std::vector<std::string> extensions{};
    // Files with these are an error, so that no image is left out by mistake.
    std::vector<std::string> refused_extensions{};
    // Whether a class may have no file.
    bool allow_empty = false;
  };

  // Throws DataFileError if `root` has no folder, if a class has no file
  // (unless they are allowed), if a file has a refused extension, or if links
  // form a loop; std::system_error if a folder cannot be read.
  ClassFolders(const std::string& root, const Options& options);

  // The names of the classes; a class is its place in this list.
  const std::vector<std::string>& classes() const { return classes_; }

  size_t size() const { return files_.size(); }
  int64_t class_of(size_t file) const { return files_[file].label; }
  std::string path(size_t file) const;

 private:
  // A folder of images has millions of files, so each takes a few bytes only.
  struct File {
    uint64_t name_begin = 0;  // in names_
    uint32_t folder = 0;
    uint32_t label = 0;
  };

  void add_class(const std::string& folder, const Options& options);

  std::vector<std::string> classes_;
  std::vector<std::string> folders_;
  std::vector<File> files_;
  std::string names_;  // of all files, one after another, each ended by NUL
};

}  // namespace lockstep::internal
