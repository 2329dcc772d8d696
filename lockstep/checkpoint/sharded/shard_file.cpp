#include "lockstep/checkpoint/sharded/shard_file.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/parallel_tasks.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/state/strict_json.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

constexpr const char* kSavedOffsets = "saved_offsets";
// The first tensor begins at a page of the file.
constexpr size_t kHeaderAlignment = 4096;
// How much is hashed right after it was written, when writing has brought it
// into the second-level cache. That costs about a tenth of writing to memory;
// hashing first costs a quarter, because then the hash waits for the memory.
constexpr size_t kFusedBytes = size_t{128} << 10;
// Larger tensors are hashed by a thread of their own, if there is a core for
// it.
constexpr size_t kLargeTensor = size_t{16} << 20;
// Smaller tensors are collected, so that they do not cost a system call each.
constexpr size_t kSmallTensor = size_t{64} << 10;

// Appends the tensors' bytes to the file, and collects small ones.
class BytesWriter {
 public:
  BytesWriter(SaveFiles& files, const FileDescriptor& file, std::string path,
              uint64_t offset)
      : files_(files), file_(file), path_(std::move(path)), offset_(offset) {}

  // Returns the checksums of the blocks, as hexadecimal digits.
  std::string add(const char* data, size_t size) {
    if (size < kSmallTensor) {
      collected_.append(data, size);
      if (collected_.size() >= kFusedBytes) flush();
      return size > 0 ? hex_of(xxh3(data, size)) : "";
    }
    flush();
    std::string sums;
    if (size >= kLargeTensor && has_spare_core()) {
      run_tasks(2, 2, [&](size_t task) {
        if (task == 0) {
          write(data, size);
          return;
        }
        for (size_t begin = 0; begin < size; begin += kChecksumBlock) {
          const size_t count = std::min<size_t>(kChecksumBlock, size - begin);
          sums += hex_of(xxh3(data + begin, count));
        }
      });
      return sums;
    }
    Xxh3 hash;
    for (size_t begin = 0; begin < size; begin += kChecksumBlock) {
      const size_t end = std::min<size_t>(size, begin + kChecksumBlock);
      hash.reset();
      for (size_t at = begin; at < end; at += kFusedBytes) {
        const size_t count = std::min(kFusedBytes, end - at);
        write(data + at, count);
        hash.add(data + at, count);
      }
      sums += hex_of(hash.value());
    }
    return sums;
  }

  void flush() {
    if (collected_.empty()) return;
    const std::string bytes = std::exchange(collected_, {});
    write(bytes.data(), bytes.size());
  }

 private:
  void write(const char* data, size_t size) {
    files_.write_at(file_, path_, offset_, data, size);
    offset_ += size;
  }

  SaveFiles& files_;
  const FileDescriptor& file_;
  std::string path_;
  uint64_t offset_;
  std::string collected_;
};

}  // namespace

size_t block_count(uint64_t bytes) {
  return static_cast<size_t>((bytes + kChecksumBlock - 1) / kChecksumBlock);
}

std::vector<uint64_t> block_checksums(const at::Tensor& tensor) {
  const at::Tensor values = file_form(tensor);
  const auto* const data = static_cast<const char*>(values.const_data_ptr());
  std::vector<uint64_t> sums;
  for (size_t begin = 0; begin < values.nbytes(); begin += kChecksumBlock) {
    sums.push_back(
        xxh3(data + begin,
             std::min<size_t>(kChecksumBlock, values.nbytes() - begin)));
  }
  return sums;
}

std::string shard_file_name(size_t rank, size_t file, size_t files) {
  char name[96];
  std::snprintf(name, sizeof name,
                "shard-%05zu-model-%05zu-of-%05zu.safetensors", rank + 1,
                file + 1, files);
  return name;
}

