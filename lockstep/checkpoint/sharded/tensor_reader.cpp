#include "lockstep/checkpoint/sharded/tensor_reader.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/parallel_tasks.h"
#include "lockstep/checkpoint/sharded/shard_file.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {
namespace {

constexpr uint64_t kMostBytesAtOnce = uint64_t{8} << 20;
// A region whose rows are apart is read with what lies between them: up to so
// many bytes at once if most of them are needed, otherwise fewer.
constexpr uint64_t kMostSparseBytes = uint64_t{64} << 10;
// How much is read for its checksum at once: it stays in the second-level
// cache.
constexpr size_t kVerifiedAtOnce = size_t{256} << 10;

Sizes row_major_strides(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * sizes[d];
  }
  return strides;
}

// Returns the dimension along which `region` must be divided to get smaller
// pieces of contiguous bytes: its first one with more than one index.
size_t first_long(const Box& region) {
  size_t dim = 0;
  while (dim < region.sizes.size() && region.sizes[dim] == 1) ++dim;
  return dim;
}

}  // namespace

void TensorReader::add(const TensorShard& target) {
  const auto found = files_.tensors().find(target.name);
  if (found == files_.tensors().end()) {
    throw std::invalid_argument("the snapshot has no tensor \"" + target.name +
                                "\"");
  }
  const TensorFiles::Tensor& tensor = found->second;
  if (tensor.shape != target.shape) {
    std::ostringstream text;
    text << "the snapshot has \"" << target.name << "\" of shape "
         << at::IntArrayRef(tensor.shape) << ", here it has "
         << at::IntArrayRef(target.shape);
    throw std::invalid_argument(text.str());
  }
  name_ = &found->first;
  for (const HeldBox& held : held_boxes(target)) {
    for (const TensorFiles::Part& part : tensor.parts) {
      const auto region = intersection(part.box, held.box);
      if (!region || region->numel() == 0) continue;
      files_.require_header(part.file);
      add_region(part, tensor.dtype, *region,
                 narrow_to(held.elements, held.box, *region));
    }
  }
  // The values change below autograd, which must notice.
  target.tensor.unsafeGetTensorImpl()->bump_version();
}

void TensorReader::add_region(const TensorFiles::Part& part,
                              c10::ScalarType dtype, const Box& region,
                              const at::Tensor& target) {
  const Sizes strides = row_major_strides(part.box.sizes);
  const uint64_t item = c10::elementSize(dtype);
  uint64_t first = 0;
  uint64_t last = 0;
  for (size_t d = 0; d < strides.size(); ++d) {
    const int64_t begin = region.offsets[d] - part.box.offsets[d];
    first += static_cast<uint64_t>(begin * strides[d]);
    last += static_cast<uint64_t>((begin + region.sizes[d] - 1) * strides[d]);
  }
  const uint64_t span = (last - first + 1) * item;
  const uint64_t needed = static_cast<uint64_t>(region.numel()) * item;
  const bool contiguous = span == needed;
  const bool direct = contiguous && target.is_cpu() && target.is_contiguous() &&
                      target.scalar_type() == dtype && !target.is_neg() &&
                      !target.is_conj();
  if (direct) {
    add_bytes(part, dtype, part.begin + first * item, needed,
              target.mutable_data_ptr());
    return;
  }
  const uint64_t most =
      needed >= span / 4 ? kMostBytesAtOnce : kMostSparseBytes;
  const size_t dim = first_long(region);
  if (span <= most || dim == region.sizes.size()) {
    const uint64_t offset = part.begin + first * item;
    add_blocks(part, dtype, offset, span);
    tasks_.push_back({&part, dtype, offset, span, nullptr, target, strides});
    return;
  }
  // So many indices at once that their bytes are not too many.
  const uint64_t step = static_cast<uint64_t>(strides[dim]) * item;
  const auto count = std::max<int64_t>(1, static_cast<int64_t>(most / step));
  for (int64_t at = 0; at < region.sizes[dim]; at += count) {
    Box piece = region;
    piece.offsets[dim] += at;
    piece.sizes[dim] = std::min(count, region.sizes[dim] - at);
    add_region(part, dtype, piece,
               target.narrow(static_cast<int64_t>(dim), at, piece.sizes[dim]));
  }
}

void TensorReader::add_blocks(const TensorFiles::Part& part,
                              c10::ScalarType dtype, uint64_t offset,
                              uint64_t bytes) {
  const uint64_t begin = offset - part.begin;
  for (uint64_t block = begin / kChecksumBlock;
       block <= (begin + bytes - 1) / kChecksumBlock; ++block) {
    blocks_.insert({&part, block, name_, dtype});
  }
}

void TensorReader::add_to_verify(const std::string& name) {
  const auto found = files_.tensors().find(name);
  name_ = &found->first;
  for (const TensorFiles::Part& part : found->second.parts) {
    files_.require_header(part.file);
    if (part.bytes == 0) continue;
    add_blocks(part, found->second.dtype, part.begin, part.bytes);
  }
}

void TensorReader::add_bytes(const TensorFiles::Part& part,
                             c10::ScalarType dtype, uint64_t offset,
                             uint64_t bytes, void* to) {
  add_blocks(part, dtype, offset, bytes);
  for (uint64_t at = 0; at < bytes; at += kMostBytesAtOnce) {
    tasks_.push_back({&part,
                      dtype,
                      offset + at,
                      std::min(kMostBytesAtOnce, bytes - at),
                      static_cast<char*>(to) + at,
                      at::Tensor(),
                      {}});
  }
}

