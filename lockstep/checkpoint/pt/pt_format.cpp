#include "lockstep/checkpoint/pt/pt_format.h"

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>

#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

using Dict = PickleValue::Dict;
using List = PickleValue::List;
using Tuple = PickleValue::Tuple;

struct ToPickle {
  template <class Scalar>
  PickleValue operator()(const Scalar& value) const {
    return PickleValue{value};
  }
  PickleValue operator()(const at::Tensor& tensor) const {
    return PickleValue{file_form(tensor)};
  }
  PickleValue operator()(const std::vector<double>& values) const {
    Tuple tuple;
    for (const double value : values) tuple.items.push_back({value});
    return PickleValue{std::move(tuple)};
  }
};

Dict dict_of(const std::map<std::string, StateValue>& values) {
  Dict dict;
  for (const auto& [name, value] : values) {
    dict.set(name, std::visit(ToPickle(), value));
  }
  return dict;
}

Dict dict_of(const OptimizerState& optimizer) {
  Dict state;
  for (const auto& [index, values] : optimizer.state) {
    state.items.push_back({{index}, {dict_of(values)}});
  }
  List groups;
  for (const OptimizerState::Group& group : optimizer.param_groups) {
    Dict dict = dict_of(group.options);
    List params;
    for (const int64_t index : group.params) params.push_back({index});
    dict.set("params", {std::move(params)});
    if (!group.param_names.empty()) {
      List names;
      for (const std::string& name : group.param_names) names.push_back({name});
      dict.set("param_names", {std::move(names)});
    }
    groups.push_back({std::move(dict)});
  }
  Dict dict;
  dict.set("state", {std::move(state)});
  dict.set("param_groups", {std::move(groups)});
  if (optimizer.averager_step) dict.set("step", {*optimizer.averager_step});
  return dict;
}

struct TreeToPickle {
  template <class Scalar>
  PickleValue operator()(const Scalar& value) const {
    return PickleValue{value};
  }
  PickleValue operator()(const StateTree::List& items) const {
    List list;
    for (const StateTree& item : items) {
      list.push_back(std::visit(*this, item.value));
    }
    return PickleValue{std::move(list)};
  }
  PickleValue operator()(const StateTree::Dict& items) const {
    Dict dict;
    for (const auto& [name, value] : items.items) {
      dict.set(name, std::visit(*this, value.value));
    }
    return PickleValue{std::move(dict)};
  }
  PickleValue operator()(const StateTree::Counter& counts) const {
    Dict dict;
    dict.counter = true;
    for (const auto& [key, count] : counts) {
      dict.items.push_back({{key}, {count}});
    }
    return PickleValue{std::move(dict)};
  }
};

template <class T>
const T& need(const PickleValue& value, const std::string& what,
              const char* type) {
  if (const T* found = value.as<T>()) return *found;
  throw PickleError(what + " is " + value.type() + ", not " + type);
}

template <class T>
const T& need(const Dict& dict, const std::string& key, const char* type) {
  const PickleValue* value = dict.find(key);
  if (!value) throw PickleError(key + " is missing");
  return need<T>(*value, key, type);
}

std::string name_of(const PickleItem& item) {
  const auto* name = item.key.as<std::string>();
  return name ? *name : "(" + item.key.type() + ")";
}

// Returns the items of a list or a tuple; nullptr for anything else.
const List* sequence(const PickleValue& value) {
  if (const auto* list = value.as<List>()) return list;
  const auto* tuple = value.as<Tuple>();
  return tuple ? &tuple->items : nullptr;
}

// Returns none for a value that no optimizer of LibTorch has (a string, a
// dict).
std::optional<StateValue> state_value(const PickleValue& value) {
  if (value.as<std::monostate>()) return std::monostate();
  if (const auto* flag = value.as<bool>()) return *flag;
  if (const auto* integer = value.as<int64_t>()) return *integer;
  if (const auto* number = value.as<double>()) return *number;
  if (const auto* tensor = value.as<at::Tensor>()) return *tensor;
  const List* items = sequence(value);
  if (!items) return std::nullopt;
  std::vector<double> numbers;
  for (const PickleValue& item : *items) {
    if (const auto* number = item.as<double>()) {
      numbers.push_back(*number);
    } else if (const auto* integer = item.as<int64_t>()) {
      numbers.push_back(static_cast<double>(*integer));
    } else {
      return std::nullopt;
    }
  }
  return numbers;
}