WrittenFile write_shard_file(SaveFiles& files, const std::string& folder,
                             const std::string& name,
                             std::vector<PlannedEntry> entries,
                             std::map<std::string, std::string> metadata,
                             std::map<std::string, std::string>* checksums) {
  // Wide elements come first, so every tensor is aligned, because the first is.
  std::stable_sort(entries.begin(), entries.end(),
                   [](const PlannedEntry& a, const PlannedEntry& b) {
                     return a.elements.element_size() >
                            b.elements.element_size();
                   });
  std::vector<SafetensorsEntry> places;
  Json offsets = Json::object();
  Json sums = Json::object();
  uint64_t size = 0;
  for (const PlannedEntry& entry : entries) {
    const uint64_t end = size + entry.elements.nbytes();
    places.push_back(
        {entry.name, entry.elements.scalar_type(), entry.box.sizes, size, end});
    offsets[entry.name] = {{kSavedOffsets, entry.box.offsets}};
    sums[entry.name] = std::string(block_count(end - size) * 16, '0');
    size = end;
  }
  metadata["DCP_VERSION"] = "1.0";
  metadata["format"] = "pt";
  metadata[kShardingInfo] = offsets.dump();
  const auto make = [&] {
    metadata[kShardChecksums] =
        Json{{"block", kChecksumBlock}, {"tensors", sums}}.dump();
    return make_plain_header(places, metadata, kHeaderAlignment);
  };
  // The checksums have the same length before and after they are known.
  const uint64_t data_offset = sizeof(uint64_t) + make().size();

  const std::string path = folder + "/" + name;
  const FileDescriptor file = files.create(path);
  BytesWriter writer(files, file, path, data_offset);
  for (const PlannedEntry& entry : entries) {
    const at::Tensor bytes = file_form(entry.elements);
    sums[entry.name] = writer.add(
        static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  }
  writer.flush();
  if (checksums) *checksums = sums.get<std::map<std::string, std::string>>();
  const std::string text = make();
  const uint64_t length = text.size();
  std::string head(sizeof length, '\0');
  std::memcpy(head.data(), &length, sizeof length);
  head += text;
  files.write_at(file, path, 0, head.data(), head.size());
  files.sync(file, path);
  return {name, data_offset + size, xxh3(head)};
}

bool offsets_fit(const Sizes& offsets, const Sizes& sizes) {
  if (offsets.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (offsets[d] < 0 || sizes[d] < 0 ||
        offsets[d] > std::numeric_limits<int64_t>::max() - sizes[d]) {
      return false;
    }
  }
  return true;
}

std::vector<ShardDetails> shard_details(const SafetensorsHeader& header) {
  std::vector<ShardDetails> details(header.entries.size());
  const auto info = header.metadata.find(kShardingInfo);
  const auto stored = header.metadata.find(kShardChecksums);
  Json offsets;
  Json sums;
  if (info != header.metadata.end()) {
    offsets = parse_strict_json(info->second, 3);
  }
  if (stored != header.metadata.end()) {
    const Json all = parse_strict_json(stored->second, 2);
    if (all.at("block").get<uint64_t>() != kChecksumBlock) {
      throw std::runtime_error("its checksums are over blocks of another size");
    }
    sums = all.at("tensors");
  }
  for (size_t i = 0; i < details.size(); ++i) {
    const SafetensorsEntry& entry = header.entries[i];
    details[i].offsets = Sizes(entry.shape.size(), 0);
    if (!offsets.is_null()) {
      details[i].offsets =
          offsets.at(entry.name).at(kSavedOffsets).get<Sizes>();
      if (!offsets_fit(details[i].offsets, entry.shape)) {
        throw std::runtime_error("tensor \"" + entry.name +
                                 "\" has offsets that do not fit its shape");
      }
    }
    if (sums.is_null()) continue;
    const auto text = sums.at(entry.name).get<std::string>();
    if (text.size() != block_count(entry.end - entry.begin) * 16) {
      throw std::runtime_error("tensor \"" + entry.name +
                               "\" has too many or too few checksums");
    }
    for (size_t at = 0; at < text.size(); at += 16) {
      const auto sum = checksum_of(std::string_view(text).substr(at, 16));
      if (!sum) {
        throw std::runtime_error("tensor \"" + entry.name +
                                 "\" has a checksum that is not a number");
      }
      details[i].checksums.push_back(*sum);
    }
  }
  return details;
}

}  // namespace lockstep::internal
