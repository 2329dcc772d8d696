#include "lockstep/checkpoint/sharded/tensor_files.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <stdexcept>
#include <system_error>

#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/digest.h"
#include "lockstep/state/strict_json.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffixOfTensors = ".safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

SnapshotError damaged_file(const std::string& path, const std::string& why) {
  return {path, "is damaged: " + why};
}

// Returns the paths of the files in a folder without a manifest, sorted.
std::vector<std::string> tensor_files_in(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == kSuffixOfTensors) {
      paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Returns the smallest shape into which all parts fit, as PyTorch's reader
// does.
Sizes shape_around(const std::vector<TensorFiles::Part>& parts) {
  Sizes shape = parts.front().box.sizes;
  std::fill(shape.begin(), shape.end(), 0);
  for (const TensorFiles::Part& part : parts) {
    if (part.box.sizes.size() != shape.size()) {
      throw std::runtime_error(
          "its parts have different numbers of dimensions");
    }
    for (size_t d = 0; d < shape.size(); ++d) {
      shape[d] = std::max(shape[d], part.box.offsets[d] + part.box.sizes[d]);
    }
  }
  using Wide = unsigned __int128;
  Wide count = 1;
  for (const int64_t size : shape) {
    count *= static_cast<Wide>(std::max<int64_t>(size, 1));
    if (count > std::numeric_limits<int64_t>::max() / 16) {
      throw std::runtime_error("its shape is too large");
    }
  }
  return shape;
}

void require_size(const std::string& path, uint64_t size,
                  const WrittenFile& expected) {
  if (size == expected.bytes) return;
  throw damaged_file(path, "it has " + std::to_string(size) +
                               " bytes instead of " +
                               std::to_string(expected.bytes));
}

// Returns how many files may stay open: a quarter of what this process may
// open, so that two folders can be compared, and others opened, too.
size_t most_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  return limit.rlim_cur / 4;
}

// A file whose header was read and checked.
struct OpenedFile {
  std::shared_ptr<InputFile> file;
  SafetensorsHeader header;
  std::vector<ShardDetails> details;
  uint64_t header_checksum = 0;
};

OpenedFile open_file_of(const std::string& path, const WrittenFile* expected) {
  OpenedFile opened;
  opened.file = std::make_shared<InputFile>(path);
  const InputFile& file = *opened.file;
  if (expected) require_size(path, file.size(), *expected);
  if (file.size() < sizeof(uint64_t)) {
    throw SnapshotError(path, "has " + std::to_string(file.size()) +
                                  " bytes, too few for a safetensors file: it "
                                  "was cut short");
  }
  opened.header = read_header(file);
  const uint64_t sum =
      xxh3(file.read_text(0, static_cast<size_t>(opened.header.data_offset)));
  if (expected && sum != expected->header_checksum) {
    throw damaged_file(path, "its header does not match its checksum");
  }
  opened.header_checksum = sum;
  try {
    opened.details = shard_details(opened.header);
  } catch (const std::exception& error) {
    throw damaged_file(path,
                       std::string("its header is invalid: ") + error.what());
  }
  return opened;
}

// Lets the part have the place that entry `i` of the header says.
void set_place(TensorFiles::Part& part, OpenedFile& opened, size_t i) {
  const SafetensorsEntry& entry = opened.header.entries[i];
  part.begin = opened.header.data_offset + entry.begin;
  part.bytes = entry.end - entry.begin;
  part.checksums = std::move(opened.details[i].checksums);
}

}  // namespace

std::string text_of_file(const std::string& path) {
  const InputFile file(path);
  if (file.size() > kMostTextBytes) {
    throw damaged_file(path, "it is larger than 256 MiB");
  }
  return file.read_text(0, static_cast<size_t>(file.size()));
}

void TensorFiles::add_file(
    const std::string& path, const WrittenFile* expected,
    const std::map<std::string, std::string>* weight_map) {
  OpenedFile opened = open_file_of(path, expected);
  const SafetensorsHeader& header = opened.header;
  std::vector<ShardDetails>& details = opened.details;
  if (!expected && header.metadata.contains(kShardKey)) {
    throw SnapshotError(path_,
                        "has no " + std::string(kManifestName) +
                            ": saving it did not end, or the file was removed",
                        "name another snapshot, or restore the file");
  }
  for (size_t i = 0; i < details.size(); ++i) {
    const SafetensorsEntry& entry = header.entries[i];
    if (weight_map) {
      const auto place = weight_map->find(entry.name);
      if (place == weight_map->end() ||
          place->second != fs::path(path).filename()) {
        continue;
      }
    }
    Tensor& tensor = tensors_[entry.name];
    if (tensor.parts.empty()) tensor.dtype = entry.dtype;
    if (tensor.dtype != entry.dtype) {
      throw damaged_file(path, "its part of tensor \"" + entry.name +
                                   "\" has another dtype than the others");
    }
    Part& part = tensor.parts.emplace_back();
    part.file = files_.size();
    part.box = {std::move(details[i].offsets), entry.shape};
    set_place(part, opened, i);
  }
  is_distributed_ = is_distributed_ || header.metadata.contains(kShardingInfo);
  Digest digest;
  digest.add(digest_);
  digest.add(opened.header_checksum);
  digest_ = digest.value();
  set_input(files_.emplace_back(), std::move(opened.file));
}

