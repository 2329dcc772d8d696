#include "lockstep/data/datasets/idx_dataset.h"

#include <ATen/Functions.h>

#include <filesystem>
#include <optional>
#include <stdexcept>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/idx_file.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep {
namespace {

using internal::IdxFile;
using internal::IdxType;

at::ScalarType dtype_of(IdxType type) {
  switch (type) {
    case IdxType::uint8:
      return at::kByte;
    case IdxType::int8:
      return at::kChar;
    case IdxType::int16:
      return at::kShort;
    case IdxType::int32:
      return at::kInt;
    case IdxType::float32:
      return at::kFloat;
    case IdxType::float64:
      return at::kDouble;
  }
  return at::ScalarType::Undefined;  // IdxFile refuses other types
}

// Returns an empty tensor for `rows` rows of `file`; without a first dimension
// if there is none.
at::Tensor empty_rows(const IdxFile& file, std::optional<int64_t> rows) {
  std::vector<int64_t> sizes(file.sizes().begin() + 1, file.sizes().end());
  if (rows) sizes.insert(sizes.begin(), *rows);
  return at::empty(sizes,
                   at::TensorOptions(dtype_of(file.type())).device(at::kCPU));
}

at::Tensor read_targets(const std::string& path, size_t rows,
                        const std::string& data_path) {
  const IdxFile file(path);
  if (file.rows() != rows) {
    throw DataFileError(path, "has " + std::to_string(file.rows()) +
                                  " rows, but \"" + data_path + "\" has " +
                                  std::to_string(rows) +
                                  "; give two files that belong together");
  }
  at::Tensor targets = empty_rows(file, static_cast<int64_t>(rows));
  auto* to = static_cast<uint8_t*>(targets.mutable_data_ptr());
  for (size_t i = 0; i < rows; ++i) {
    file.copy_row(i, to + i * file.row_bytes());
  }
  if (file.sizes().size() == 1 && !targets.is_floating_point()) {
    targets = targets.to(at::kLong);
  }
  return targets;
}

}  // namespace

IdxDataset::IdxDataset(const std::string& data, const std::string& target)
    : data_(std::make_shared<const IdxFile>(data)),
      target_(read_targets(target, data_->rows(), data)) {}

torch::data::Example<> IdxDataset::get(size_t index) const {
  internal::check_index(index, size(), "IdxDataset");
  at::Tensor row = empty_rows(*data_, std::nullopt);
  data_->copy_row(index, row.mutable_data_ptr());
  return {row, target_.select(0, static_cast<int64_t>(index)).clone()};
}

torch::data::Example<> IdxDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  at::Tensor rows = empty_rows(*data_, static_cast<int64_t>(indices.size()));
  auto* to = static_cast<uint8_t*>(rows.mutable_data_ptr());
  for (const size_t index : indices) {
    internal::check_index(index, size(), "IdxDataset");
    data_->copy_row(index, to);
    to += data_->row_bytes();
  }
  return {rows, internal::gather_rows(target_, indices)};
}

size_t IdxDataset::size() const { return data_->rows(); }

at::ScalarType IdxDataset::dtype() const { return dtype_of(data_->type()); }

std::vector<int64_t> IdxDataset::sizes() const {
  return {data_->sizes().begin() + 1, data_->sizes().end()};
}

namespace {

std::string find_mnist_file(const std::string& root, const std::string& name) {
  for (const char* folder : {"/", "/MNIST/raw/"}) {
    for (const char* ending : {"", ".gz"}) {
      std::string path = root + folder + name + ending;
      std::error_code ignored;
      if (std::filesystem::exists(path, ignored)) return path;
    }
  }
  throw std::invalid_argument(
      "MnistDataset: there is no file " + name + " or " + name + ".gz in \"" +
      root + "\" or \"" + root + "/MNIST/raw\"; give the folder that holds it");
}

IdxDataset open_mnist(const std::string& root, const MnistOptions& options) {
  const std::string part = options.train ? "train" : "t10k";
  const std::string images = find_mnist_file(root, part + "-images-idx3-ubyte");
  const std::string labels = find_mnist_file(root, part + "-labels-idx1-ubyte");
  IdxDataset files(images, labels);
  if (files.dtype() != at::kByte || files.sizes().size() != 2) {
    throw DataFileError(images,
                        "does not hold images: MNIST has three "
                        "dimensions of uint8");
  }
  if (files.target().scalar_type() != at::kLong || files.target().dim() != 1) {
    throw DataFileError(labels,
                        "does not hold labels: MNIST has one dimension "
                        "of uint8");
  }
  return files;
}

}  // namespace

MnistDataset::MnistDataset(const std::string& root, MnistOptions options)
    : files_(open_mnist(root, options)) {}

torch::data::Example<> MnistDataset::get(size_t index) const {
  auto sample = files_.get(index);
  return {sample.data.unsqueeze(0), sample.target};
}

torch::data::Example<> MnistDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  auto batch = files_.get_batch(indices);
  return {batch.data.unsqueeze(1), batch.target};
}

}  // namespace lockstep
