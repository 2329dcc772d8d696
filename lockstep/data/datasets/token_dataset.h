#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace lockstep {

namespace internal {
class MappedFile;
}

struct TokenOptions {
  // The type of a token in the file, little-endian: at::kUInt16, at::kUInt32,
  // or at::kByte, with which any file is a text of 256 tokens.
  at::ScalarType dtype{at::kUInt16};

  // How many tokens further each sample begins. Less than the sequence length
  // makes samples overlap. None means the sequence length.
  std::optional<int64_t> stride{};

  // Bytes at the beginning of the file that are not tokens.
  int64_t header_bytes{0};

  // The number of tokens that the model knows. With it a larger token in the
  // file is an error, and not an index outside of the embedding. None means
  // tokens are not compared.
  std::optional<int64_t> vocabulary{};
};

// A text as a file of token numbers, without gaps, such as
// `numpy.array(tokens, dtype=numpy.uint16).tofile(path)` writes it, for
// language models that predict the next token. Sample i is made of the T + 1
// tokens from i * stride on: data is the first T of them, target the last T,
// both int64 [T].
//
// There are as many samples as fit whole; unused_tokens() at the end of the
// file are left out. For several files use a ConcatDataset.
//
// The file is mapped: only what is used is read from the disk. Copies share the
// mapping. Several threads may call get() and get_batch().
class TokenDataset {
 public:
  // Throws std::system_error if the file cannot be opened, DataFileError if it
  // is shorter than its header or than one sample, or ends inside a token,
  // std::invalid_argument if
  // an argument is out of range.
  TokenDataset(const std::string& path, int64_t sequence_length,
               const TokenOptions& options = {});

  // Both throw DataFileError with the place in the file for a token outside of
  // the vocabulary. A batch is [B, T].
  torch::data::Example<> get(size_t index) const;
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  size_t size() const { return size_; }

  // All tokens of the file, and how many at its end are in no sample.
  int64_t tokens() const { return tokens_; }
  int64_t unused_tokens() const;

 private:
  void copy(size_t index, int64_t* data, int64_t* target) const;

  std::shared_ptr<const internal::MappedFile> file_;
  int64_t sequence_length_;
  int64_t stride_;
  TokenOptions options_;
  size_t token_bytes_;
  int64_t tokens_ = 0;
  size_t size_ = 0;
};

}  // namespace lockstep
