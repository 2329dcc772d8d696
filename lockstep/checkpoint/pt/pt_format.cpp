#include "lockstep/checkpoint/pt/pt_format.h"

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "lockstep/checkpoint/pt/pickle_reader.h"
#include "lockstep/checkpoint/pt/pickle_writer.h"
#include "lockstep/checkpoint/pt/pt_tree.h"
#include "lockstep/checkpoint/pt/zip_reader.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

constexpr const char* kNameASnapshot =
    "name a file that torch.save or Lockstep wrote";
// For a file of torch.save that holds something else.
constexpr const char* kSaveAStateDict =
    "name one of its state_dicts (load_model() has the option key), or in "
    "Python save one: torch.save(model.state_dict(), path)";

// Lists storages in the order of their first use; tensors with the same memory
// (tied weights) share one storage, as in torch.save.
class StorageTable {
 public:
  std::string name(const at::Tensor& tensor) {
    const Identity identity{tensor.data_ptr(), tensor.numel(),
                            tensor.scalar_type()};
    if (tensor.numel() > 0) {
      const auto found = known_.find(identity);
      if (found != known_.end()) return std::to_string(found->second);
      known_.emplace(identity, tensors_.size());
    }
    tensors_.push_back(tensor);
    return std::to_string(tensors_.size() - 1);
  }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  using Identity = std::tuple<const void*, int64_t, at::ScalarType>;
  std::map<Identity, size_t> known_;
  std::vector<at::Tensor> tensors_;
};

// Returns the folder in the archive ("archive/") that holds data.pkl.
std::string folder_of(const InputFile& file, const ZipReader& zip) {
  std::string folder;
  for (const ZipReader::Entry& entry : zip.entries()) {
    const size_t slash = entry.name.find('/');
    const std::string rest =
        slash == std::string::npos ? "" : entry.name.substr(slash + 1);
    if (rest == "constants.pkl") {
      throw SnapshotError(file.path(),
                          "is a TorchScript archive (from torch::save or "
                          "torch.jit.save), not a snapshot",
                          kNameASnapshot);
    }
    if (rest == "data.pkl" && folder.empty()) {
      folder = entry.name.substr(0, slash + 1);
    }
  }
  if (folder.empty()) {
    throw SnapshotError(file.path(),
                        "is a zip file, but torch.save did not write it",
                        kNameASnapshot);
  }
  return folder;
}

// Reads a storage of `dtype`.
c10::Storage read_storage(const ZipReader& zip, const ZipReader::Entry& entry,
                          c10::ScalarType dtype) {
  const at::Tensor bytes =
      at::empty({static_cast<int64_t>(entry.size)}, at::kByte);
  zip.read(entry, bytes.data_ptr());
  if (!valid_values(bytes.data_ptr(), bytes.nbytes(), dtype)) {
    throw PickleError("entry \"" + entry.name +
                      "\" holds a bool that is neither 0 nor 1");
  }
  return bytes.storage();
}

// Returns take(tree, zip), where load(zip, entry, dtype) gives each storage;
// errors name the file.
template <class Take, class Load = decltype(read_storage)>
auto read_tree(const InputFile& file, Take take,
               const Load& load_storage = read_storage) {
  const ZipReader zip(file);
  const std::string folder = folder_of(file, zip);
  if (const auto* order = zip.find(folder + "byteorder")) {
    if (order->size > 16 || zip.read_text(*order) != "little") {
      throw SnapshotError(file.path(), "was written by a big-endian machine",
                          "save it again on a little-endian one");
    }
  }
  const ZipReader::Entry& entry = *zip.find(folder + "data.pkl");
  if (entry.size > kMostPickleBytes) {
    throw SnapshotError(file.path(), "has a data.pkl of " +
                                         std::to_string(entry.size) +
                                         " bytes, more than names need");
  }
  const std::string pickle = zip.read_text(entry);
  const auto load = [&](const std::string& key, c10::ScalarType dtype,
                        uint64_t size) {
    const auto* data = zip.find(folder + "data/" + key);
    if (!data) throw PickleError("storage " + key + " is missing");
    if (data->size != size) {
      throw PickleError("storage " + key + " has " +
                        std::to_string(data->size) + " bytes instead of " +
                        std::to_string(size));
    }
    return load_storage(zip, *data, dtype);
  };
  try {
    return take(read_pickle(pickle, load), zip);
  } catch (const PickleError& error) {
    throw SnapshotError(file.path(),
                        std::string("cannot be used: ") + error.what(),
                        kSaveAStateDict);
  }
}

}  // namespace

