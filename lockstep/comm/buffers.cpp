#include "lockstep/comm/buffers.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/collective_call.h"

namespace lockstep::internal {

namespace {

// The memory in which a dense tensor's elements lie.
struct Extent {
  const char* begin;
  const char* end;
};

// Returns the elements in memory order, as one dimension of stride 1. (The
// strides of `contiguous` may be anything if it has one element or none.)
at::Tensor in_a_row(const at::Tensor& contiguous) {
  return contiguous.as_strided({contiguous.numel()}, {1});
}

// Returns the values of `tensor` in ordinary contiguous memory, which is the
// tensor's own if that is contiguous already. Uses data(), because detach()
// shares the version counter: what a backend writes must not look like a
// modification.
at::Tensor plain(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) {  // it has no memory
    return at::zeros(tensor.sizes(), tensor.options().requires_grad(false));
  }
  return tensor.data().resolve_conj().resolve_neg().contiguous();
}

at::Tensor as_reals(const at::Tensor& row) {
  return row.is_complex() ? at::view_as_real(row).view({-1}) : row;
}

}  // namespace

at::ScalarType reduced_as(at::ScalarType dtype) {
  switch (dtype) {
    case at::kShort:
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
      return at::kLong;
    default:
      return dtype;
  }
}

bool known_to_backends(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

namespace {

// Throws unless a backend can write to `tensor`: it has memory, and does not
// overlap itself.
void require_writable(const Call& call, const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) {
    throw call.mistake(c10::str(
        "a tensor to write to, ", describe(tensor),
        ", is zeros without memory (a ZeroTensor); give tensor.clone()"));
  }
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw call.mistake(c10::str("a tensor to write to overlaps itself (shape ",
                                tensor.sizes(), ", strides ", tensor.strides(),
                                "); give tensor.contiguous()"));
  }
}

}  // namespace

void require_apart(const Call& call, const std::vector<at::Tensor>& written) {
  std::vector<Extent> extents;
  for (const auto& tensor : written) {
    require_writable(call, tensor);
    if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) continue;
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    extents.push_back({begin, begin + tensor.nbytes()});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin < extents[i - 1].end) {
      throw call.mistake(
          "two of the tensors to write to overlap; give each its own memory");
    }
  }
}

Buffers::Entry& Buffers::add(const at::Tensor& tensor, bool read,
                             bool written) {
  if (written && !tensor.is_sparse()) require_writable(call_, tensor);
  entries_.push_back(
      {tensor,
       {},
       read,
       written,
       tensor.is_inference() || tensor.is_view() ? -1 : tensor._version(),
       /*units=*/1});
  return entries_.back();
}

void Buffers::count_units(Entry& entry, const at::Tensor& row) {
  entry.units = static_cast<uint8_t>(entry.tensor.itemsize() / row.itemsize());
}

at::Tensor Buffers::move(const at::Tensor& tensor, Use use) {
  auto& entry = add(tensor, use == Use::read, use == Use::write);
  auto data = plain(tensor);
  if (use == Use::write) entry.result = data;
  auto row = as_reals(in_a_row(data));
  if (!known_to_backends(row.scalar_type())) row = row.view(at::kByte);
  count_units(entry, row);
  return row;
}

at::Tensor Buffers::reduce(const at::Tensor& tensor) {
  auto& entry = add(tensor, /*read=*/true, /*written=*/true);
  auto data = plain(tensor);
  entry.result = data;
  const auto dtype = reduced_as(data.scalar_type());
  if (dtype == data.scalar_type()) {
    auto row = as_reals(in_a_row(data));
    count_units(entry, row);
    return row;
  }
  narrowed_.push_back({entries_.size() - 1, data.to(dtype)});
  return in_a_row(narrowed_.back().wide);
}