// `whose` begins what is put into `unreadable`, unless that is set, for the
// first value that cannot be held.
std::map<std::string, StateValue> values_of(const Dict& dict,
                                            const std::string& whose,
                                            std::string& unreadable) {
  std::map<std::string, StateValue> values;
  for (const PickleItem& item : dict.items) {
    const auto& name = need<std::string>(item.key, "a name", "a str");
    if (auto value = state_value(item.value)) {
      values.emplace(name, *value);
    } else if (unreadable.empty()) {
      unreadable =
          whose + name + " is " + item.value.type() + ", which is not read";
    }
  }
  return values;
}

// Returns whether it is a Counter, or a dict that has the keys of one.
bool is_counter(const Dict& dict) {
  return dict.counter ||
         (!dict.items.empty() && dict.items.front().key.as<int64_t>());
}

// Values that a scheduler of Lockstep does not have (a tensor of several
// elements) become None, and so do tensors without memory.
StateTree state_tree_of(const PickleValue& value) {
  if (const auto* flag = value.as<bool>()) return *flag;
  if (const auto* integer = value.as<int64_t>()) return *integer;
  if (const auto* number = value.as<double>()) return *number;
  if (const auto* text = value.as<std::string>()) return *text;
  if (const auto* tensor = value.as<at::Tensor>()) {
    // A learning rate may be a tensor in Python.
    if (tensor->numel() != 1 || tensor->is_complex() || tensor->is_meta()) {
      return {};
    }
    return tensor->item<double>();
  }
  if (const List* items = sequence(value)) {
    StateTree::List list;
    for (const PickleValue& item : *items) list.push_back(state_tree_of(item));
    return list;
  }
  const auto* dict = value.as<Dict>();
  if (!dict) return {};
  if (is_counter(*dict)) {
    StateTree::Counter counter;
    for (const PickleItem& item : dict->items) {
      counter[need<int64_t>(item.key, "a key of a Counter", "an int")] =
          need<int64_t>(item.value, "a count", "an int");
    }
    return counter;
  }
  StateTree::Dict tree;
  for (const PickleItem& item : dict->items) {
    tree.items.emplace_back(
        need<std::string>(item.key, "a key of a state", "a str"),
        state_tree_of(item.value));
  }
  return tree;
}

OptimizerState optimizer_of(const Dict& stored) {
  OptimizerState optimizer;
  for (const PickleItem& item : need<Dict>(stored, "state", "a dict").items) {
    const auto index = need<int64_t>(item.key, "a parameter's index", "an int");
    const auto& dict = need<Dict>(item.value, "a parameter's state", "a dict");
    optimizer.state.emplace(
        index, values_of(dict, "parameter " + std::to_string(index) + "'s ",
                         optimizer.unreadable));
  }
  for (const PickleValue& item : need<List>(stored, "param_groups", "a list")) {
    Dict group = need<Dict>(item, "a parameter group", "a dict");
    OptimizerState::Group read;
    for (const PickleValue& index : need<List>(group, "params", "a list")) {
      read.params.push_back(
          need<int64_t>(index, "a parameter's index", "an int"));
    }
    if (group.find("param_names")) {
      for (const auto& name : need<List>(group, "param_names", "a list")) {
        read.param_names.push_back(
            need<std::string>(name, "a parameter's name", "a str"));
      }
    }
    std::erase_if(group.items, [](const PickleItem& option) {
      // `name` is only what a program calls the group.
      const std::string name = name_of(option);
      return name == "params" || name == "param_names" || name == "name";
    });
    read.options =
        values_of(group,
                  "option of group " +
                      std::to_string(optimizer.param_groups.size()) + " ",
                  read.unreadable);
    optimizer.param_groups.push_back(std::move(read));
  }
  // Another class of Python's may have something else under this name.
  const PickleValue* step = stored.find("step");
  if (const auto* number = step ? step->as<int64_t>() : nullptr) {
    optimizer.averager_step = *number;
  }
  return optimizer;
}

// Whether a module's get_extra_state() has returned the value, which may be
// anything.
bool is_extra_state(const std::string& name) {
  constexpr std::string_view kSuffix = "_extra_state";
  return name == kSuffix || name.ends_with("." + std::string(kSuffix));
}

NamedTensors tensors_in_dict(const Dict& dict) {
  NamedTensors tensors;
  for (const PickleItem& item : dict.items) {
    const auto& name =
        need<std::string>(item.key, "a parameter's name", "a str");
    if (is_extra_state(name) && !item.value.as<at::Tensor>()) {
      tensors.emplace_back(name, at::Tensor());
      continue;
    }
    tensors.emplace_back(
        name, need<at::Tensor>(item.value, "parameter " + name, "a tensor"));
  }
  return tensors;
}

