#include "lockstep/checkpoint/staged_copy.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

#include "lockstep/base/huge_pages.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/shard_file.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/version_of.h"

namespace lockstep::internal {
namespace {

// Small enough for threads that share the work to end together, large enough to
// be one copy.
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Whether its bytes are a whole range of the CPU's memory, and its values.
bool has_plain_bytes(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_neg() && !tensor.is_conj();
}

}  // namespace

void StagedCopy::begin(Save& save) {
  const at::NoGradGuard no_grad;
  end();
  std::vector<TensorToWrite> tensors = save.tensors();
  size_t bytes = 0;
  for (const TensorToWrite& entry : tensors) {
    bytes += aligned(entry.tensor->nbytes());
  }
  reserve(bytes);
  std::map<TensorMemory, at::Tensor> copies;
  int64_t place = 0;
  for (const TensorToWrite& entry : tensors) {
    const at::Tensor from = *entry.tensor;
    const auto size = static_cast<int64_t>(from.nbytes());
    if (size == 0) continue;
    const bool is_dense = has_plain_bytes(from);
    // Dense tensors of the same memory share its copy, whatever their shapes.
    at::Tensor& copy = copies[memory_of(
        is_dense ? from.as_strided({from.numel()}, {1}) : from)];
    const bool is_first = !copy.defined();
    if (is_first) {
      copy = memory_.narrow(0, place, size).view(from.scalar_type());
      place += static_cast<int64_t>(aligned(from.nbytes()));
    }
    const at::Tensor to = is_dense
                              ? copy.as_strided(from.sizes(), from.strides())
                              : copy.view(from.sizes());
    if (is_first) begin_copy(entry, from, to);
    *entry.tensor = to;
  }
  for (const TensorToCompare& entry : save.tensors_to_compare()) {
    begin_checksums(entry);
  }
  done_ = 0;
  next_ = 0;
  changed_ = kNotLooked;
}

void StagedCopy::begin_checksums(const TensorToCompare& entry) {
  const at::Tensor& from = entry.tensor;
  if (!from.device().is_cpu() || !from.is_contiguous() || from.is_neg() ||
      from.is_conj()) {
    *entry.checksums = block_checksums(from);
    return;
  }
  entry.checksums->resize(block_count(from.nbytes()));
  for (size_t begin = 0; begin < from.nbytes(); begin += kChecksumBlock) {
    pieces_.push_back(
        {sources_.size(), begin,
         std::min<size_t>(kChecksumBlock, from.nbytes() - begin)});
  }
  sources_.push_back(
      {entry.name, from, {}, entry.checksums->data(), version_of(from)});
}

void StagedCopy::begin_copy(const TensorToWrite& entry, const at::Tensor& from,
                            const at::Tensor& to) {
  if (entry.is_buffer || !has_plain_bytes(from)) {
    to.copy_(from);
    return;
  }
  for (size_t begin = 0; begin < from.nbytes(); begin += kPieceBytes) {
    pieces_.push_back(
        {sources_.size(), begin, std::min(kPieceBytes, from.nbytes() - begin)});
  }
  sources_.push_back({entry.name, from, to, nullptr, version_of(from)});
}

void StagedCopy::reserve(size_t bytes) {
  if (memory_.defined() && memory_.nbytes() >= bytes) return;
  memory_.reset();
  memory_ = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  prefer_huge_pages(memory_.data_ptr(), bytes);
}

void StagedCopy::copy() {
  for (size_t index = next_++; index < pieces_.size(); index = next_++) {
    copy(pieces_[index]);
    if (++done_ == pieces_.size()) done_.notify_all();
  }
  for (size_t done = done_; done < pieces_.size(); done = done_) {
    done_.wait(done);
  }
  size_t changed = kNotLooked;
  const size_t found = find_changed();
  if (changed_.compare_exchange_strong(changed, found)) changed = found;
  if (changed == kNone) return;
  throw std::runtime_error(
      "the tensor \"" + sources_[changed].name +
      "\" was changed while it was copied for the snapshot; with "
      "overlap_copy, call SnapshotSaver::wait_for_copy() before "
      "optimizer.step() and before everything else that changes the model");
}

void StagedCopy::copy(const Piece& piece) const {
  const Source& source = sources_[piece.source];
  const char* const from =
      static_cast<const char*>(source.from.const_data_ptr()) + piece.begin;
  if (source.checksums) {
    source.checksums[piece.begin / kChecksumBlock] = xxh3(from, piece.bytes);
  } else {
    std::memcpy(static_cast<char*>(source.to.data_ptr()) + piece.begin, from,
                piece.bytes);
  }
}

void StagedCopy::end() {
  sources_.clear();
  pieces_.clear();
}

size_t StagedCopy::find_changed() const {
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (version_of(sources_[i].from) != sources_[i].version) return i;
  }
  return kNone;
}

}  // namespace lockstep::internal
