#include "lockstep/data/datasets/token_dataset.h"

#include <ATen/Functions.h>

#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/byte_reader.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little);

size_t token_bytes(at::ScalarType dtype) {
  if (dtype == at::kByte) return 1;
  if (dtype == at::kUInt16) return 2;
  if (dtype == at::kUInt32) return 4;
  throw std::invalid_argument(
      std::string("TokenDataset: dtype is ") + c10::toString(dtype) +
      "; at::kByte, at::kUInt16 and at::kUInt32 are allowed");
}

void require_token_option(const char* name, int64_t value, int64_t lowest) {
  if (value < lowest) {
    throw std::invalid_argument(std::string("TokenDataset: ") + name + " is " +
                                std::to_string(value) + "; it must be " +
                                std::to_string(lowest) + " or more");
  }
}

// Reads a token of 1, 2 or 4 bytes. Tokens may lie at any address: a header may
// have any length.
int64_t token_at(const uint8_t* bytes, size_t token_bytes) {
  uint32_t token = 0;
  std::memcpy(&token, bytes, token_bytes);
  return token;
}

}  // namespace

TokenDataset::TokenDataset(const std::string& path, int64_t sequence_length,
                           const TokenOptions& options)
    : sequence_length_(sequence_length),
      stride_(options.stride.value_or(sequence_length)),
      options_(options),
      token_bytes_(token_bytes(options.dtype)) {
  require_token_option("sequence_length", sequence_length, 1);
  require_token_option("stride", stride_, 1);
  require_token_option("header_bytes", options.header_bytes, 0);
  require_token_option("vocabulary", options.vocabulary.value_or(1), 1);
  file_ = std::make_shared<const internal::MappedFile>(path);
  const size_t bytes = file_->bytes().size();
  const auto header = static_cast<size_t>(options.header_bytes);
  if (bytes < header) {
    throw DataFileError(path, "has " + std::to_string(bytes) +
                                  " bytes, fewer than its header of " +
                                  std::to_string(header));
  }
  if ((bytes - header) % token_bytes_ != 0) {
    throw DataFileError(
        path, "has " + std::to_string(bytes - header) + " bytes of tokens" +
                  (header > 0 ? " after its header" : "") +
                  ", which is not a multiple of " +
                  std::to_string(token_bytes_) +
                  ": it was cut short, or dtype or header_bytes are wrong");
  }
  tokens_ = static_cast<int64_t>((bytes - header) / token_bytes_);
  if (tokens_ <= sequence_length_) {
    throw DataFileError(
        path, "has " + std::to_string(tokens_) +
                  " tokens, but a sample needs sequence_length + 1, " +
                  std::to_string(sequence_length_ + 1) +
                  "; give a longer text or a shorter sequence_length");
  }
  size_ = static_cast<size_t>((tokens_ - sequence_length_ - 1) / stride_ + 1);
}

int64_t TokenDataset::unused_tokens() const {
  return tokens_ -
         (static_cast<int64_t>(size_ - 1) * stride_ + sequence_length_ + 1);
}

void TokenDataset::copy(size_t index, int64_t* data, int64_t* target) const {
  internal::check_index(index, size_, "TokenDataset");
  const size_t begin = static_cast<size_t>(options_.header_bytes) +
                       index * static_cast<size_t>(stride_) * token_bytes_;
  const uint8_t* bytes = file_->bytes().data() + begin;
  const int64_t vocabulary =
      options_.vocabulary.value_or(std::numeric_limits<int64_t>::max());
  for (int64_t i = 0; i <= sequence_length_; ++i) {
    const uint8_t* place = bytes + static_cast<size_t>(i) * token_bytes_;
    const int64_t token = token_at(place, token_bytes_);
    if (token >= vocabulary) {
      throw DataFileError(
          file_->path(),
          "has the token " + std::to_string(token) + " at byte " +
              std::to_string(place - file_->bytes().data()) +
              ", outside of the vocabulary of " + std::to_string(vocabulary) +
              "; is dtype, header_bytes or vocabulary wrong?");
    }
    if (i < sequence_length_) data[i] = token;
    if (i > 0) target[i - 1] = token;
  }
}

torch::data::Example<> TokenDataset::get(size_t index) const {
  const auto options = at::TensorOptions(at::kLong).device(at::kCPU);
  internal::check_index(index, size_, "TokenDataset");
  at::Tensor data = at::empty({sequence_length_}, options);
  at::Tensor target = at::empty({sequence_length_}, options);
  copy(index, data.mutable_data_ptr<int64_t>(),
       target.mutable_data_ptr<int64_t>());
  return {data, target};
}

torch::data::Example<> TokenDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  for (const size_t index : indices) {
    internal::check_index(index, size_, "TokenDataset");
  }
  const auto options = at::TensorOptions(at::kLong).device(at::kCPU);
  const auto count = static_cast<int64_t>(indices.size());
  at::Tensor data = at::empty({count, sequence_length_}, options);
  at::Tensor target = at::empty({count, sequence_length_}, options);
  auto* data_row = data.mutable_data_ptr<int64_t>();
  auto* target_row = target.mutable_data_ptr<int64_t>();
  for (const size_t index : indices) {
    copy(index, data_row, target_row);
    data_row += sequence_length_;
    target_row += sequence_length_;
  }
  return {data, target};
}

}  // namespace lockstep