// Returns the first item that no state_dict has; nullptr if it is one.
const PickleItem* stranger_in(const Dict& dict) {
  const auto found = std::find_if(
      dict.items.begin(), dict.items.end(), [](const PickleItem& item) {
        const auto* name = item.key.as<std::string>();
        return !name ||
               (!item.value.as<at::Tensor>() && !is_extra_state(*name));
      });
  return found == dict.items.end() ? nullptr : &*found;
}

// Returns none if the value is not a dict of texts.
std::optional<std::map<std::string, std::string>> texts_of(
    const PickleValue* value) {
  const auto* dict = value ? value->as<Dict>() : nullptr;
  if (!dict) return std::nullopt;
  std::map<std::string, std::string> texts;
  for (const PickleItem& item : dict->items) {
    const auto* key = item.key.as<std::string>();
    const auto* text = item.value.as<std::string>();
    if (!key || !text) return std::nullopt;
    texts.emplace(*key, *text);
  }
  return texts;
}

std::string keys_of(const Dict& dict) {
  constexpr size_t kShown = 8;
  std::string keys;
  for (size_t i = 0; i < std::min(dict.items.size(), kShown); ++i) {
    keys += (keys.empty() ? "" : ", ") + name_of(dict.items[i]);
  }
  if (dict.items.size() > kShown) {
    keys += " and " + std::to_string(dict.items.size() - kShown) + " more";
  }
  return keys;
}

PickleValue tree_of(const NamedTensors& tensors, FileForms& forms) {
  Dict model;
  model.ordered = true;
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second) {
      throw std::invalid_argument("the model has two tensors named \"" + name +
                                  "\"; a snapshot needs one name for each");
    }
    model.set(name, {forms.of(tensor)});
  }
  return {std::move(model)};
}

}  // namespace

PickleValue tree_of(const NamedTensors& tensors) {
  FileForms forms;
  return tree_of(tensors, forms);
}

PickleValue tree_of(const Snapshot& snapshot) {
  Dict root;
  FileForms forms;
  root.set("MODEL_STATE", tree_of(snapshot.model_state, forms));
  const auto absent = still_absent(snapshot);
  if (!absent.contains("epochs_run")) {
    root.set("EPOCHS_RUN", {snapshot.epochs_run});
  }
  if (!absent.contains("step")) root.set("STEP", {snapshot.step});
  if (snapshot.optimizer_state) {
    root.set("OPTIMIZER_STATE", {dict_of(*snapshot.optimizer_state)});
  }
  if (snapshot.scheduler_state) {
    root.set("SCHEDULER_STATE",
             std::visit(TreeToPickle(), snapshot.scheduler_state->value));
  }
  Dict sampler;
  for (const auto& [name, value] : snapshot.sampler_state) {
    sampler.set(name, {value});
  }
  if (!absent.contains("sampler_state")) {
    root.set("SAMPLER_STATE", {std::move(sampler)});
  }
  List generators;
  for (const at::Tensor& state : snapshot.generator_states) {
    generators.push_back({file_form(state)});
  }
  root.set("GENERATOR_STATES", {std::move(generators)});
  Dict metadata;
  for (const auto& [name, value] : snapshot.metadata) {
    metadata.set(name, {value});
  }
  if (!absent.contains("metadata")) {
    root.set("METADATA", {std::move(metadata)});
  }
  if (!snapshot.items.empty()) {
    Dict items;
    for (const auto& [name, item] : snapshot.items) {
      Dict state;
      state.set("values", std::visit(TreeToPickle(), item.values.value));
      state.set("tensors", tree_of(item.tensors, forms));
      items.set(name, {std::move(state)});
    }
    root.set("ITEMS", {std::move(items)});
  }
  return {std::move(root)};
}

NamedTensors model_of(const PickleValue& tree) {
  const auto& root = need<Dict>(tree, "what it holds", "a dict");
  // This test is first, because a parameter may be named MODEL_STATE.
  const PickleItem* stranger = stranger_in(root);
  if (!stranger) return tensors_in_dict(root);
  const PickleValue* model = root.find("MODEL_STATE");
  if (!model) {
    throw PickleError(
        "it has no MODEL_STATE and is not a state_dict, because its \"" +
        name_of(*stranger) + "\" is " + stranger->value.type() +
        "; its keys are " + keys_of(root));
  }
  return tensors_in_dict(need<Dict>(*model, "MODEL_STATE", "a dict"));
}

