#include "lockstep/observe/log_names.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {

std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump();
}

void require_utf8(std::string_view what, const std::string& text) {
  try {
    (void)json_string(text);
  } catch (const nlohmann::json::exception&) {
    throw std::invalid_argument(std::string(what) +
                                " is not UTF-8; give a text in UTF-8");
  }
}

void require_name(std::string_view what, const std::string& name) {
  if (name.empty()) {
    throw std::invalid_argument(std::string(what) +
                                " is empty; give a name, such as "
                                "\"train/loss\"");
  }
  require_utf8(what, name);
  if (std::any_of(name.begin(), name.end(), [](char each) {
        return static_cast<unsigned char>(each) < 0x20 || each == 0x7f;
      })) {
    throw std::invalid_argument(
        std::string(what) + " " + json_string(name) +
        " has a control character; a name is one line of text");
  }
}

void require_inside(std::string_view what, const std::string& name) {
  const std::filesystem::path path(name);
  if (std::find(path.begin(), path.end(), "..") == path.end()) return;
  throw std::invalid_argument(std::string(what) + " \"" + name +
                              "\" names a folder outside of the log's; give a "
                              "name without \"..\"");
}

int log_rank() {
  if (is_initialized()) return get_rank();
  return static_cast<int>(
      get_rank_env_int("RANK", 0, std::numeric_limits<int>::max()).value_or(0));
}

int log_world_size() {
  if (is_initialized()) return get_world_size();
  return static_cast<int>(
      get_rank_env_int("WORLD_SIZE", 1, std::numeric_limits<int>::max())
          .value_or(1));
}

}  // namespace lockstep::internal