void TensorReader::verify(bool checksums) const {
  std::vector<const Block*> blocks;
  for (const Block& block : blocks_) {
    const bool compared = checksums && !block.part->checksums.empty();
    if (compared || block.dtype == c10::ScalarType::Bool) {
      blocks.push_back(&block);
    }
  }
  run_tasks(blocks.size(), reading_threads(), [&](size_t index) {
    const Block& block = *blocks[index];
    const TensorFiles::Part& part = *block.part;
    const auto opened = files_.open(part.file);
    const InputFile& file = *opened;
    const auto damaged = [&](const char* how) {
      return SnapshotError(file.path(),
                           "is damaged: tensor \"" + *block.name + "\" " + how);
    };
    const uint64_t begin = block.number * kChecksumBlock;
    const uint64_t end = std::min(part.bytes, begin + kChecksumBlock);
    const auto buffer = std::make_unique_for_overwrite<char[]>(kVerifiedAtOnce);
    Xxh3 sum;
    for (uint64_t at = begin; at < end; at += kVerifiedAtOnce) {
      const size_t count = std::min<uint64_t>(kVerifiedAtOnce, end - at);
      file.read_at(part.begin + at, buffer.get(), count);
      sum.add(buffer.get(), count);
      if (!valid_values(buffer.get(), count, block.dtype)) {
        throw damaged("holds a bool that is neither 0 nor 1");
      }
    }
    if (checksums && !part.checksums.empty() &&
        sum.value() != part.checksums.at(block.number)) {
      throw damaged("does not match its checksum");
    }
  });
}

void TensorReader::run(const Task& task) const {
  const auto file = files_.open(task.part->file);
  if (task.to) {
    file->read_at(task.offset, task.to, task.bytes);
    return;
  }
  // Another thread may have begun this.
  const c10::InferenceMode inference(task.target.is_inference());
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(task.dtype);
  const at::Tensor buffer = at::empty(
      {static_cast<int64_t>(task.bytes / c10::elementSize(task.dtype))},
      options);
  file->read_at(task.offset, buffer.mutable_data_ptr(), task.bytes);
  at::Tensor target = task.target;
  target.copy_(buffer.as_strided(target.sizes(), task.strides));
}

void TensorReader::read() const {
  for (const Task& task : tasks_) {
    if (task.target.defined()) finish_current_stream(task.target);
  }
  run_tasks(tasks_.size(), reading_threads(),
            [&](size_t index) { run(tasks_[index]); });
}

at::Tensor read_tensor(const TensorFiles& files, const std::string& name,
                       bool checksums) {
  const TensorFiles::Tensor& tensor = files.tensors().at(name);
  at::Tensor result =
      at::empty(tensor.shape, at::TensorOptions().dtype(tensor.dtype));
  TensorReader reader(files);
  reader.add({name, tensor.shape, Replicate{}, result});
  reader.verify(checksums);
  reader.read();
  return result;
}

at::Tensor without_memory(const TensorFiles::Tensor& tensor) {
  return at::empty(tensor.shape,
                   at::TensorOptions().dtype(tensor.dtype).device(at::kMeta));
}

namespace {

// A file's content in memory, until the end of its life. Writing to it does not
// change the file.
class PrivateMapping {
 public:
  explicit PrivateMapping(const InputFile& file)
      : size_(static_cast<size_t>(file.size())) {
    address_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_NORESERVE, file.descriptor(), 0);
    if (address_ == MAP_FAILED) {
      throw_errno("snapshot \"" + file.path() + "\" cannot be mapped");
    }
  }
  ~PrivateMapping() { ::munmap(address_, size_); }
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;

  char* at(uint64_t offset) const {
    return static_cast<char*>(address_) + offset;
  }

 private:
  size_t size_;
  void* address_;
};

}  // namespace

std::vector<at::Tensor> map_tensors(const TensorFiles& files,
                                    const std::vector<std::string>& names) {
  std::map<size_t, std::shared_ptr<PrivateMapping>> mappings;  // by file
  std::vector<at::Tensor> result;
  for (const std::string& name : names) {
    const TensorFiles::Tensor& tensor = files.tensors().at(name);
    const TensorFiles::Part& part = tensor.parts.front();
    files.require_header(part.file);
    const bool aligned = part.begin % c10::elementSize(tensor.dtype) == 0;
    if (tensor.parts.size() > 1 || !aligned || part.bytes == 0) {
      result.push_back(read_tensor(files, name, false));
      continue;
    }
    auto& mapping = mappings[part.file];
    if (!mapping) {
      mapping = std::make_shared<PrivateMapping>(*files.open(part.file));
    }
    if (!valid_values(mapping->at(part.begin), part.bytes, tensor.dtype)) {
      throw SnapshotError(files.file(part.file).path(),
                          "is damaged: tensor \"" + name +
                              "\" holds a bool that is neither 0 nor 1");
    }
    result.push_back(at::from_blob(
        mapping->at(part.begin), tensor.shape, [keep = mapping](void*) {},
        at::TensorOptions().dtype(tensor.dtype)));
  }
  return result;
}

}  // namespace lockstep::internal