void TensorFiles::set_input(File& file,
                            std::shared_ptr<InputFile> input) const {
  if (open_files_ < most_open_files()) {
    ++open_files_;
  } else {
    input->close();
  }
  file.input = std::move(input);
}

std::shared_ptr<const InputFile> TensorFiles::open(size_t index) const {
  const auto& known = files_[index].input;
  if (known->descriptor() >= 0) return known;
  auto again = std::make_shared<const InputFile>(known->path());
  if (again->size() != known->size()) {
    throw SnapshotError(known->path(), "was changed while it was being read",
                        "load again when nothing writes it");
  }
  return again;
}

void TensorFiles::add_parts_of_manifest() {
  files_.resize(manifest_->files.size());
  for (const auto& [name, parts] : manifest_->parts) {
    const auto place = tensors_.emplace_hint(tensors_.end(), name, Tensor());
    Tensor& tensor = place->second;
    tensor.dtype = manifest_->tensors.at(name).dtype;
    for (const Manifest::Part& listed : parts) {
      Part& part = tensor.parts.emplace_back();
      part.file = listed.file;
      part.box = listed.box;
    }
    for (Part& part : tensor.parts) {
      files_[part.file].parts.emplace_back(&place->first, &part);
    }
  }
}

void TensorFiles::require_header(size_t index) const {
  File& file = files_[index];
  if (file.input) return;
  const WrittenFile& expected = manifest_->files[index];
  const std::string path = path_ + "/" + expected.name;
  OpenedFile opened = open_file_of(path, &expected);
  const auto& entries = opened.header.entries;
  std::vector<size_t> by_name(entries.size());
  std::iota(by_name.begin(), by_name.end(), 0);
  std::sort(by_name.begin(), by_name.end(), [&](size_t a, size_t b) {
    return entries[a].name < entries[b].name;
  });
  bool same = entries.size() == file.parts.size();
  for (size_t i = 0; same && i < by_name.size(); ++i) {
    const SafetensorsEntry& entry = entries[by_name[i]];
    const auto& [name, part] = file.parts[i];
    same = entry.name == *name && entry.dtype == tensors_.at(*name).dtype &&
           part->box == Box{opened.details[by_name[i]].offsets, entry.shape};
    if (same) set_place(*part, opened, by_name[i]);
  }
  if (!same) {
    throw damaged_file(
        path, "its tensors are not those that the manifest says it has");
  }
  set_input(file, std::move(opened.file));
}

void TensorFiles::finish() {
  for (auto& [name, tensor] : tensors_) {
    std::string problem;
    try {
      if (tensor.parts.empty()) throw std::runtime_error("it has no part");
      tensor.shape = shape_around(tensor.parts);
      std::vector<Box> boxes;
      for (const Part& part : tensor.parts) boxes.push_back(part.box);
      problem = cover_problem(tensor.shape, std::move(boxes));
    } catch (const std::runtime_error& error) {
      problem = error.what();
    }
    if (!problem.empty()) {
      throw damaged_file(
          path_, "tensor \"" + name + "\" cannot be put together: " + problem);
    }
  }
  if (manifest_) compare_with_manifest();
}

void TensorFiles::compare_with_manifest() const {
  const auto& listed = manifest_->tensors;
  for (const auto& [name, tensor] : listed) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.dtype != tensor.dtype ||
        found->second.shape != tensor.shape) {
      throw damaged_file(path_, "tensor \"" + name +
                                    "\" is not in its files as the manifest "
                                    "says");
    }
  }
  for (const auto& [name, tensor] : tensors_) {
    if (!listed.contains(name)) {
      throw damaged_file(
          path_, "the manifest says nothing of tensor \"" + name + "\"");
    }
  }
}

