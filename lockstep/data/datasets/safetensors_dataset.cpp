#include "lockstep/data/datasets/safetensors_dataset.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/safetensors_file.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {
namespace internal {
namespace {

at::ScalarType scalar_type_of(const SafetensorsDtype& dtype) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    if (c10::toString(type) == std::string_view(dtype.torch_name)) return type;
  }
  throw std::invalid_argument(std::string("SafetensorsDataset: this LibTorch "
                                          "has no dtype ") +
                              dtype.torch_name);
}

std::string description(const SafetensorsTensor& tensor) {
  std::string sizes;
  for (size_t i = 1; i < tensor.shape.size(); ++i) {
    sizes += (i > 1 ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return std::string(tensor.dtype->name) + " [" + sizes + "]";
}

}  // namespace

// The rows of the tensor with this name, of all files.
class SafetensorsColumn {
 public:
  explicit SafetensorsColumn(std::string name) : name_(std::move(name)) {}

  // Takes the rows of another file, and returns how many there are. `file` must
  // outlive this object and stay where it is.
  size_t add(const SafetensorsFile& file) {
    const SafetensorsTensor* tensor = file.find(name_);
    if (!tensor) {
      throw std::invalid_argument("SafetensorsDataset: there is no tensor " +
                                  quoted_name(name_) + " in \"" + file.path() +
                                  "\"; it has " + file.names());
    }
    if (tensor->shape.empty()) {
      throw DataFileError(file.path(),
                          "has a single number as the tensor " +
                              quoted_name(name_) +
                              "; its first dimension must count the samples");
    }
    if (parts_.empty()) {
      row_shape_.assign(tensor->shape.begin() + 1, tensor->shape.end());
      dtype_ = scalar_type_of(*tensor->dtype);
      row_bytes_ =
          std::accumulate(row_shape_.begin(), row_shape_.end(),
                          tensor->dtype->bytes, [](size_t bytes, int64_t size) {
                            return bytes * static_cast<size_t>(size);
                          });
    } else {
      const Part& first = parts_.front();
      if (description(*first.tensor) != description(*tensor)) {
        throw DataFileError(file.path(),
                            "has samples of " + description(*tensor) +
                                " as the tensor " + quoted_name(name_) +
                                ", but \"" + first.file->path() + "\" has " +
                                description(*first.tensor) +
                                "; all files must have the same");
      }
    }
    parts_.push_back({&file, tensor, file.bytes(*tensor)});
    return static_cast<size_t>(tensor->shape[0]);
  }

  // Returns memory for so many rows; for one without the first dimension if
  // there is no number.
  at::Tensor empty(std::optional<size_t> rows) const {
    std::vector<int64_t> shape = row_shape_;
    if (rows) shape.insert(shape.begin(), static_cast<int64_t>(*rows));
    return at::empty(shape, at::TensorOptions(dtype_).device(at::kCPU));
  }

  // Copies a row of a file to `to`, and returns the address after it.
  uint8_t* copy(size_t file, size_t row, uint8_t* to) const {
    if (row_bytes_ == 0) return to;
    const Part& part = parts_[file];
    std::memcpy(to, part.bytes + row * row_bytes_, row_bytes_);
    // Another value of a bool is undefined behaviour.
    if (dtype_ == at::kBool &&
        std::any_of(to, to + row_bytes_,
                    [](uint8_t byte) { return byte > 1; })) {
      throw DataFileError(part.file->path(),
                          "is damaged: row " + std::to_string(row) +
                              " of the tensor " + quoted_name(name_) +
                              " holds a bool that is neither 0 nor 1");
    }
    return to + row_bytes_;
  }

  const std::string& name() const { return name_; }

 private:
  struct Part {
    const SafetensorsFile* file;
    const SafetensorsTensor* tensor;
    const uint8_t* bytes;
  };

  std::string name_;
  std::vector<Part> parts_;  // one for each file
  std::vector<int64_t> row_shape_;
  at::ScalarType dtype_ = at::kByte;
  size_t row_bytes_ = 0;
};

// The rows of data and target.
struct SafetensorsRows {
  SafetensorsRows(const std::vector<std::string>& paths,
                  const SafetensorsOptions& options)
      : data(options.data) {
    if (paths.empty()) {
      throw std::invalid_argument(
          "SafetensorsDataset: there is no file; give one or more");
    }
    if (options.target) target.emplace(*options.target);
    for (const std::string& path : paths) {
      const auto& file =
          *files.emplace_back(std::make_unique<const SafetensorsFile>(path));
      const size_t rows = data.add(file);
      const size_t targets = target ? target->add(file) : rows;
      if (targets != rows) {
        throw DataFileError(path,
                            "has " + std::to_string(rows) + " rows of " +
                                quoted_name(data.name()) + " and " +
                                std::to_string(targets) + " of " +
                                quoted_name(target->name()) +
                                "; there must be one target for each sample");
      }
      ends.push_back(size() + rows);
    }
  }

  size_t size() const { return ends.empty() ? 0 : ends.back(); }

  // Returns these samples in one tensor for each column; those of one sample
  // without a first dimension if `is_single`.
  torch::data::Example<> rows(c10::ArrayRef<size_t> indices,
                              bool is_single) const {
    const auto count =
        is_single ? std::nullopt : std::optional<size_t>(indices.size());
    at::Tensor data_rows = data.empty(count);
    at::Tensor target_rows =
        target
            ? target->empty(count)
            : at::empty(
                  is_single
                      ? std::vector<int64_t>{0}
                      : std::vector<int64_t>{static_cast<int64_t>(*count), 0},
                  at::TensorOptions(at::kLong).device(at::kCPU));
    auto* data_to = static_cast<uint8_t*>(data_rows.mutable_data_ptr());
    auto* target_to = static_cast<uint8_t*>(target_rows.mutable_data_ptr());
    for (const size_t index : indices) {
      const auto [file, row] =
          place_in_parts(index, ends, "SafetensorsDataset");
      data_to = data.copy(file, row, data_to);
      if (target) target_to = target->copy(file, row, target_to);
    }
    return {std::move(data_rows), std::move(target_rows)};
  }

  std::vector<std::unique_ptr<const SafetensorsFile>> files;
  std::vector<size_t> ends;  // of each file, in the dataset
  SafetensorsColumn data;
  std::optional<SafetensorsColumn> target;
};

}  // namespace internal

SafetensorsDataset::SafetensorsDataset(const std::vector<std::string>& paths,
                                       const SafetensorsOptions& options)
    : rows_(std::make_shared<const internal::SafetensorsRows>(paths, options)) {
}

SafetensorsDataset::SafetensorsDataset(const std::string& path,
                                       const SafetensorsOptions& options)
    : SafetensorsDataset(std::vector<std::string>{path}, options) {}

torch::data::Example<> SafetensorsDataset::get(size_t index) const {
  return rows_->rows(c10::ArrayRef<size_t>(index), /*is_single=*/true);
}

torch::data::Example<> SafetensorsDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  return rows_->rows(indices, /*is_single=*/false);
}

size_t SafetensorsDataset::size() const { return rows_->size(); }

}  // namespace lockstep
