#include "lockstep/launch/source_finder.h"

#include <stdexcept>

#include "lockstep/base/module.h"
#include "lockstep/base/native_stack.h"

namespace lockstep::internal {
namespace {

std::unique_ptr<SourceReader> open_reader() {
  try {
    return std::unique_ptr<SourceReader>(reinterpret_cast<OpenSourceReader>(
        load_module("sources.so", kOpenSourceReader))());
  } catch (const std::runtime_error&) {
    return nullptr;  // it was not installed, or there is no libdw
  }
}

}  // namespace

const Source& SourceFinder::look_up(const std::string& file, uint64_t place) {
  static const Source none;
  const auto known = known_.find({file, place});
  if (known != known_.end()) return known->second;
  if (deadline_.expired()) return none;
  if (!std::exchange(is_open_, true)) reader_ = open_reader();
  if (!reader_) return none;
  return known_[{file, place}] = reader_->read(file, place);
}

std::vector<std::string> SourceFinder::texts(
    const std::vector<std::string>& lines) {
  std::vector<std::string> all;
  for (const auto& line : lines) {
    const auto place = module_place(line);
    const Source source =
        place ? look_up(place->module, place->offset) : Source();
    all.push_back(frame_text(line, source.function) +
                  (source.line.empty() ? "" : " at " + source.line));
  }
  return all;
}

}  // namespace lockstep::internal
