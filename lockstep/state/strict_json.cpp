#include "lockstep/state/strict_json.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// Builds the value while the text is read. An object's own map tells whether it
// has a key already.
class StrictReader final : public nlohmann::json_sax<Json> {
 public:
  explicit StrictReader(int depth) : depth_(static_cast<size_t>(depth)) {}

  Json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(int64_t value) override { return add(value); }
  bool number_unsigned(uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string&) override {
    return add(value);
  }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override {
    return add(Json::binary(std::move(value)));
  }

  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    require_depth();
    auto& members = open_.back()->get_ref<Json::object_t&>();
    const auto [member, is_new] = members.emplace(std::move(name), nullptr);
    if (!is_new) {
      throw std::runtime_error("key " + Json(member->first).dump() +
                               " occurs twice");
    }
    member_ = &member->second;
    return true;
  }

  bool parse_error(size_t, const std::string&,
                   const Json::exception&) override {
    throw std::runtime_error("it is not valid JSON");
  }

 private:
  void require_depth() const {
    if (open_.size() > depth_) {
      throw std::runtime_error("it is nested too deeply");
    }
  }

  // Returns the place of a value: that of the last key, or the end of an array.
  Json* place(Json value) {
    require_depth();
    Json* to = &root_;
    if (!open_.empty()) {
      to = open_.back()->is_array() ? &open_.back()->emplace_back()
                                    : std::exchange(member_, nullptr);
    }
    *to = std::move(value);
    return to;
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const size_t depth_;
  Json root_;
  // The objects and arrays that are not closed. They do not move, since what
  // they lie in gets no further member before they are closed.
  std::vector<Json*> open_;
  Json* member_ = nullptr;  // of the innermost object, without a value yet
};

}  // namespace

Json parse_strict_json(std::string_view text, int depth) {
  StrictReader reader(depth);
  try {
    Json::sax_parse(text.begin(), text.end(), &reader);
  } catch (const Json::exception&) {  // a name that is not UTF-8, in an error
    throw std::runtime_error("it is not valid JSON");
  }
  return reader.take();
}

}  // namespace lockstep::internal