TensorFiles TensorFiles::open_folder(const std::string& folder,
                                     Headers headers) {
  TensorFiles all(folder);
  const std::string manifest = folder + "/" + kManifestName;
  std::error_code ignored;
  if (fs::is_symlink(fs::symlink_status(folder, ignored)) &&
      !fs::exists(folder, ignored)) {
    throw SnapshotError(folder, "is a link to a folder that cannot be found",
                        "move the folder back, or correct the link");
  }
  if (fs::exists(manifest, ignored)) {
    const std::string text = text_of_file(manifest);
    uint64_t sum = 0;
    try {
      all.manifest_ = manifest_of(text, &sum);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(manifest + ": " + error.what());
    } catch (const std::exception& error) {
      throw damaged_file(manifest, error.what());
    }
    for (const WrittenFile& file : all.manifest_->files) {
      const std::string path = folder + "/" + file.name;
      try {
        if (all.manifest_->parts.empty()) {
          all.add_file(path, &file, nullptr);
        } else {
          require_size(path, fs::file_size(path), file);
        }
      } catch (const std::system_error& error) {
        if (error.code() != std::errc::no_such_file_or_directory) throw;
        throw damaged_file(folder, "its file \"" + file.name + "\" is missing");
      }
    }
    if (!all.manifest_->parts.empty()) all.add_parts_of_manifest();
    all.digest_ = sum;
  } else if (fs::exists(folder + "/" + kIndexName, ignored)) {
    return open_index(folder + "/" + kIndexName);
  } else {
    const auto paths = tensor_files_in(folder);
    const std::string bin_index = folder + "/pytorch_model.bin.index.json";
    if (paths.empty() && fs::exists(bin_index, ignored)) {
      return open_index(bin_index);  // says why not
    }
    if (paths.empty()) {
      throw SnapshotError(folder, "is a folder without snapshots",
                          "name a folder that holds one, or a file");
    }
    for (const std::string& path : paths) all.add_file(path, nullptr, nullptr);
  }
  all.finish();
  if (headers == Headers::kAll) {
    for (size_t i = 0; i < all.files_.size(); ++i) all.require_header(i);
  }
  return all;
}

TensorFiles TensorFiles::open_index(const std::string& path) {
  TensorFiles all(path);
  std::map<std::string, std::string> weight_map;
  std::set<std::string> files;
  try {
    const auto json = parse_strict_json(text_of_file(path), 3);
    weight_map = json.at("weight_map").get<decltype(weight_map)>();
    for (const auto& [name, file] : weight_map) {
      if (file.empty() || file.front() == '.' ||
          file.find('/') != std::string::npos) {
        throw std::runtime_error("\"" + file +
                                 "\" is not the name of a file beside it");
      }
      if (fs::path(file).extension() == ".bin") {
        throw SnapshotError(
            path,
            "is an index of files of torch.save (" + file +
                "), and only those of safetensors files are read",
            "load the files one after the other, by load_model() with strict = "
            "false, or save the model as safetensors");
      }
      files.insert(file);
    }
  } catch (const nlohmann::json::exception&) {
    throw SnapshotError(path,
                        "is not an index of safetensors files: it has no "
                        "\"weight_map\" of names to files");
  } catch (const SnapshotError&) {
    throw;
  } catch (const std::system_error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw SnapshotError(path, std::string("is not an index of safetensors "
                                          "files: ") +
                                  error.what());
  }
  const std::string folder = fs::path(path).parent_path().string();
  for (const std::string& file : files) {
    try {
      all.add_file((folder.empty() ? "." : folder) + "/" + file, nullptr,
                   &weight_map);
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::no_such_file_or_directory) throw;
      throw SnapshotError(path,
                          "names the file \"" + file + "\", which is missing",
                          "copy all files of the model to one folder");
    }
  }
  for (const auto& [name, file] : weight_map) {
    if (all.tensors_.contains(name)) continue;
    throw SnapshotError(path, "says that \"" + file + "\" has the tensor \"" +
                                  name + "\", but it does not");
  }
  all.finish();
  return all;
}

TensorFiles TensorFiles::open_file(const std::string& path) {
  {
    const InputFile file(path);
    if (file.size() >= 4 && file.read_text(0, 4) == "PK\3\4") {
      throw SnapshotError(path,
                          "is a file of torch.save, which cannot be mapped",
                          "save the weights as safetensors, or leave out mmap");
    }
  }
  TensorFiles all(path);
  all.add_file(path, nullptr, nullptr);
  all.finish();
  return all;
}

std::vector<std::string> TensorFiles::names_under(
    const std::string& prefix) const {
  std::vector<std::string> names;
  for (auto it = tensors_.lower_bound(prefix);
       it != tensors_.end() && it->first.starts_with(prefix); ++it) {
    names.push_back(it->first.substr(prefix.size()));
  }
  return names;
}

}  // namespace lockstep::internal