bool is_pt(const InputFile& file) {
  std::array<unsigned char, 24> head{};
  const size_t size = std::min<uint64_t>(head.size(), file.size());
  file.read_at(0, head.data(), size);
  const auto begins = [&](const char* magic, size_t length) {
    return size >= length && std::memcmp(head.data(), magic, length) == 0;
  };
  if (begins("PK\3\4", 4)) return true;
  // A lone pickled long, the magic number of torch.save before 1.6, after the
  // protocol and perhaps the length of a frame.
  const std::string_view text(reinterpret_cast<const char*>(head.data()), size);
  if (text.find("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20") != text.npos) {
    throw SnapshotError(file.path(),
                        "is in the format of torch.save before version 1.6",
                        "load it in Python and save it again");
  }
  if (size > 8 && head[8] == '{') return false;
  if (size == 0) throw SnapshotError(file.path(), "is empty");
  if (size < 9) {
    throw SnapshotError(file.path(),
                        "has " + std::to_string(size) +
                            " bytes, too few for a snapshot: it was cut short");
  }
  throw SnapshotError(file.path(),
                      "is neither a file of torch.save nor a safetensors file",
                      "name the file that holds the snapshot");
}

void write_pt(AtomicFile& file, const PickleValue& tree) {
  StorageTable storages;
  const std::string pickle = write_pickle(
      tree, [&](const at::Tensor& tensor) { return storages.name(tensor); });
  if (pickle.size() > kMostPickleBytes) {
    throw std::invalid_argument(
        "a .pt file cannot hold " + std::to_string(pickle.size()) +
        " bytes of names, numbers and text, at most " +
        std::to_string(kMostPickleBytes) +
        " are read; store large text in a file of its own, and its name in the "
        "snapshot");
  }
  // LibTorch's writer throws from its destructor after a failed write. So it is
  // told that every write succeeded, and the failure is thrown at the end.
  std::exception_ptr failure;
  {
    caffe2::serialize::PyTorchStreamWriter writer(
        [&](const void* data, size_t size) {
          try {
            if (!failure) file.write(data, size);
          } catch (...) {
            failure = std::current_exception();
          }
          return size;
        });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("byteorder", "little", 6);
    const auto& tensors = storages.tensors();
    for (size_t i = 0; i < tensors.size() && !failure; ++i) {
      writer.writeRecord("data/" + std::to_string(i), tensors[i].data_ptr(),
                         tensors[i].nbytes());
    }
    writer.writeEndOfFile();
  }
  if (failure) std::rethrow_exception(failure);
}

Snapshot read_pt(const InputFile& file) {
  return read_tree(file, [](const PickleValue& tree, const ZipReader& zip) {
    Snapshot snapshot = snapshot_of(tree);
    // The digest is made from names and checksums, which stand for the content.
    Digest digest;
    for (const ZipReader::Entry& item : zip.entries()) {
      digest.add(item.name);
      digest.add(item.size);
      digest.add(uint64_t{item.crc32});
    }
    snapshot.digest = digest.value();
    return snapshot;
  });
}

Snapshot read_pt_outline(const InputFile& file, const FoundStorage& found) {
  return read_tree(
      file,
      [](const PickleValue& tree, const ZipReader&) {
        return snapshot_of(tree);
      },
      [&](const ZipReader&, const ZipReader::Entry& entry,
          c10::ScalarType dtype) {
        const auto storage =
            at::empty({static_cast<int64_t>(entry.size)},
                      at::TensorOptions().dtype(at::kByte).device(at::kMeta))
                .storage();
        found(storage, entry, dtype);
        return storage;
      });
}

NamedTensors read_pt_entry(const InputFile& file, const std::string& key) {
  return read_tree(file, [&](const PickleValue& tree, const ZipReader&) {
    return key.empty() ? model_of(tree) : entry_of(tree, key);
  });
}

}  // namespace lockstep::internal
