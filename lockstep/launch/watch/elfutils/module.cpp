// The module that reads symbols and debug information, by libdw of elfutils.
#include <dwarf.h>
#include <elfutils/libdw.h>
#include <elfutils/libdwfl.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/watch/source_finder.h"

namespace lockstep::internal {
namespace {

std::string line_text(const char* file, int line) {
  if (file == nullptr || line <= 0) return {};
  return std::string(file) + ":" + std::to_string(line);
}

// Returns the part of the debug information (of a source, mostly) that has the
// address, and sets `bias` to what its addresses differ by. GCC writes a table
// of addresses, Clang does not.
Dwarf_Die* unit_of(Dwfl_Module* module, Dwarf_Addr address, Dwarf_Addr& bias) {
  if (auto* unit = dwfl_module_addrdie(module, address, &bias)) return unit;
  Dwarf_Die* unit = nullptr;
  while ((unit = dwfl_module_nextcu(module, unit, &bias)) != nullptr) {
    if (dwarf_haspc(unit, address - bias) == 1) return unit;
  }
  return nullptr;
}

// Returns " inlined at train.cpp:12" for each call around `address` that the
// compiler has replaced by the function's body.
std::string inlined_at(Dwarf_Die* unit, Dwarf_Addr address) {
  Dwarf_Die* scopes = nullptr;
  const int count = dwarf_getscopes(unit, address, &scopes);
  const std::unique_ptr<Dwarf_Die, decltype(&std::free)> owned(scopes,
                                                               &std::free);
  Dwarf_Files* files = nullptr;
  std::string text;
  if (count <= 0 || dwarf_getsrcfiles(unit, &files, nullptr) != 0) return text;
  for (Dwarf_Die* scope = scopes; scope < scopes + count; ++scope) {
    if (dwarf_tag(scope) == DW_TAG_subprogram) break;
    Dwarf_Attribute attribute;
    Dwarf_Word file = 0;
    Dwarf_Word line = 0;
    if (dwarf_tag(scope) != DW_TAG_inlined_subroutine ||
        dwarf_formudata(dwarf_attr(scope, DW_AT_call_file, &attribute),
                        &file) != 0 ||
        dwarf_formudata(dwarf_attr(scope, DW_AT_call_line, &attribute),
                        &line) != 0) {
      continue;
    }
    const auto place = line_text(dwarf_filesrc(files, file, nullptr, nullptr),
                                 static_cast<int>(line));
    if (!place.empty()) text += " inlined at " + place;
  }
  return text;
}

class ElfutilsReader final : public SourceReader {
 public:
  Source read(const std::string& file, uint64_t place) override {
    Source source;
    Dwfl_Module* const module = opened(file);
    Dwarf_Addr bias = 0;
    if (module == nullptr || dwfl_module_getelf(module, &bias) == nullptr) {
      return source;
    }
    const Dwarf_Addr address = place + bias;
    if (const char* name = dwfl_module_addrname(module, address)) {
      source.function = name;
    }
    Dwarf_Die* const unit = unit_of(module, address, bias);
    if (unit == nullptr) return source;
    if (auto* line = dwarf_getsrc_die(unit, address - bias)) {
      int number = 0;
      dwarf_lineno(line, &number);
      source.line = line_text(dwarf_linesrc(line, nullptr, nullptr), number);
    }
    if (!source.line.empty()) source.line += inlined_at(unit, address - bias);
    return source;
  }

 private:
  Dwfl_Module* opened(const std::string& path) {
    const auto [place, is_new] = opened_.try_emplace(path, nullptr);
    FileDescriptor file(
        is_new ? ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC) : -1);
    struct stat facts {};
    if (session_ && file && ::fstat(file.get(), &facts) == 0 &&
        S_ISREG(facts.st_mode)) {
      dwfl_report_begin_add(session_.get());
      place->second = dwfl_report_offline(session_.get(), path.c_str(),
                                          path.c_str(), file.get());
      if (place->second != nullptr) file.release();  // the session closes it
      dwfl_report_end(session_.get(), nullptr, nullptr);
    }
    return place->second;
  }

  // With these servers named, libdw would ask them for files that this host
  // does not have, and wait.
  const Dwfl_Callbacks callbacks_{
      .find_elf = dwfl_build_id_find_elf,
      .find_debuginfo = get_env("DEBUGINFOD_URLS")
                            ? dwfl_build_id_find_debuginfo
                            : dwfl_standard_find_debuginfo,
      .section_address = dwfl_offline_section_address,
      .debuginfo_path = nullptr};
  const std::unique_ptr<Dwfl, decltype(&dwfl_end)> session_{
      dwfl_begin(&callbacks_), &dwfl_end};
  std::map<std::string, Dwfl_Module*> opened_;
};

}  // namespace
}  // namespace lockstep::internal

extern "C" lockstep::internal::SourceReader* lockstep_open_source_reader() {
  return std::make_unique<lockstep::internal::ElfutilsReader>().release();
}
