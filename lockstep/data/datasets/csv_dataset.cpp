#include "lockstep/data/datasets/csv_dataset.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "lockstep/base/shown_text.h"
#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/byte_reader.h"
#include "lockstep/data/files/csv_reader.h"

namespace lockstep {
namespace {

using internal::CsvReader;
using internal::Parsed;

// Returns text from a file for an error of one line, in UTF-8.
std::string csv_excerpt(std::string_view text) {
  constexpr size_t kMost = 40;
  constexpr const char* kDigits = "0123456789abcdef";
  std::string shown = "\"";
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      shown += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    } else {
      shown += c;
    }
  }
  return internal::shown_line(shown) + (text.size() > kMost ? "\"..." : "\"");
}

bool csv_blank(std::string_view text) {
  return text.find_first_not_of(" \t") == std::string_view::npos;
}

// The values of some columns of all rows, as one dtype.
class CsvValues {
 public:
  virtual ~CsvValues() = default;

  // Appends the number that a field holds.
  virtual Parsed add(std::string_view field) = 0;
  virtual void add_missing(double value) = 0;

  // Returns all values as [rows, columns]; this object is empty afterwards.
  virtual at::Tensor tensor(int64_t rows, int64_t columns) = 0;
};

template <class T>
class CsvValuesOf : public CsvValues {
 public:
  Parsed add(std::string_view field) override {
    if constexpr (std::is_same_v<T, int64_t>) {
      int64_t value = 0;
      const Parsed parsed = internal::parse_int64(field, value);
      if (parsed == Parsed::ok) values_->push_back(value);
      return parsed;
    } else {
      double value = 0;
      const Parsed parsed = internal::parse_double(field, value);
      if (parsed != Parsed::ok) return parsed;
      const auto rounded = static_cast<T>(value);
      if (std::isinf(rounded) && !std::isinf(value))
        return Parsed::out_of_range;
      values_->push_back(rounded);
      return Parsed::ok;
    }
  }
  void add_missing(double value) override {
    values_->push_back(static_cast<T>(value));
  }
  at::Tensor tensor(int64_t rows, int64_t columns) override {
    values_->shrink_to_fit();
    auto* data = values_->data();
    return at::from_blob(
        data, {rows, columns},
        [values = std::move(values_)](void*) mutable { values.reset(); },
        at::TensorOptions(c10::CppTypeToScalarType<T>::value).device(at::kCPU));
  }

 private:
  std::shared_ptr<std::vector<T>> values_ = std::make_shared<std::vector<T>>();
};

std::unique_ptr<CsvValues> csv_values(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return std::make_unique<CsvValuesOf<float>>();
    case at::kDouble:
      return std::make_unique<CsvValuesOf<double>>();
    case at::kLong:
      return std::make_unique<CsvValuesOf<int64_t>>();
    default:
      throw std::invalid_argument(
          std::string("CsvDataset: a dtype is ") + c10::toString(dtype) +
          "; at::kFloat, at::kDouble and at::kLong are allowed");
  }
}

std::string csv_allowed(at::ScalarType dtype) {
  if (dtype == at::kLong) {
    return "an integer of 64 bits; for other numbers set the dtype to "
           "at::kFloat";
  }
  return std::string("a number that fits ") + c10::toString(dtype);
}

void check_csv_options(const CsvOptions& options) {
  if (options.separator == '"' || options.separator == '\n' ||
      options.separator == '\r') {
    throw std::invalid_argument(
        "CsvDataset: the separator is a quote or a line end; give another "
        "character");
  }
  if (!options.missing) return;
  std::vector<at::ScalarType> dtypes{options.dtype};
  if (!options.target.empty()) dtypes.push_back(options.target_dtype);
  for (const at::ScalarType dtype : dtypes) {
    // 2^63 is the first double that int64 cannot hold.
    if (dtype == at::kLong &&
        !(std::floor(*options.missing) == *options.missing &&
          std::abs(*options.missing) < 0x1p63)) {
      throw std::invalid_argument("CsvDataset: missing is " +
                                  std::to_string(*options.missing) +
                                  ", which is not an integer of 64 bits, but a "
                                  "dtype is at::kLong; give an "
                                  "integer, or other dtypes");
    }
  }
}

