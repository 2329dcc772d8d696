#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/sharded/manifest.h"

namespace lockstep::internal {

// The limit for a manifest and for an index of Hugging Face's.
inline constexpr uint64_t kMostTextBytes = uint64_t{256} << 20;

// Returns the content of such a file. Throws SnapshotError if it is larger or
// not a regular file, std::system_error if it cannot be opened or read.
std::string text_of_file(const std::string& path);

// The tensors in several safetensors files, each of which may lie in parts in
// some of them: a folder of Lockstep or of PyTorch's distributed checkpoint, or
// Hugging Face's sharded weights. Only the headers are read and checked here.
//
// Reading files of unknown origin is safe: offsets and shapes are checked, and
// no file outside the folder is opened, except by a link in it. Any thread may
// read from files whose headers were read.
class TensorFiles {
 public:
  struct Part {
    size_t file = 0;
    Box box;
    // The next three are known when the header of the file was read.
    uint64_t begin = 0;  // of its bytes, in the file
    uint64_t bytes = 0;
    std::vector<uint64_t> checksums;  // shard_file.h; empty if there are none
  };
  struct Tensor {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    Sizes shape;
    std::vector<Part> parts;  // hold each element once
  };

  TensorFiles(TensorFiles&&) = default;
  TensorFiles& operator=(TensorFiles&&) = default;

  // Opens the snapshot in `folder`: one of ours, if there is a manifest, which
  // must fit the files; otherwise those of model.safetensors.index.json, if it
  // exists; otherwise all files that end in ".safetensors".
  //
  // Throws SnapshotError that names the file if something is missing, damaged
  // or of another kind (a folder of ours without a manifest is a save that did
  // not end), and std::system_error if a file cannot be opened or read.
  //
  // With kWhenNeeded, headers of files that a manifest describes are read by
  // require_header(), which throws the same errors: a rank that needs a part of
  // the snapshot then reads a part of the headers.
  enum class Headers { kAll, kWhenNeeded };
  static TensorFiles open_folder(const std::string& folder,
                                 Headers headers = Headers::kAll);

  // Opens the files that an index of Hugging Face's names
  // (model.safetensors.index.json, "weight_map"), and takes from each file the
  // tensors that the index assigns to it. Throws the same errors.
  static TensorFiles open_index(const std::string& path);

  // Opens one safetensors file. Throws the same errors.
  static TensorFiles open_file(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  // Reads the header of this file, unless it was read. One thread at a time.
  void require_header(size_t file) const;

  // Both need the header. If the files are more than a quarter of those that
  // this process may open, the others are closed. Then open() opens a file
  // anew, and throws SnapshotError if it has another size now; a caller that
  // reads it in several calls should keep the result.
  const InputFile& file(size_t index) const { return *files_[index].input; }
  std::shared_ptr<const InputFile> open(size_t index) const;
  // None if the files are not one of our folders.
  const std::optional<Manifest>& manifest() const { return manifest_; }
  // Whether PyTorch's distributed checkpoint wrote the files.
  bool is_distributed() const { return is_distributed_; }
  // Two snapshots with the same digest hold the same. Not a defence against
  // forgery.
  uint64_t digest() const { return digest_; }

  // Returns the names that begin with `prefix`, without it.
  std::vector<std::string> names_under(const std::string& prefix) const;

 private:
  struct File {
    std::shared_ptr<InputFile> input;  // null before the header is read
    // The tensors that the file has by the manifest, by name; the parts in
    // tensors_ get their places from the header.
    std::vector<std::pair<const std::string*, Part*>> parts;
  };

  explicit TensorFiles(std::string path) : path_(std::move(path)) {}
  void add_file(const std::string& path, const WrittenFile* expected,
                const std::map<std::string, std::string>* weight_map);
  void add_parts_of_manifest();
  void set_input(File& file, std::shared_ptr<InputFile> input) const;
  void finish();
  void compare_with_manifest() const;

  std::string path_;
  mutable std::vector<File> files_;
  mutable size_t open_files_ = 0;
  std::map<std::string, Tensor> tensors_;
  std::optional<Manifest> manifest_;
  bool is_distributed_ = false;
  uint64_t digest_ = 0;
};

}  // namespace lockstep::internal
