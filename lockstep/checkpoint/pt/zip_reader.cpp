#include "lockstep/checkpoint/pt/zip_reader.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "lockstep/checkpoint/snapshot_error.h"

namespace lockstep::internal {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kDirectoryEntry = 0x02014b50;
constexpr uint32_t kEndOfDirectory = 0x06054b50;
constexpr uint32_t kEndOfDirectory64 = 0x06064b50;
constexpr uint32_t kLocator64 = 0x07064b50;
constexpr size_t kEndSize = 22;
constexpr size_t kEnd64Size = 56;
constexpr size_t kLocatorSize = 20;
constexpr size_t kLocalSize = 30;
constexpr size_t kEntrySize = 46;
constexpr uint16_t kExtra64 = 1;
// Enough for a million tensors, each with a name and two extra fields.
constexpr uint64_t kMostDirectoryBytes = uint64_t{256} << 20;

template <class T>
T little_endian(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

void ZipReader::refuse(const std::string& why) const {
  throw SnapshotError(file_.path(), "is damaged: " + why);
}

ZipReader::ZipReader(const InputFile& file) : file_(file) {
  const Directory where = find_directory();
  const std::string directory =
      file_.read_text(where.offset, static_cast<size_t>(where.size));
  size_t at = 0;
  for (uint64_t i = 0; i < where.count; ++i) {
    entries_.push_back(parse_entry(directory, at));
  }
  if (at != directory.size()) {
    refuse("its directory has bytes that belong to no entry");
  }
  locate_content(where.offset);
}

ZipReader::Directory ZipReader::find_directory() const {
  const uint64_t size = file_.size();
  const auto tail_size =
      static_cast<size_t>(std::min<uint64_t>(size, kEndSize + 0xffff));
  const std::string tail = file_.read_text(size - tail_size, tail_size);
  // Searches from the back for the end record whose comment reaches the end of
  // the file.
  size_t end = std::string::npos;
  for (size_t at = tail_size < kEndSize ? 0 : tail_size - kEndSize + 1;
       at-- > 0;) {
    if (little_endian<uint32_t>(tail, at) == kEndOfDirectory &&
        at + kEndSize + little_endian<uint16_t>(tail, at + 20) == tail_size) {
      end = at;
      break;
    }
  }
  if (end == std::string::npos) {
    refuse("the directory at its end is missing, so it was cut short");
  }
  const uint64_t end_offset = size - tail_size + end;
  Directory found{little_endian<uint32_t>(tail, end + 16),
                  little_endian<uint32_t>(tail, end + 12),
                  little_endian<uint16_t>(tail, end + 10)};
  uint64_t limit = end_offset;
  if (end_offset >= kLocatorSize) {
    const std::string locator =
        file_.read_text(end_offset - kLocatorSize, kLocatorSize);
    if (little_endian<uint32_t>(locator, 0) == kLocator64) {
      const auto offset = little_endian<uint64_t>(locator, 8);
      if (end_offset < kLocatorSize + kEnd64Size ||
          offset > end_offset - kLocatorSize - kEnd64Size) {
        refuse("its ZIP64 record lies outside the file");
      }
      const std::string end64 = file_.read_text(offset, kEnd64Size);
      if (little_endian<uint32_t>(end64, 0) != kEndOfDirectory64) {
        refuse("its ZIP64 record is not where it should be");
      }
      found = {little_endian<uint64_t>(end64, 48),
               little_endian<uint64_t>(end64, 40),
               little_endian<uint64_t>(end64, 32)};
      limit = offset;
    }
  }
  if (found.offset > limit || found.size > limit - found.offset) {
    refuse("its directory lies outside the file");
  }
  if (found.size > kMostDirectoryBytes ||
      found.count > found.size / kEntrySize) {
    refuse("its directory claims " + std::to_string(found.count) +
           " entries in " + std::to_string(found.size) + " bytes");
  }
  return found;
}

ZipReader::Entry ZipReader::parse_entry(const std::string& directory,
                                        size_t& at) const {
  if (directory.size() - at < kEntrySize ||
      little_endian<uint32_t>(directory, at) != kDirectoryEntry) {
    refuse("its directory is not that of a zip file");
  }
  const auto flags = little_endian<uint16_t>(directory, at + 8);
  const auto method = little_endian<uint16_t>(directory, at + 10);
  const size_t name_size = little_endian<uint16_t>(directory, at + 28);
  const size_t extra_size = little_endian<uint16_t>(directory, at + 30);
  const size_t comment_size = little_endian<uint16_t>(directory, at + 32);
  Entry entry;
  entry.crc32 = little_endian<uint32_t>(directory, at + 16);
  uint64_t packed = little_endian<uint32_t>(directory, at + 20);
  entry.size = little_endian<uint32_t>(directory, at + 24);
  entry.header = little_endian<uint32_t>(directory, at + 42);
  at += kEntrySize;
  if (directory.size() - at < name_size + extra_size + comment_size) {
    refuse("an entry of its directory reaches beyond the directory");
  }
  entry.name = directory.substr(at, name_size);
  at += name_size;
  // A ZIP64 field holds those values that do not fit 32 bits, in this order;
  // the fields above are all ones for them (APPNOTE 4.5.3).
  const size_t extra_end = at + extra_size;
  while (extra_end - at >= 4) {
    const auto id = little_endian<uint16_t>(directory, at);
    const size_t length = little_endian<uint16_t>(directory, at + 2);
    at += 4;
    if (extra_end - at < length) refuse("an extra field is too long");
    size_t from = at;
    at += length;
    if (id != kExtra64) continue;
    for (uint64_t* value : {&entry.size, &packed, &entry.header}) {
      if (*value != 0xffffffff) continue;
      if (at - from < 8) refuse("a ZIP64 field is too short");
      *value = little_endian<uint64_t>(directory, from);
      from += 8;
    }
  }
  at = extra_end + comment_size;
  if (method != 0 || (flags & 1) != 0 || packed != entry.size) {
    throw SnapshotError(file_.path(),
                        "is not a file of torch.save: its entry \"" +
                            entry.name +
                            "\" is compressed, as in TorchScript archives of "
                            "torch.jit.save, or encrypted",
                        "name a snapshot, or save it again with torch.save");
  }
  return entry;
}

void ZipReader::locate_content(uint64_t directory_offset) {
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return a.header < b.header; });
  uint64_t free_from = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const std::string quoted = "entry \"" + entry.name + "\"";
    if (entry.header < free_from || entry.header > directory_offset ||
        directory_offset - entry.header < kLocalSize) {
      refuse(quoted + " overlaps another or lies outside the file");
    }
    const std::string local = file_.read_text(entry.header, kLocalSize);
    if (little_endian<uint32_t>(local, 0) != kLocalHeader) {
      refuse(quoted + " is not where the directory says");
    }
    const size_t name_size = little_endian<uint16_t>(local, 26);
    const size_t extra_size = little_endian<uint16_t>(local, 28);
    entry.data = entry.header + kLocalSize + name_size + extra_size;
    if (entry.data > directory_offset ||
        entry.size > directory_offset - entry.data) {
      refuse(quoted + " reaches beyond the file");
    }
    // Two readers must not see two files under one name.
    if (file_.read_text(entry.header + kLocalSize, name_size) != entry.name) {
      refuse(quoted + " has another name in its local header");
    }
    free_from = entry.data + entry.size;
    if (!by_name_.emplace(entry.name, i).second) {
      refuse(quoted + " occurs twice");
    }
  }
}

const ZipReader::Entry* ZipReader::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

void ZipReader::read(const Entry& entry, void* to) const {
  file_.read_at(entry.data, to, static_cast<size_t>(entry.size));
  const uint64_t sum = ::crc32_z(0, static_cast<const Bytef*>(to),
                                 static_cast<size_t>(entry.size));
  if (sum != entry.crc32) {
    const bool has_none =
        std::all_of(entries_.begin(), entries_.end(),
                    [](const Entry& each) { return each.crc32 == 0; });
    if (has_none) {
      throw SnapshotError(file_.path(), "was saved without checksums",
                          "save it again, without "
                          "torch.serialization.set_crc32_options(False)");
    }
    refuse("entry \"" + entry.name + "\" does not match its checksum");
  }
}

std::string ZipReader::read_text(const Entry& entry) const {
  std::string text(static_cast<size_t>(entry.size), '\0');
  read(entry, text.data());
  return text;
}

}  // namespace lockstep::internal