// The places of columns in a row.
class CsvTable {
 public:
  // `first` is the first row, with or without names.
  CsvTable(const CsvReader& first, const CsvOptions& options)
      : path_(first.path()), size_(first.size()) {
    if (options.header.value_or(true)) {
      for (size_t i = 0; i < size_; ++i) names_.emplace_back(first[i]);
    }
  }

  size_t size() const { return size_; }

  size_t place(const CsvColumn& column) const {
    if (const int64_t* number = column.number()) {
      const auto size = static_cast<int64_t>(size_);
      if (*number >= size || *number < -size) {
        throw std::invalid_argument(
            "CsvDataset: there is no column " + std::to_string(*number) +
            " in \"" + path_ + "\"; it has " + std::to_string(size) +
            " columns, 0 to " + std::to_string(size - 1) +
            ", or -1 for the last");
      }
      return static_cast<size_t>(*number < 0 ? *number + size : *number);
    }
    const std::string& name = *column.name();
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) {
      throw std::invalid_argument("CsvDataset: there is no column \"" + name +
                                  "\" in \"" + path_ + "\"; " + known());
    }
    if (std::find(found + 1, names_.end(), name) != names_.end()) {
      throw std::invalid_argument("CsvDataset: several columns of \"" + path_ +
                                  "\" are named \"" + name +
                                  "\"; give the column's number");
    }
    return static_cast<size_t>(found - names_.begin());
  }

  std::string title(size_t place) const {
    return "column " + std::to_string(place) +
           (names_.empty() ? "" : " (" + csv_excerpt(names_[place]) + ")");
  }

  const std::vector<std::string>& names() const { return names_; }

 private:
  std::string known() const {
    if (names_.empty()) {
      return "names need `header`, which is false; give the column's number";
    }
    constexpr size_t kMost = 20;
    std::string text = "its columns are";
    for (size_t i = 0; i < std::min(size_, kMost); ++i) {
      text += (i > 0 ? ", " : " ") + csv_excerpt(names_[i]);
    }
    return text + (size_ > kMost ? ", ..." : "");
  }

  std::string path_;
  size_t size_;
  std::vector<std::string> names_;
};

// Some columns, and what was read of them.
struct CsvSelection {
  CsvSelection(const CsvTable& table, const std::vector<CsvColumn>& columns,
               at::ScalarType type)
      : dtype(type), values(csv_values(type)) {
    for (const CsvColumn& column : columns) {
      places.push_back(table.place(column));
    }
  }

  void add_row(const CsvReader& row, const CsvTable& table,
               const CsvOptions& options) {
    for (const size_t place : places) {
      const std::string_view field = row[place];
      const bool empty = csv_blank(field);
      if (empty && options.missing) {
        values->add_missing(*options.missing);
        continue;
      }
      const Parsed parsed = values->add(field);
      if (parsed == Parsed::ok) continue;
      throw DataFileError(
          row.path(),
          "line " + std::to_string(row.line()) + ", " + table.title(place) +
              ": " +
              (empty ? "the field is empty; set `missing` to read empty fields "
                       "as a number"
                     : csv_excerpt(field) +
                           (parsed == Parsed::out_of_range ? " is too large"
                                                           : " is wrong") +
                           "; allowed is " + csv_allowed(dtype)));
    }
  }

  at::ScalarType dtype;
  std::unique_ptr<CsvValues> values;
  std::vector<size_t> places;
};

// Returns whether the fields are 0, 1 and so on, as tools write them for
// columns without names; the first is empty if the rows have an index.
bool csv_counts(const CsvReader& row) {
  const size_t begin = csv_blank(row[0]) ? 1 : 0;
  for (size_t i = begin; i < row.size(); ++i) {
    double value = 0;
    if (internal::parse_double(row[i], value) != Parsed::ok ||
        value != static_cast<double>(i - begin)) {
      return false;
    }
  }
  return row.size() > 1;
}

