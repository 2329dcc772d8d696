#include "lockstep/launch/source_finder.h"

#include <elf.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <system_error>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/native_stack.h"

namespace lockstep::internal {
namespace {

// Frames of one call; a stack has at most NativeStack::kMost.
constexpr size_t kMostPlaces = 4096;
constexpr size_t kMostOutput = 4 << 20;
constexpr size_t kMostSections = 4096;
constexpr size_t kMostNames = 1 << 20;

template <typename Value>
bool read_at(std::ifstream& file, uint64_t offset, Value* values,
             size_t count) {
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(values),
            static_cast<std::streamsize>(count * sizeof(Value)));
  return static_cast<bool>(file);
}

// Returns what the program writes to stdout until the deadline, when it is
// killed; nothing if it cannot be started or fails.
std::optional<std::string> output_of(std::vector<std::string> words,
                                     const Deadline& deadline) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return std::nullopt;
  const FileDescriptor output(ends[0]);
  FileDescriptor input(ends[1]);
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, input.get(), STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null",
                                   O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null",
                                   O_WRONLY, 0);
  // The agent blocks the signals that it reads from a descriptor.
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t child = 0;
  const int error = posix_spawnp(&child, arguments.front(), &actions,
                                 &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return std::nullopt;
  input.reset();
  std::string text;
  bool whole = false;
  while (text.size() < kMostOutput) {
    pollfd entry{output.get(), POLLIN, 0};
    const int ready =
        poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
    if (ready == 0 && deadline.expired()) break;
    if (ready <= 0) continue;
    std::array<char, 4096> bytes;
    const ssize_t count = read(output.get(), bytes.data(), bytes.size());
    whole = count == 0;
    if (count <= 0) break;
    text.append(bytes.data(), static_cast<size_t>(count));
  }
  kill(child, SIGKILL);  // no effect if it has ended
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!whole) return std::nullopt;
  return text;
}

// addr2line writes "file.cpp:12 (discriminator 3)" and, for what it does not
// know, "??:0" or "??:?".
std::string place_text(std::string line) {
  const size_t note = line.find(" (discriminator");
  if (note != line.npos) line.resize(note);
  if (line.starts_with("??") || line.ends_with(":?") || line.ends_with(":0")) {
    return {};
  }
  return line;
}

}  // namespace

bool has_source_lines(const std::string& path) {
  // A rank names the path: at a pipe this would wait for ever.
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;
  std::ifstream file(path, std::ios::binary);
  Elf64_Ehdr header{};
  if (!read_at(file, 0, &header, 1) ||
      std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_shentsize != sizeof(Elf64_Shdr) ||
      header.e_shnum > kMostSections || header.e_shstrndx >= header.e_shnum) {
    return false;
  }
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  if (!read_at(file, header.e_shoff, sections.data(), sections.size())) {
    return false;
  }
  const auto& names_section = sections[header.e_shstrndx];
  if (names_section.sh_size > kMostNames) return false;
  std::string names(names_section.sh_size, '\0');
  if (!read_at(file, names_section.sh_offset, names.data(), names.size())) {
    return false;
  }
  for (const auto& section : sections) {
    if (section.sh_name >= names.size()) continue;
    const std::string_view name(names.c_str() + section.sh_name);
    if (name == ".debug_line" && section.sh_size > 0) return true;
  }
  return false;
}

void SourceFinder::look_up(const std::string& module,
                           const std::vector<uint64_t>& places) {
  for (const uint64_t place : places) known_[{module, place}] = {};
  if (deadline_.expired() || !has_source_lines(module)) return;
  std::vector<std::string> words{"addr2line", "-f", "-C", "-e", module};
  for (const uint64_t place : places) {
    std::ostringstream hexadecimal;
    hexadecimal << "0x" << std::hex << place;
    words.push_back(hexadecimal.str());
  }
  const auto output = output_of(std::move(words), deadline_);
  if (!output) return;
  std::istringstream stream(*output);
  std::string function;
  std::string line;
  for (const uint64_t place : places) {
    if (!std::getline(stream, function) || !std::getline(stream, line)) return;
    known_[{module, place}] = {function == "??" ? "" : function,
                               place_text(std::move(line))};
  }
}

std::vector<std::string> SourceFinder::texts(
    const std::vector<std::string>& lines) {
  std::map<std::string, std::set<uint64_t>> wanted;
  for (const auto& line : lines) {
    const auto place = module_place(line);
    if (place && known_.count({place->module, place->offset}) == 0 &&
        known_.size() < kMostPlaces) {
      wanted[place->module].insert(place->offset);
    }
  }
  for (const auto& [module, places] : wanted) {
    look_up(module, {places.begin(), places.end()});
  }
  std::vector<std::string> all;
  for (const auto& line : lines) {
    const auto place = module_place(line);
    if (!place) {
      all.push_back(line);
      continue;
    }
    const auto source = known_.find({place->module, place->offset});
    const bool known = source != known_.end() && !source->second.place.empty();
    all.push_back(frame_text(line, known ? source->second.function : "") +
                  (known ? " at " + source->second.place : ""));
  }
  return all;
}

}  // namespace lockstep::internal
