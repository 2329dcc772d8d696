#include "lockstep/cli/inspect/flight_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// The writer puts less than this into a file (worker/flight_dump.cpp).
constexpr int64_t kMostBytes = int64_t{64} << 20;
constexpr size_t kMostText = 256;
constexpr int kMostRanks = 1 << 20;
constexpr int64_t kMost = INT64_MAX;

std::string system_words() { return std::generic_category().message(errno); }

std::string read_all(const std::string& path) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) {
    throw FlightFileError(path + ": " + system_words());
  }
  if (!S_ISREG(status.st_mode)) {
    throw FlightFileError(path + " is not a file; give the records themselves");
  }
  if (status.st_size > kMostBytes) {
    throw FlightFileError(path + " has " + std::to_string(status.st_size) +
                          " bytes; allowed are " + std::to_string(kMostBytes));
  }
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t used = 0;
  while (used < text.size()) {
    const ssize_t count =
        ::read(file.get(), text.data() + used, text.size() - used);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FlightFileError(path + ": " + system_words());
    if (count == 0) break;  // the file was cut meanwhile
    used += static_cast<size_t>(count);
  }
  text.resize(used);
  return text;
}

// A JSON object of the file, and its place there, for errors.
class Fields {
 public:
  Fields(const std::string& path, const json& object, std::string place)
      : path_(path), object_(object), place_(std::move(place)) {
    if (!object.is_object()) {
      throw FlightFileError(path_ + ": " +
                            (place_.empty() ? "the document" : place_) +
                            " is not an object");
    }
  }

  [[noreturn]] void refuse(const char* key, const std::string& allowed) const {
    const json* value = find(key);
    std::string given = "is missing";
    if (value != nullptr) {
      // Only the type of a nested value is named, as it may be nested without
      // end.
      given = "is " + (value->is_structured()
                           ? std::string(value->type_name())
                           : value->dump(-1, ' ', true,
                                         json::error_handler_t::replace));
    }
    if (given.size() > 80) given = given.substr(0, 77) + "...";
    throw FlightFileError(path_ + ": " + place_ + (place_.empty() ? "" : ".") +
                          key + " " + given + "; allowed is " + allowed);
  }

  int64_t number(const char* key, int64_t lowest, int64_t highest) const {
    const json* value = find(key);
    // A number above int64's would wrap.
    if (value == nullptr || !value->is_number_integer() ||
        (value->is_number_unsigned() &&
         value->get<uint64_t>() > static_cast<uint64_t>(highest)) ||
        value->get<int64_t>() < lowest || value->get<int64_t>() > highest) {
      refuse(key, "a whole number from " + std::to_string(lowest) + " to " +
                      std::to_string(highest));
    }
    return value->get<int64_t>();
  }
  // Returns `none` for null.
  int64_t number_or(const char* key, int64_t none, int64_t lowest,
                    int64_t highest) const {
    return is_null(key) ? none : number(key, lowest, highest);
  }
  std::string text(const char* key) const {
    const json* value = find(key);
    if (value == nullptr || !value->is_string()) refuse(key, "a text");
    const auto& given = value->get_ref<const std::string&>();
    const bool printable = std::ranges::all_of(
        given, [](char c) { return c >= 0x20 && c < 0x7f; });
    if (!printable || given.size() > kMostText) {
      refuse(key, "at most 256 printable ASCII characters");
    }
    return given;
  }
  std::string text_or_none(const char* key) const {
    return is_null(key) ? std::string() : text(key);
  }
  const json& list(const char* key) const {
    const json* value = find(key);
    if (value == nullptr || !value->is_array()) refuse(key, "a list");
    return *value;
  }
  std::string place_of(const char* key, size_t index) const {
    return place_ + (place_.empty() ? "" : ".") + key + "[" +
           std::to_string(index) + "]";
  }

 private:
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  bool is_null(const char* key) const {
    const json* value = find(key);
    return value != nullptr && value->is_null();
  }

  const std::string& path_;
  const json& object_;
  std::string place_;
};

FlightState state_from(const Fields& fields) {
  static const std::map<std::string, FlightState> states{
      {"scheduled", FlightState::scheduled},
      {"started", FlightState::started},
      {"completed", FlightState::completed},
      {"failed", FlightState::failed}};
  const auto found = states.find(fields.text("state"));
  if (found == states.end()) {
    fields.refuse("state", "scheduled, started, completed or failed");
  }
  return found->second;
}