// Throws if the first row of a table would be taken for names, but has a number
// at each of `places`, which are those that are read.
void require_names(const CsvReader& first, const std::vector<size_t>& places,
                   const CsvOptions& options) {
  std::string row;
  for (size_t i = 0; i < places.size(); ++i) {
    const std::string_view field = first[places[i]];
    double value = 0;
    if (!(options.missing && csv_blank(field)) &&
        internal::parse_double(field, value) == Parsed::not_a_number) {
      return;
    }
    if (i < 5) row += (i > 0 ? ", " : "") + csv_excerpt(field);
  }
  if (csv_counts(first)) return;
  throw std::invalid_argument(
      "CsvDataset: line " + std::to_string(first.line()) + " of \"" +
      first.path() + "\" has numbers alone in the columns that are read (" +
      row + (places.size() > 5 ? ", ..." : "") +
      "), but would be taken for the names of the columns; set `header` to "
      "false if it is a sample, or to true if these are names");
}

struct CsvContent {
  std::vector<std::string> columns;
  at::Tensor data;
  at::Tensor target;
};

CsvContent read_csv(const std::string& path, const CsvOptions& options) {
  check_csv_options(options);
  const internal::MappedFile file(path);
  const auto bytes = internal::open_bytes(file);
  CsvReader row(path, *bytes, options.separator);
  if (!row.next()) {
    throw DataFileError(path, options.header.value_or(true)
                                  ? "has no line with the names of its columns"
                                  : "has no row whose columns could be "
                                    "counted");
  }
  const bool has_names = options.header.value_or(true);
  const CsvTable table(row, options);
  CsvSelection target(table, options.target, options.target_dtype);
  std::vector<CsvColumn> columns = options.columns;
  for (size_t i = 0; options.columns.empty() && i < table.size(); ++i) {
    if (std::find(target.places.begin(), target.places.end(), i) ==
        target.places.end()) {
      columns.emplace_back(i);
    }
  }
  CsvSelection data(table, columns, options.dtype);
  const auto by_name = [](const std::vector<CsvColumn>& chosen) {
    return std::ranges::any_of(
        chosen, [](const CsvColumn& one) { return one.name() != nullptr; });
  };
  // A name that was found says that the line has names.
  if (!options.header && !by_name(columns) && !by_name(options.target)) {
    std::vector<size_t> places = data.places;
    places.insert(places.end(), target.places.begin(), target.places.end());
    require_names(row, places, options);
  }

  const uint64_t first_line = row.line();
  int64_t rows = 0;
  for (bool more = has_names ? row.next() : true; more; more = row.next()) {
    if (row.size() != table.size()) {
      throw DataFileError(path, "line " + std::to_string(row.line()) + " has " +
                                    std::to_string(row.size()) +
                                    " fields, but line " +
                                    std::to_string(first_line) + " has " +
                                    std::to_string(table.size()) +
                                    "; all rows must have the same number");
    }
    data.add_row(row, table, options);
    target.add_row(row, table, options);
    ++rows;
  }

  CsvContent content;
  if (has_names) {
    for (const size_t place : data.places) {
      content.columns.push_back(table.names()[place]);
    }
  }
  content.data =
      data.values->tensor(rows, static_cast<int64_t>(data.places.size()));
  content.target =
      target.values->tensor(rows, static_cast<int64_t>(target.places.size()));
  if (target.places.size() == 1) content.target = content.target.select(1, 0);
  return content;
}

}  // namespace

// The columns and the tensors come from one reading of the file.
CsvDataset::CsvDataset(const std::string& path, const CsvOptions& options)
    : rows_([&] {
        CsvContent content = read_csv(path, options);
        columns_ = std::move(content.columns);
        return TensorDataset(std::move(content.data),
                             std::move(content.target));
      }()) {}

}  // namespace lockstep
