#pragma once

#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep {

// A column of a table: by the name that the header line gives it, or by its
// number from 0 on; -1 is the last one, -2 the one before, and so on.
class CsvColumn {
 public:
  CsvColumn(const char* name) : column_(std::string(name)) {}
  CsvColumn(std::string name) : column_(std::move(name)) {}
  template <std::integral Number>
    requires(!std::is_same_v<Number, bool> && !std::is_same_v<Number, char>)
  CsvColumn(Number number) : column_(static_cast<int64_t>(number)) {}

  // Exactly one of these is not null.
  const std::string* name() const { return std::get_if<std::string>(&column_); }
  const int64_t* number() const { return std::get_if<int64_t>(&column_); }

 private:
  std::variant<std::string, int64_t> column_;
};

struct CsvOptions {
  // Whether the first line has the names of the columns. None means true,
  // except that a first line with numbers alone in the columns that are read
  // (or empty fields, if `missing` is set) is an error, unless the line is 0, 1
  // and so on, as tools write it for columns without names.
  std::optional<bool> header{};

  // The character between two fields of a row.
  char separator{','};

  // The columns that make a sample's data, in this order. Empty means all
  // columns that are not the target.
  std::vector<CsvColumn> columns{};

  // The column that makes a sample's target; several make a row of targets.
  // Empty means that targets are empty tensors.
  std::vector<CsvColumn> target{};

  // The dtypes of data and target: at::kFloat, at::kDouble or at::kLong.
  at::ScalarType dtype{at::kFloat};
  at::ScalarType target_dtype{at::kLong};

  // The value of an empty field. None means that it is an error.
  std::optional<double> missing{};
};

// A table of numbers in a text file, plain or compressed with gzip (the first
// two bytes tell, not the name). The file is read by the constructor, which
// blocks until then; afterwards the dataset is two tensors in memory. The text
// is never in memory as a whole.
//
// Rows and quotes are as in RFC 4180 and in Python's csv module: a field may be
// in double quotes and may then hold separators, line ends and doubled quotes;
// lines end with LF, CR LF or CR; empty lines and a byte order mark are
// skipped. Numbers have a point, whatever the locale; blanks around them are
// allowed, and so are `nan` and `inf` if the dtype is a floating-point type.
// Columns that are not selected may hold anything.
//
// A sample is data [columns] and target []; with several target columns it is
// [columns], without one [0]. Copies share the tensors. Several threads may
// call get() and get_batch().
class CsvDataset {
 public:
  // Throws std::system_error if the file cannot be opened; DataFileError that
  // names line and column if a field is not a number of the dtype, if rows
  // differ in their number of fields, or if quotes are wrong;
  // std::invalid_argument if the file has no such column, an option is out of
  // range, or a first line of numbers would be taken for names.
  explicit CsvDataset(const std::string& path, const CsvOptions& options = {});

  torch::data::Example<> get(size_t index) const { return rows_.get(index); }

  // Returns a batch [B, ...], by one gather from each tensor.
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const {
    return rows_.get_batch(indices);
  }

  size_t size() const { return static_cast<size_t>(rows_.data().size(0)); }

  // All rows: [N, columns], and the targets.
  const at::Tensor& data() const { return rows_.data(); }
  const at::Tensor& target() const { return rows_.target(); }

  // The names of the data's columns; empty without a header line.
  const std::vector<std::string>& columns() const { return columns_; }

 private:
  std::vector<std::string> columns_;
  TensorDataset rows_;
};

}  // namespace lockstep