FlightEntry entry_from(const Fields& fields, const FlightFile& file,
                       const FlightFileGroup& group) {
  FlightEntry entry;
  entry.id = static_cast<uint64_t>(fields.number("record_id", 1, kMost));
  entry.number = static_cast<uint64_t>(fields.number(
      "collective_seq_id", 0, static_cast<int64_t>(group.last_number)));
  entry.operation = fields.text("operation");
  entry.dtype = fields.text_or_none("dtype");
  entry.reduce_op = fields.text_or_none("reduce_op");
  entry.peer =
      static_cast<int>(fields.number_or("peer", -1, 0, file.world_size - 1));
  entry.in_elements =
      static_cast<uint64_t>(fields.number("in_elements", 0, kMost));
  entry.out_elements =
      static_cast<uint64_t>(fields.number("out_elements", 0, kMost));
  entry.state = state_from(fields);
  entry.created_ns = fields.number("time_created_ns", 0, kMost);
  entry.ended_ns = entry.ended() ? fields.number("time_ended_ns", 0, kMost) : 0;
  return entry;
}

FlightFileGroup group_from(const Fields& fields, const FlightFile& file) {
  FlightFileGroup group;
  group.name = fields.text("process_group");
  std::set<int> seen;
  for (const json& rank : fields.list("ranks")) {
    if (!rank.is_number_integer() || rank < 0 || rank >= file.world_size ||
        !seen.insert(rank.get<int>()).second) {
      fields.refuse("ranks",
                    "different ranks below " + std::to_string(file.world_size));
    }
    group.ranks.push_back(rank.get<int>());
  }
  if (!seen.contains(file.rank)) {
    fields.refuse("ranks", "a list with rank " + std::to_string(file.rank) +
                               ", whose record this is");
  }
  group.last_number =
      static_cast<uint64_t>(fields.number("last_collective_seq_id", 0, kMost));
  const json& entries = fields.list("entries");
  for (size_t i = 0; i < entries.size(); ++i) {
    const Fields one(file.path, entries[i], fields.place_of("entries", i));
    group.entries.push_back(entry_from(one, file, group));
    if (i > 0 && group.entries[i].id <= group.entries[i - 1].id) {
      one.refuse("record_id", "more than that of the entry before");
    }
  }
  return group;
}

}  // namespace

FlightFile read_flight_file(const std::string& path) {
  json document;
  try {
    document = json::parse(read_all(path));
  } catch (const json::parse_error& error) {
    throw FlightFileError(path + " is not JSON at byte " +
                          std::to_string(error.byte) +
                          "; give flight records, which are whole files");
  }
  const Fields fields(path, document, "");
  if (!document.contains("format") || document["format"] != "lockstep-flight") {
    throw FlightFileError(
        path +
        " is not a flight record of Lockstep: \"format\" must "
        "be \"lockstep-flight\"");
  }
  fields.number("version", 1, 1);
  FlightFile file;
  file.path = path;
  file.job = fields.text_or_none("job");
  file.host = fields.text("host");
  file.world_size =
      static_cast<int>(fields.number("world_size", 1, kMostRanks));
  file.rank = static_cast<int>(fields.number("rank", 0, file.world_size - 1));
  file.pid = static_cast<int>(fields.number("pid", 1, INT32_MAX));
  file.reason = fields.text("reason");
  file.time_ns = fields.number("time_ns", 0, kMost);
  const json& groups = fields.list("groups");
  for (size_t i = 0; i < groups.size(); ++i) {
    file.groups.push_back(group_from(
        Fields(path, groups[i], fields.place_of("groups", i)), file));
  }
  return file;
}

void require_one_job(const std::vector<FlightFile>& files) {
  std::map<int, const FlightFile*> by_rank;
  const FlightFile& first = files.front();
  const FlightFile* named = nullptr;  // the first file that names a job
  for (const auto& file : files) {
    if (file.world_size != first.world_size) {
      throw FlightFileError(file.path + " is of a world of size " +
                            std::to_string(file.world_size) + ", " +
                            first.path + " of a world of size " +
                            std::to_string(first.world_size) +
                            "; give the records of one job");
    }
    const auto [other, is_new] = by_rank.emplace(file.rank, &file);
    if (!is_new) {
      throw FlightFileError(file.path + " and " + other->second->path +
                            " are both of rank " + std::to_string(file.rank) +
                            "; give one record for each rank");
    }
    if (file.job.empty()) continue;
    if (named == nullptr) named = &file;
    if (file.job != named->job) {
      throw FlightFileError(file.path + " is of job " + file.job + ", " +
                            named->path + " of job " + named->job +
                            "; give the records of one job");
    }
  }
}

}  // namespace lockstep::internal
