#include "lockstep/checkpoint/sharded/mapped_tensors.h"

#include <ATen/Functions.h>
#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <memory>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal {
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
    const InputFile& file = files.file(part.file);
    auto& mapping = mappings[part.file];
    if (!mapping) mapping = std::make_shared<PrivateMapping>(file);
    if (!valid_values(mapping->at(part.begin), part.bytes, tensor.dtype)) {
      throw SnapshotError(file.path(), "is damaged: tensor \"" + name +
                                           "\" holds a bool that is neither 0 "
                                           "nor 1");
    }
    result.push_back(at::from_blob(
        mapping->at(part.begin), tensor.shape, [keep = mapping](void*) {},
        at::TensorOptions().dtype(tensor.dtype)));
  }
  return result;
}

}  // namespace lockstep::internal
