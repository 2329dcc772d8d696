// A fuzzer of what pickles mean: Python's pickler writes random objects
// (pickle_peer.py), and the values here must be those of torch.load. Set
// LOCKSTEP_PICKLE_SEEDS to try more of them.

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/pt/pickle.h"
#include "lockstep/checkpoint/pt/zip_reader.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using namespace lockstep::internal::testing;

std::string hex(const void* data, size_t size) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string list_text(at::IntArrayRef values) {
  std::string text;
  for (const int64_t value : values) {
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  }
  return "[" + text + "]";
}

// Describes a value in the words of pickle_peer.py.
class Describer {
 public:
  std::string of(const PickleValue& value) {
    return std::visit(*this, value.value);
  }
  std::string operator()(std::monostate) { return "None"; }
  std::string operator()(bool value) { return value ? "True" : "False"; }
  std::string operator()(int64_t value) { return "i" + std::to_string(value); }
  std::string operator()(double value) {
    auto bits = std::bit_cast<std::array<char, 8>>(value);
    std::ranges::reverse(bits);
    return "f" + hex(bits.data(), bits.size());
  }
  std::string operator()(const std::string& value) {
    return "s" + hex(value.data(), value.size());
  }
  std::string operator()(const at::Tensor& tensor) {
    const auto flat = at::empty({tensor.numel()}, tensor.dtype());
    flat.copy_(tensor.reshape(-1));
    std::string number = "-";
    if (tensor.storage().nbytes() > 0) {
      number =
          std::to_string(storages_
                             .emplace(tensor.storage().unsafeGetStorageImpl(),
                                      storages_.size())
                             .first->second);
    }
    return std::string(c10::getDtypeNames(tensor.scalar_type()).first) + " " +
           list_text(tensor.sizes()) + " " + list_text(tensor.strides()) + " " +
           std::to_string(tensor.storage_offset()) + " " + number + " " +
           hex(flat.const_data_ptr(), flat.nbytes());
  }
  std::string operator()(const PickleValue::List& list) {
    return "[" + all(list) + "]";
  }
  std::string operator()(const PickleValue::Tuple& tuple) {
    return "(" + all(tuple.items) + ")";
  }
  std::string operator()(const PickleValue::Dict& dict) {
    std::string text;
    for (const PickleItem& item : dict.items) {
      text += (text.empty() ? "" : ",") + of(item.key) + ":";
      text += of(item.value);
    }
    return (dict.ordered ? "O{" : dict.counter ? "C{" : "{") + text + "}";
  }
  std::string operator()(const PickleValue::Opaque&) { return "opaque"; }

 private:
  std::string all(const PickleValue::List& list) {
    std::string text;
    for (size_t i = 0; i < list.size(); ++i) {
      text += (i == 0 ? "" : ",") + of(list[i]);
    }
    return text;
  }
  std::map<const void*, size_t> storages_;
};

// Returns what the file of torch.save holds.
PickleValue value_in(const std::string& path, const std::string& folder) {
  const InputFile file(path);
  const ZipReader zip(file);
  const auto load = [&](const std::string& key, c10::ScalarType,
                        uint64_t size) {
    const ZipReader::Entry* entry = zip.find(folder + "/data/" + key);
    if (!entry || entry->size != size) throw PickleError("no storage " + key);
    const auto bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
    zip.read(*entry, bytes.data_ptr());
    return bytes.storage();
  };
  return read_pickle(zip.read_text(*zip.find(folder + "/data.pkl")), load);
}

TEST(PickleMeaning, IsWhatTorchLoadMakesOfIt) {
  const char* const wanted = std::getenv("LOCKSTEP_PICKLE_SEEDS");
  const TemporaryFolder folder;
  const std::string command =
      std::string(LOCKSTEP_TORCH_PYTHON) + " " + LOCKSTEP_SOURCE_DIR +
      "/tests/checkpoint/pickle_peer.py " + folder.file("") + " 0 " +
      (wanted ? wanted : "300");
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  std::ifstream expected(folder.file("expected"));
  std::string line;
  size_t count = 0;
  for (; std::getline(expected, line) && !HasFailure(); ++count) {
    const size_t blank = line.find(' ');
    const std::string seed = line.substr(0, blank);
    SCOPED_TRACE("seed " + seed);
    try {
      const auto value = value_in(folder.file(seed + ".pt"), seed);
      EXPECT_EQ(Describer().of(value), line.substr(blank + 1));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what() << "\n" << line;
    }
  }
  EXPECT_GT(count, 200u);
}

}  // namespace
}  // namespace lockstep::internal
