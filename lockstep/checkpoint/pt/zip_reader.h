#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/disk_file.h"

namespace lockstep::internal {

// The entries of a zip archive of the kind that torch.save writes: stored (not
// compressed), ZIP64 if needed, no encryption, one disk. It follows PKWARE's
// APPNOTE.TXT 6.3.10, sections 4.3 to 4.5.
//
// LibTorch's own reader (PyTorchStreamReader) is built without the check of
// CRC-32 and trusts the sizes that the file claims. This reader trusts nothing:
// every extent lies in the file and overlaps no other, so all entries together
// are no larger than the file, and read() compares the checksum.
class ZipReader {
 public:
  struct Entry {
    std::string name;
    uint64_t header = 0;  // offset of the local header
    uint64_t data = 0;    // offset of the content
    uint64_t size = 0;
    uint32_t crc32 = 0;
  };

  // Reads the directory. Throws SnapshotError that says what is wrong. `file`
  // must outlive this object.
  explicit ZipReader(const InputFile& file);

  // Returns nullptr if no entry has that name.
  const Entry* find(const std::string& name) const;
  const std::vector<Entry>& entries() const { return entries_; }

  // Reads the content into `to` (entry.size bytes). Throws SnapshotError that
  // names the entry if the content does not match its checksum.
  void read(const Entry& entry, void* to) const;
  std::string read_text(const Entry& entry) const;

 private:
  struct Directory {
    uint64_t offset = 0;
    uint64_t size = 0;
    uint64_t count = 0;
  };
  [[noreturn]] void refuse(const std::string& why) const;
  Directory find_directory() const;
  Entry parse_entry(const std::string& directory, size_t& at) const;
  void locate_content(uint64_t directory_offset);

  const InputFile& file_;
  std::vector<Entry> entries_;  // by offset
  std::map<std::string, size_t> by_name_;
};

}  // namespace lockstep::internal