NamedTensors entry_of(const PickleValue& tree, const std::string& key) {
  const auto& root = need<Dict>(tree, "what it holds", "a dict");
  const PickleValue* entry = root.find(key);
  if (!entry) {
    throw std::invalid_argument("the file has no entry \"" + key +
                                "\"; its entries are " + keys_of(root));
  }
  const Dict* dict = entry->as<Dict>();
  const PickleItem* stranger = dict ? stranger_in(*dict) : nullptr;
  if (!dict || stranger) {
    throw std::invalid_argument(
        "the file's entry \"" + key +
        "\" is not a state_dict (a dict of tensors by name): " +
        (dict
             ? "its \"" + name_of(*stranger) + "\" is " + stranger->value.type()
             : "it is " + entry->type()) +
        "; the file's entries are " + keys_of(root));
  }
  return tensors_in_dict(*dict);
}

Snapshot snapshot_of(const PickleValue& tree) {
  const auto& root = need<Dict>(tree, "what it holds", "a dict");
  Snapshot snapshot;
  for (auto& [name, tensor] : model_of(tree)) {
    if (tensor.defined()) {
      snapshot.model_state.emplace_back(name, tensor);
    } else {
      snapshot.not_tensors.push_back(name);
    }
  }
  const bool is_model_alone = !stranger_in(root);
  // Returns nullptr for what the file lacks; a parameter may have such a name.
  const auto find = [&](const char* key) {
    return is_model_alone ? nullptr : root.find(key);
  };
  if (const auto* value = find("EPOCHS_RUN")) {
    snapshot.epochs_run = need<int64_t>(*value, "EPOCHS_RUN", "an int");
  } else {
    snapshot.absent.insert("epochs_run");
  }
  if (const auto* value = find("STEP")) {
    snapshot.step = need<int64_t>(*value, "STEP", "an int");
  } else {
    snapshot.absent.insert("step");
  }
  if (const auto* value = find("OPTIMIZER_STATE")) {
    OptimizerState& optimizer = snapshot.optimizer_state.emplace();
    try {
      optimizer = optimizer_of(need<Dict>(*value, "OPTIMIZER_STATE", "a dict"));
    } catch (const PickleError& error) {
      optimizer.unreadable = error.what();
    }
  }
  if (const auto* value = find("SCHEDULER_STATE")) {
    try {
      if (is_counter(need<Dict>(*value, "SCHEDULER_STATE", "a dict"))) {
        throw PickleError("SCHEDULER_STATE is not a dict by names");
      }
      snapshot.scheduler_state = state_tree_of(*value);
    } catch (const PickleError& error) {
      snapshot.scheduler_unreadable = error.what();
    }
  }
  if (const auto* value = find("SAMPLER_STATE")) {
    for (const auto& [key, item] :
         need<Dict>(*value, "SAMPLER_STATE", "a dict").items) {
      snapshot.sampler_state.emplace(
          need<std::string>(key, "a key of SAMPLER_STATE", "a str"),
          need<int64_t>(item, "a value of SAMPLER_STATE", "an int"));
    }
  } else {
    snapshot.absent.insert("sampler_state");
  }
  if (const auto* value = find("GENERATOR_STATES")) {
    for (const PickleValue& item :
         need<List>(*value, "GENERATOR_STATES", "a list")) {
      snapshot.generator_states.push_back(
          need<at::Tensor>(item, "a generator's state", "a tensor"));
    }
  }
  if (const auto metadata = texts_of(find("METADATA"))) {
    snapshot.metadata = *metadata;
  } else {
    snapshot.absent.insert("metadata");
  }
  if (const auto* value = find("ITEMS")) {
    for (const auto& [key, item] :
         need<Dict>(*value, "ITEMS", "a dict").items) {
      const auto& state = need<Dict>(item, "an item", "a dict");
      ItemState& read =
          snapshot
              .items[need<std::string>(key, "the name of an item", "a str")];
      if (const auto* values = state.find("values")) {
        read.values = state_tree_of(*values);
      }
      read.tensors = tensors_in_dict(need<Dict>(state, "tensors", "a dict"));
      for (const auto& [name, tensor] : read.tensors) {
        if (!tensor.defined()) throw PickleError(name + " is not a tensor");
      }
    }
  }
  return snapshot;
}

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
