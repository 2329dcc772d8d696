// Fault 38: snapshots of many tensors and many ranks. The work is counted, not
// timed; work that grew with the square of the number would not end.

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/training_state.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/checkpoint/sharded/written_folder.h"
#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;

constexpr size_t kRanks = 64;
constexpr size_t kTensors = 10'000;
constexpr size_t kDivided = 50;  // over all ranks

// The operations of this process on files.
struct FileWork {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t writes = 0;
};

FileWork file_work() {
  std::ifstream io("/proc/self/io");
  std::map<std::string, uint64_t> counts;
  std::string name;
  uint64_t count = 0;
  while (io >> name >> count) counts[name] = count;
  return {counts.at("rchar:"), counts.at("wchar:"), counts.at("syscw:")};
}

uint64_t bytes_read() { return file_work().bytes_read; }

class ManyTensors : public ::testing::Test {
 protected:
  // Each rank has whole tensors that no other has, and a part of some that all
  // have.
  static std::vector<TensorShard> shards_of(size_t rank) {
    std::vector<TensorShard> shards;
    for (size_t i = rank; i < kTensors - kDivided; i += kRanks) {
      shards.push_back({"w" + std::to_string(i),
                        {2},
                        Replicate{},
                        torch::full({2}, static_cast<double>(i))});
    }
    for (size_t i = 0; i < kDivided; ++i) {
      shards.push_back({"d" + std::to_string(i),
                        {static_cast<int64_t>(kRanks), 2},
                        Shard{chunk_box({static_cast<int64_t>(kRanks), 2}, 0,
                                        static_cast<int64_t>(rank), kRanks)},
                        torch::full({1, 2}, static_cast<double>(rank))});
    }
    return shards;
  }
  static void SetUpTestSuite() {
    std::vector<std::vector<TensorShard>> by_rank;
    for (size_t rank = 0; rank < kRanks; ++rank) {
      by_rank.push_back(shards_of(rank));
    }
    folder_ = std::make_unique<TemporaryFolder>();
    write_folder(path(), by_rank, {}, Parts::kListed);
    write_folder(path() + "-old", by_rank);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::string path() { return folder_->file("many"); }

  static uint64_t manifest_bytes() {
    return fs::file_size(path() + "/" + kManifestName);
  }

  static std::unique_ptr<TemporaryFolder> folder_;
};
std::unique_ptr<TemporaryFolder> ManyTensors::folder_;

TEST_F(ManyTensors, ARankReadsOnlyTheHeadersThatItNeeds) {
  constexpr size_t kRank = 7;
  const uint64_t before = bytes_read();
  const TensorFiles files =
      TensorFiles::open_folder(path(), TensorFiles::Headers::kWhenNeeded);
  EXPECT_EQ(files.tensors().size(), kTensors);
  TensorReader reader(files);
  std::vector<TensorShard> targets = shards_of(kRank);
  for (TensorShard& target : targets) {
    target.tensor = torch::zeros_like(target.tensor);
    reader.add(target);
  }
  reader.verify(true);
  reader.read();
  const uint64_t read = bytes_read() - before;
  // The manifest; the header twice, for its checksum; the tensors twice, to
  // verify them.
  const uint64_t needed = manifest_bytes() + 2 * files.file(kRank).size();
  EXPECT_LE(read, needed + 4096);
  const auto expected = shards_of(kRank);
  for (size_t i = 0; i < targets.size(); ++i) {
    ASSERT_TRUE(targets[i].tensor.equal(expected[i].tensor)) << i;
  }
}

TEST_F(ManyTensors, WhoNeedsAllReadsEachHeaderOnce) {
  uint64_t all = 0;
  for (const auto& entry : fs::directory_iterator(path())) {
    all += entry.file_size();
  }
  const uint64_t before = bytes_read();
  verify_snapshot(path());
  EXPECT_LE(bytes_read() - before, 2 * all);
  // A manifest that does not list the parts says the same.
  const TensorFiles files = TensorFiles::open_folder(path());
  const TensorFiles old = TensorFiles::open_folder(path() + "-old");
  ASSERT_EQ(files.tensors().size(), old.tensors().size());
  for (const auto& [name, tensor] : files.tensors()) {
    const auto& same = old.tensors().at(name);
    ASSERT_EQ(tensor.shape, same.shape) << name;
    ASSERT_EQ(tensor.parts.size(), same.parts.size()) << name;
    ASSERT_TRUE(read_tensor(files, name).equal(read_tensor(old, name))) << name;
  }
}

// Each file stayed open, and a snapshot of more ranks than a process may open
// files could not be loaded.
TEST_F(ManyTensors, MoreFilesThanMayBeOpenAreRead) {
  EXPECT_EQ(
      in_child([] {
        rlimit limit{};
        ::getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = kRanks;
        if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
        for (const char* name : {"", "-old"}) {
          const TensorFiles files = TensorFiles::open_folder(path() + name);
          for (const size_t number : {size_t{1}, kRanks - 1}) {
            const at::Tensor value =
                read_tensor(files, "w" + std::to_string(number));
            if (!value.eq(static_cast<double>(number)).all().item<bool>()) {
              return 2;
            }
          }
          verify_snapshot(path() + name);
        }
        return 0;
      }),
      0);
}

// A save writes each byte once, in few calls, and reads none.
TEST(ManyTensorsSaved, ASaveWritesEachByteOnce) {
  const TemporaryFolder temporary;
  const auto model = std::make_shared<torch::nn::Module>();
  for (size_t i = 0; i < kTensors; ++i) {
    model->register_parameter("w" + std::to_string(i), torch::zeros({2}));
  }
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const auto& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::ones({2});
  }
  optimizer.step();
  const TrainingState state{.model = model, .optimizer = &optimizer};
  for (const char* name : {"many/", "many.pt", "many.safetensors"}) {
    const std::string path = temporary.file(name);
    const FileWork before = file_work();
    const std::string written = save_snapshot(path, state);
    const FileWork after = file_work();
    uint64_t bytes = 0;
    if (fs::is_directory(written)) {
      for (const auto& entry : fs::directory_iterator(written)) {
        bytes += entry.file_size();
      }
    } else {
      bytes = fs::file_size(written);
    }
    EXPECT_GE(bytes, 2 * kTensors * 2 * sizeof(float)) << name;
    EXPECT_LE(after.bytes_written - before.bytes_written, bytes + 4096) << name;
    EXPECT_LE(after.bytes_read - before.bytes_read, 4096) << name;
    // A tensor of a .pt file is an entry of its own, with a header before it
    // and one in the directory.
    EXPECT_LE(after.writes - before.writes, 2 * kTensors * 8) << name;
    EXPECT_EQ(load_snapshot_file(written).model_state.size(), kTensors);
  }
}

