#pragma once

#include <cstdint>
#include <string>

#include "lockstep/data/files/byte_reader.h"
#include "lockstep/state/safetensors_header.h"

namespace lockstep::internal {

// A safetensors file (https://huggingface.co/docs/safetensors, "Format"),
// mapped. Its header is checked against the size of the file: every tensor lies
// in it, and none overlaps another. Any thread may read.
class SafetensorsFile {
 public:
  // Throws std::system_error if the file cannot be opened, DataFileError if it
  // is not a safetensors file, or is damaged.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }

  // Returns null if the file has no tensor with this name.
  const SafetensorsTensor* find(const std::string& name) const;

  // Returns the first byte of a tensor of this file, which may lie at any
  // address.
  const uint8_t* bytes(const SafetensorsTensor& tensor) const {
    return data_ + tensor.begin;
  }

  // Returns the names of the tensors, the first ones if there are many, for
  // errors.
  std::string names() const;

 private:
  MappedFile file_;
  SafetensorsContent content_;
  const uint8_t* data_ = nullptr;
};

}  // namespace lockstep::internal