at::Tensor Buffers::reduce_input(const at::Tensor& tensor) {
  auto& entry = add(tensor, /*read=*/true, /*written=*/false);
  auto data = plain(tensor);
  auto row = as_reals(in_a_row(data.to(reduced_as(data.scalar_type()))));
  if (row.scalar_type() != reduced_as(data.scalar_type())) {
    count_units(entry, row);
  }
  return row;
}

at::Tensor Buffers::sparse(const at::Tensor& tensor) {
  auto& entry = add(tensor, /*read=*/true, /*written=*/true);
  // LibTorch has no sparse sum of the half types on CPUs.
  const auto dtype = c10::isReducedFloatingType(tensor.scalar_type())
                         ? at::kFloat
                         : tensor.scalar_type();
  entry.result = tensor.data().to(dtype).coalesce().clone();
  return entry.result;
}

void Buffers::write_from(const at::Tensor& flat, const at::Tensor& tensor) {
  auto& entry = add(tensor, /*read=*/false, /*written=*/true);
  auto data = flat;
  if (tensor.is_complex()) {
    data = at::view_as_complex(flat.view({-1, 2}));
  } else if (!known_to_backends(tensor.scalar_type()) &&
             reduced_as(tensor.scalar_type()) != flat.scalar_type()) {
    data = flat.view(tensor.scalar_type());
  }
  entry.result = std::move(data);
}

void Buffers::require_apart(const Call& call) const {
  std::vector<at::Tensor> written;
  for (const auto& entry : entries_) {
    if (entry.written && !entry.tensor.is_sparse()) {
      written.push_back(entry.tensor);
    }
  }
  lockstep::internal::require_apart(call, written);
}

std::optional<std::string> Buffers::modified() const {
  for (const auto& entry : entries_) {
    if (entry.version >= 0 && entry.tensor._version() != entry.version) {
      return describe(entry.tensor);
    }
  }
  return std::nullopt;
}

void Buffers::write_back() {
  at::NoGradGuard no_grad;
  for (const auto& [at, wide] : narrowed_) {
    entries_[at].result.copy_(wide);
    keep_for_current_stream(wide);
  }
  for (auto& entry : entries_) {
    if (!entry.written) continue;
    if (entry.tensor.is_sparse()) {
      entry.tensor.copy_(entry.result.to(entry.tensor.scalar_type()));
      continue;
    }
    auto target = entry.tensor.data();
    if (target.is_alias_of(entry.result)) continue;
    target.copy_(entry.result.view(target.sizes()));
    keep_for_current_stream(entry.result);
  }
}

std::vector<at::Tensor> Buffers::inputs() const {
  std::vector<at::Tensor> read;
  for (const auto& entry : entries_) {
    if (entry.read) read.push_back(entry.tensor);
  }
  return read;
}

std::vector<at::Tensor> Buffers::results() const {
  std::vector<at::Tensor> written;
  for (const auto& entry : entries_) {
    if (entry.written) written.push_back(entry.tensor);
  }
  return written;
}

ElementType Buffers::type_of(const Entry& entry) {
  const auto dtype = entry.tensor.scalar_type();
  return {.code = static_cast<uint8_t>(dtype),
          .name = c10::toString(dtype),
          .units = entry.units};
}

std::vector<ElementType> Buffers::types() const {
  std::vector<ElementType> types;
  for (const auto& entry : entries_) types.push_back(type_of(entry));
  return types;
}

std::optional<c10::Device> Buffers::device() const {
  if (entries_.empty()) return std::nullopt;
  return entries_.front().tensor.device();
}

Buffers::Extent Buffers::extent() const {
  Extent extent;
  if (!entries_.empty()) extent.type = type_of(entries_.front());
  for (const auto& entry : entries_) {
    const auto elements = static_cast<uint64_t>(entry.tensor.numel());
    if (entry.read) extent.in += elements;
    if (entry.written) extent.out += elements;
    if (!entry.tensor.is_sparse()) extent.bytes += entry.tensor.nbytes();
  }
  return extent;
}

}  // namespace lockstep::internal