// A manifest that lists other parts than the files have is damaged.
TEST_F(ManyTensors, PartsThatTheFilesDoNotHaveAreRefused) {
  const std::string name = path() + "/" + kManifestName;
  const std::string text = read_file(name);
  const auto error_with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    changed.resize(changed.rfind(",\n"));
    changed += ",\n \"xxh3\": \"" + hex_of(xxh3(changed)) + "\"\n}\n";
    write_file(name, changed);
    return message_of([&] { TensorFiles::open_folder(path()); });
  };
  EXPECT_EQ(error_with("\"w0\":[[0]]", "\"w0\":[[0]]"), "");
  EXPECT_THAT(error_with("\"w0\":[[0]]", "\"w0\":[[1]]"),
              HasSubstr("its tensors are not those that the manifest says"));
  EXPECT_THAT(error_with("\"w0\":[[0]]", "\"w0\":[[64]]"),
              HasSubstr("lies in no file or tensor"));
  EXPECT_THAT(error_with("\"w0\":[[0]]", "\"v0\":[[0]]"),
              HasSubstr("\"v0\", which is not a tensor of it"));
  EXPECT_THAT(error_with("\"w0\":[[0]]", "\"w0\":[]"),
              HasSubstr("tensor \"w0\" cannot be put together"));
  EXPECT_THAT(error_with("\"w0\":[[0]]", "\"w0\":[[0,[0],[1]]]"),
              HasSubstr("tensor \"w0\" "));
  EXPECT_THAT(error_with("\"d0\":[[0,[0,0],[1,2]]", "\"d0\":[[0,[-1,0],[1,2]]"),
              HasSubstr("lies in no file or tensor"));
  EXPECT_THAT(error_with("\"d0\":[[0,[0,0],[1,2]],[1,[1,0],[1,2]]",
                         "\"d0\":[[1,[0,0],[1,2]],[0,[1,0],[1,2]]"),
              HasSubstr("its tensors are not those that the manifest says"));
  write_file(name, text);
}

}  // namespace
}  // namespace lockstep::internal
