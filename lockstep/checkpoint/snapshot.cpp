#include "lockstep/checkpoint/snapshot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/input_file.h"
#include "lockstep/checkpoint/pt_format.h"
#include "lockstep/checkpoint/safetensors_format.h"

namespace lockstep {

void write_snapshot(const std::string& path, const Snapshot& snapshot) {
  AtomicFile file(path);
  if (std::filesystem::path(path).extension() == ".pt") {
    write_pt(file, snapshot);
  } else {
    write_safetensors(file, snapshot);
  }
  file.commit();
}

Snapshot read_snapshot(const std::string& path) {
  const InputFile file(path);
  // By content: a .pt that was renamed is still one.
  std::array<unsigned char, 9> head{};
  const size_t size = std::min<uint64_t>(head.size(), file.size());
  file.read_at(0, head.data(), size);
  const auto begins = [&](const char* magic, size_t length) {
    return size >= length && std::memcmp(head.data(), magic, length) == 0;
  };
  if (begins("PK\3\4", 4)) return read_pt(file);
  // A pickled long by itself: the magic number of torch.save before 1.6.
  if (begins("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", 8)) {
    throw SnapshotError(path, "is of torch.save before version 1.6",
                        "load it in Python and save it again");
  }
  if (size == head.size() && head[8] == '{') return read_safetensors(file);
  if (size == 0) throw SnapshotError(path, "is empty");
  throw SnapshotError(path,
                      "is neither a file of torch.save nor one of safetensors",
                      "name the file that holds the snapshot");
}

}  // namespace lockstep
