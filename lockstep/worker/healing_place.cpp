#include "lockstep/worker/healing_place.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lockstep/base/descriptor_mark.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/number_list.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {

bool job_heals() { return get_env(kHealVariable) == "1"; }

int generation_joined() {
  return static_cast<int>(
      get_env_int(kGenerationVariable, 0, 1 << 30).value_or(0));
}

namespace {

constexpr const char* kLostPlace = "lost place";

int own_attempt() {
  return static_cast<int>(
      get_env_int("TORCHELASTIC_RESTART_COUNT", 0, 1 << 30).value_or(0));
}

void tell_agent(const std::string& words) {
  const auto mark = get_env(kStandbySocketVariable);
  const auto socket = mark ? marked_descriptor(*mark, S_IFSOCK) : std::nullopt;
  if (!socket) return;
  ::fcntl(*socket, F_SETFD, FD_CLOEXEC);
  ::send(*socket, words.data(), words.size(), MSG_NOSIGNAL);
}

}  // namespace

std::string generation_key(int generation) {
  return generation_key(own_attempt(), generation);
}

std::string generation_key(int attempt, int generation) {
  return "heal/" + std::to_string(attempt) + "/generation/" +
         std::to_string(generation);
}

std::string text_of(const GenerationNotice& notice) {
  std::string text = notice.cause;
  if (!notice.places.empty()) {
    text += "\n" + name_numbers("place", notice.places);
  }
  if (!notice.lost.empty()) {
    text += "\n" + name_numbers(kLostPlace, notice.lost);
  }
  return text;
}

GenerationNotice generation_notice_of(const std::string& text) {
  GenerationNotice notice;
  std::istringstream lines(text);
  std::getline(lines, notice.cause);
  for (std::string line; std::getline(lines, line);) {
    std::string_view numbers = line;
    numbers.remove_prefix(
        std::min(numbers.find_first_of("0123456789"), numbers.size()));
    (line.starts_with(kLostPlace) ? notice.lost : notice.places) =
        read_numbers(numbers);
  }
  return notice;
}

std::string training_ended_key() { return training_ended_key(own_attempt()); }

std::string training_ended_key(int attempt) {
  return "heal/" + std::to_string(attempt) + "/ended";
}

FileDescriptor take_place_memory() {
  const auto mark = get_env(kPlaceMemoryVariable);
  const auto inherited =
      mark ? marked_descriptor(*mark, S_IFREG) : std::nullopt;
  if (!inherited) {
    throw std::runtime_error(
        "this process did not inherit the memory of its place, by which a job "
        "heals (LOCKSTEP_PLACE_MEMORY); a process that a worker started has no "
        "place. Unset LOCKSTEP_HEAL in its environment");
  }
  FileDescriptor memory(*inherited);
  ::fcntl(memory.get(), F_SETFD, FD_CLOEXEC);
  return memory;
}

void tell_agent_heals(bool heals, const std::string& why_whole) {
  tell_agent(!heals              ? kStandbyHealsNoMore
             : why_whole.empty() ? kStandbyHeals
                                 : kStandbyHealsWhole + why_whole);
}

void tell_agent_generation(int generation, int rank, int world_size) {
  tell_agent(kStandbyGeneration + std::to_string(generation) + ": rank " +
             std::to_string(rank) + " of " + std::to_string(world_size));
}

}  // namespace lockstep::internal
