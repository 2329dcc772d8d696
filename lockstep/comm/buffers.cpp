#include "lockstep/comm/buffers.h"

#include <ATen/ATen.h>

#include "lockstep/comm/collective_call.h"

namespace lockstep {

Buffers::Entry& Buffers::add(const at::Tensor& tensor, Use use) {
  entries_.push_back(
      {tensor,
       {},
       use == Use::write,
       tensor.is_inference() || tensor.is_view() ? -1 : tensor._version()});
  return entries_.back();
}

at::Tensor Buffers::move(const at::Tensor& tensor, Use use) {
  auto& entry = add(tensor, use);
  // Not detach(), which shares the version counter: what a backend writes must
  // not look like a modification.
  auto data = tensor.data().resolve_conj().resolve_neg().contiguous();
  if (use == Use::write) entry.result = data;
  if (data.is_complex()) return at::view_as_real(data).view({-1});
  if (known_to_backends(data.scalar_type())) return data.view({-1});
  return data.view({-1}).view(at::kByte);
}

at::Tensor Buffers::reduce(const at::Tensor& tensor) {
  auto& entry = add(tensor, Use::write);
  auto data = tensor.data().resolve_conj().resolve_neg().contiguous();
  entry.result = data;
  if (data.is_complex()) return at::view_as_real(data).view({-1});
  auto dtype = reduced_as(data.scalar_type());
  if (dtype == data.scalar_type()) return data.view({-1});
  narrowed_.push_back({entries_.size() - 1, data.to(dtype)});
  return narrowed_.back().wide.view({-1});
}

at::Tensor Buffers::reduce_input(const at::Tensor& tensor) {
  add(tensor, Use::read);
  auto data = tensor.data().resolve_conj().resolve_neg().contiguous();
  data = data.to(reduced_as(data.scalar_type()));
  if (data.is_complex()) data = at::view_as_real(data);
  return data.view({-1});
}

at::Tensor Buffers::sparse(const at::Tensor& tensor) {
  auto& entry = add(tensor, Use::write);
  entry.result = tensor.data().coalesce().clone();
  return entry.result;
}

void Buffers::write_from(const at::Tensor& flat, const at::Tensor& tensor) {
  auto& entry = add(tensor, Use::write);
  auto data = flat;
  if (tensor.is_complex()) {
    data = at::view_as_complex(flat.view({-1, 2}));
  } else if (!known_to_backends(tensor.scalar_type()) &&
             reduced_as(tensor.scalar_type()) != flat.scalar_type()) {
    data = flat.view(tensor.scalar_type());
  }
  entry.result = data;
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
  for (const auto& [at, wide] : narrowed_) entries_[at].result.copy_(wide);
  for (auto& entry : entries_) {
    if (!entry.written) continue;
    if (entry.tensor.is_sparse()) {
      entry.tensor.copy_(entry.result);
      continue;
    }
    auto target = entry.tensor.data();
    if (target.is_alias_of(entry.result)) continue;
    target.copy_(entry.result.view(target.sizes()));
  }
}

std::vector<at::Tensor> Buffers::results() const {
  std::vector<at::Tensor> written;
  for (const auto& entry : entries_) {
    if (entry.written) written.push_back(entry.tensor);
  }
  return written;
}

uint64_t Buffers::bytes() const {
  uint64_t bytes = 0;
  for (const auto& entry : entries_) {
    if (!entry.tensor.is_sparse()) bytes += entry.tensor.nbytes();
  }
  return bytes;
}

}  // namespace lockstep
