#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/sharded/save_files.h"
#include "lockstep/checkpoint/training_state.h"

namespace lockstep::internal {

// A tensor that this rank writes.
struct TensorToWrite {
  std::string name;  // for errors
  // Write to it to let another tensor with the same values be written.
  at::Tensor* tensor;
  // A forward may change buffers; parameters and optimizer state change with a
  // step only.
  bool is_buffer;
};

// A tensor that another rank writes, and that is equal on this rank.
struct TensorToCompare {
  std::string name;  // for errors
  at::Tensor tensor;
  // Set it to block_checksums() (shard_file.h) of the tensor; write() does so
  // if it is empty.
  std::vector<uint64_t>* checksums;
};

// One save of all ranks, in three steps:
//
//   std::unique_ptr<Save> save =
//       begin_save(path, state, options, ranks, files);  // collective
//   save->write();                                       // alone
//   std::string path = save->commit(ranks);              // collective
//
// The first step finds out what is to be written, write() writes it, and
// commit() lets it take the place of the old snapshot, if all ranks have
// succeeded, and if what several of them have is equal. At every moment the old
// snapshot or the new one exists, whole.
//
// If anything fails on one rank, begin_save() or commit() throws on all ranks:
// on that rank its own error, on the others one that names the rank and quotes
// it: std::invalid_argument if that is what the rank has thrown, otherwise a
// SnapshotError. write() does not throw; commit() throws its error. The
// destructor removes what was written if commit() has not succeeded.
//
// The steps may run in different threads, but not at the same time.
class Save {
 public:
  Save() = default;
  virtual ~Save() = default;
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // Returns what write() will read on this rank. These tensors share the memory
  // of the model and the optimizer, which must not change until write() has
  // ended, unless all of them are replaced.
  virtual std::vector<TensorToWrite> tensors() = 0;

  // Returns what write() will read and not write. What is said of tensors()
  // holds for these, too, unless all of them have their checksums.
  virtual std::vector<TensorToCompare> tensors_to_compare() { return {}; }

  virtual void write() = 0;

  // Returns the path of what was written.
  virtual std::string commit(const Ranks& ranks) = 0;

  // Lets commit() throw this error on all ranks. write() must not be called any
  // more.
  void fail(std::exception_ptr failure) { failure_ = std::move(failure); }

 protected:
  std::exception_ptr failure_;
};

// Throws, on every rank, std::invalid_argument if a save would, as far as that
// is known before the first step. Collective.
void require_savable(const std::string& path, const TrainingState& state,
                     const SnapshotOptions& options, const Ranks& ranks);

// Begins to save into a folder of snapshots or into a file, which the first
// rank writes: the path decides (SnapshotForm). `files` must outlive the save.
std::unique_ptr<Save> begin_save(const std::string& path,
                                 const TrainingState& state,
                                 const SnapshotOptions& options,
                                 const Ranks& ranks, SaveFiles& files);

// The kind of snapshot that a path names, by the rule of every function:
// ".pt" and ".pth" are files of torch.save, ".safetensors" is itself; a path
// that ends in "/", has no extension or is an existing directory is a folder of
// snapshots. (A file that is only read may have any name: its content decides.)
enum class SnapshotForm { kPt, kSafetensors, kFolder };

// Throws std::invalid_argument for any other extension.
SnapshotForm form_of(const std::string& path);

// Whether it is kFolder. If the name alone does not say it, the first rank
// looks for all, and the call is collective. `only_read`: an existing file, of
// any name, is not a folder, and is not an error.
bool names_folder(const std::string& path, const Ranks& ranks,
                  bool only_read = false);

}  // namespace lockstep::internal
