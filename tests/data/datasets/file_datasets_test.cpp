// CsvDataset, IdxDataset, MnistDataset, Cifar10Dataset, Cifar100Dataset,
// TokenDataset, ImageFolder.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/datasets/cifar_dataset.h"
#include "lockstep/data/datasets/csv_dataset.h"
#include "lockstep/data/datasets/idx_dataset.h"
#include "lockstep/data/datasets/image_folder.h"
#include "lockstep/data/datasets/map_dataset.h"
#include "lockstep/data/datasets/selected_samples.h"
#include "lockstep/data/datasets/token_dataset.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/transforms.h"
#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using namespace lockstep::internal::testing;
using namespace std::string_literals;

constexpr const char* kDigits =
    LOCKSTEP_SOURCE_DIR "/datasets/digits/digits.csv";

// Compares get(), get_batch() and a loader with several numbers of workers.
template <class D>
void gives_equal_batches(D& dataset) {
  const size_t size = dataset.size();
  ASSERT_GT(size, 2u);
  std::vector<size_t> indices(size);
  for (size_t i = 0; i < size; ++i) indices[i] = (i * 7 + 3) % size;
  const HeldDataset<D> held(dataset);
  const auto whole = [&]() -> torch::data::Example<> {
    auto batch = held.get_batch(indices);
    if constexpr (GivesListsOfSamples<const HeldDataset<D>>) {
      return default_collate(std::move(batch));
    } else {
      return batch;
    }
  }();
  for (size_t i = 0; i < size; ++i) {
    const auto row = static_cast<int64_t>(i);
    const auto sample = dataset.get(indices[i]);
    ASSERT_TRUE(torch::equal(whole.data[row], sample.data)) << i;
    ASSERT_TRUE(torch::equal(whole.target[row], sample.target)) << i;
    ASSERT_EQ(whole.data.dtype(), sample.data.dtype());
  }
  std::vector<torch::data::Example<>> expected;
  for (const int64_t workers : {0, 1, 3}) {
    DistributedSampler sampler(static_cast<int64_t>(size));
    DataLoader loader(dataset, sampler,
                      {.batch_size = 3, .num_workers = workers});
    std::vector<torch::data::Example<>> batches;
    for (auto& batch : loader) batches.push_back(batch);
    if (workers == 0) expected = batches;
    ASSERT_EQ(batches.size(), expected.size());
    for (size_t i = 0; i < batches.size(); ++i) {
      ASSERT_TRUE(torch::equal(batches[i].data, expected[i].data));
      ASSERT_TRUE(torch::equal(batches[i].target, expected[i].target));
    }
  }
  EXPECT_THROW(dataset.get(size), c10::IndexError);
  EXPECT_THROW(held.get_batch(c10::ArrayRef<size_t>(size)), c10::IndexError);
}

// ---- CSV ----

TEST(CsvDataset, ReadsTheDigits) {
  CsvDataset digits(kDigits, {.header = false, .target = {-1}});
  EXPECT_EQ(digits.size(), 1797u);
  EXPECT_EQ(digits.data().sizes(), (c10::IntArrayRef{1797, 64}));
  EXPECT_EQ(digits.data().dtype(), torch::kFloat);
  EXPECT_EQ(digits.target().sizes(), (c10::IntArrayRef{1797}));
  EXPECT_EQ(digits.target().dtype(), torch::kLong);
  // Sums over the whole file, counted with another program.
  EXPECT_EQ(digits.data().sum(torch::kDouble).item<double>(), 561718);
  EXPECT_EQ(digits.target().sum().item<int64_t>(), 8070);
  EXPECT_TRUE(digits.columns().empty());

  const TemporaryFolder folder;
  const CsvDataset packed(folder.write("digits", gzipped(read_file(kDigits))),
                          {.header = false, .target = {64}});
  EXPECT_TRUE(torch::equal(packed.data(), digits.data()));
  EXPECT_TRUE(torch::equal(packed.target(), digits.target()));
}

TEST(CsvDataset, SelectsColumnsByNameAndNumber) {
  const TemporaryFolder folder;
  const std::string path = folder.write("f.csv",
                                        "id;\"a;b\";x;label\n"
                                        "u1;1.5;+2;7\n"
                                        "\"u;2\";\"-3\"; 4e2 ;-8\n");
  const auto read = [&](CsvOptions options) {
    options.separator = ';';
    return CsvDataset(path, options);
  };
  auto data = read({.columns = {"x", "a;b"}, .target = {"label"}});
  EXPECT_THAT(data.columns(), ElementsAre("x", "a;b"));
  EXPECT_TRUE(torch::equal(
      data.data(), torch::tensor({2.f, 1.5f, 400.f, -3.f}).view({2, 2})));
  EXPECT_TRUE(
      torch::equal(data.target(), torch::tensor({7, -8}, torch::kLong)));

  data = read({.columns = {-2}, .target = {3, 1}, .target_dtype = at::kDouble});
  EXPECT_THAT(data.columns(), ElementsAre("x"));
  EXPECT_TRUE(
      torch::equal(data.data(), torch::tensor({2.f, 400.f}).view({2, 1})));
  EXPECT_TRUE(torch::equal(
      data.target(),
      torch::tensor({7., 1.5, -8., -3.}, torch::kDouble).view({2, 2})));

  data = read({.columns = {1, "x"}, .dtype = at::kDouble});
  EXPECT_EQ(data.data().dtype(), torch::kDouble);
  EXPECT_EQ(data.target().sizes(), (c10::IntArrayRef{2, 0}));
  EXPECT_EQ(data.get(1).target.sizes(), (c10::IntArrayRef{0}));
  DistributedSampler sampler(2);
  DataLoader loader(data, sampler, {.batch_size = 2});
  EXPECT_EQ(loader.begin()->data.sizes(), (c10::IntArrayRef{2, 2}));

  const std::string numbers = folder.write("g.csv", "a,b,c\n1,2,3\n4,5,6\n");
  const CsvDataset others(numbers, {.target = {"b"}, .dtype = at::kLong});
  EXPECT_THAT(others.columns(), ElementsAre("a", "c"));
  EXPECT_TRUE(torch::equal(
      others.data(), torch::tensor({1, 3, 4, 6}, torch::kLong).view({2, 2})));
}

TEST(CsvDataset, GivesEqualBatches) {
  const TemporaryFolder folder;
  std::string text = "x,y,label\n";
  for (int i = 0; i < 20; ++i) {
    text += std::to_string(i) + "," + std::to_string(i * i) + "," +
            std::to_string(i % 3) + "\n";
  }
  CsvDataset data(folder.write("f.csv", text), {.target = {"label"}});
  gives_equal_batches(data);
}

// The first sample of a table without names was taken for names, and lost.
TEST(CsvDataset, DoesNotTakeASampleForNames) {
  const TemporaryFolder folder;
  const std::string path = folder.write("f.csv", "1.5,2,0\n3,4,1\n");
  EXPECT_THAT(message_of([&] { CsvDataset data(path); }),
              HasSubstr("line 1 of \"" + path +
                        "\" has numbers alone in the columns that are read "
                        "(\"1.5\", \"2\", \"0\"), but would be taken for the "
                        "names of the columns; set `header` to false"));
  EXPECT_EQ(CsvDataset(path, {.header = false}).size(), 2u);
  EXPECT_EQ(CsvDataset(path, {.header = true}).size(), 1u);
  // The header that pandas writes for columns without names, and other names.
  for (const char* names : {"0,1,2", "\"0\",\"1\",\"2\"", ",1,2", "1,2,y"}) {
    const std::string text = std::string(names) + "\n3,4,1\n";
    EXPECT_EQ(CsvDataset(folder.write("g.csv", text)).size(), 1u) << names;
  }
}

// A text in a column that is not read, an empty field that counts as a number,
// or a number too large for a double made a first sample names:
// `id17,0.3,1.2,0` with its columns by number.
TEST(CsvDataset, LooksForNamesOnlyInWhatItReads) {
  const TemporaryFolder folder;
  const auto refuses = [&](const char* first, const char* shown,
                           const CsvOptions& options) {
    const std::string path =
        folder.write("f.csv", std::string(first) + "\n3,4,5,6\n");
    EXPECT_THAT(message_of([&] { CsvDataset data(path, options); }),
                HasSubstr(std::string("(") + shown + "), but would be taken"))
        << first;
  };
  const auto takes = [&](const char* first, const CsvOptions& options) {
    const std::string path =
        folder.write("f.csv", std::string(first) + "\n3,4,5,6\n");
    EXPECT_EQ(CsvDataset(path, options).size(), 1u) << first;
  };
  const CsvOptions by_number{.columns = {1, 2}, .target = {-1}};
  refuses("id17,0.3,1.2,0", "\"0.3\", \"1.2\", \"0\"", by_number);
  refuses("id17,0,1,2", "\"0\", \"1\", \"2\"", by_number);
  refuses("1,,3,4", "\"1\", \"\", \"3\", \"4\"", {.missing = 0});
  refuses("1e999,2,3,4", "\"1e999\", \"2\", \"3\", \"4\"", {});
  takes("id,x,1,2", by_number);
  takes("id,1,2,label", {.columns = {1, 2}, .target = {"label"}});
  takes("country,2019,2020,2021", {.columns = {"2019", "2021"}});
  // The names that pandas writes with an index.
  takes(",0,1,2", by_number);
  takes(",0,1,2", {.missing = 0});
  takes(",1,2,3", {});
}

TEST(CsvDataset, MayHaveNoRows) {
  const TemporaryFolder folder;
  const CsvDataset data(folder.write("f.csv", "a,b\n"), {.target = {"b"}});
  EXPECT_EQ(data.size(), 0u);
  EXPECT_EQ(data.data().sizes(), (c10::IntArrayRef{0, 1}));
}

TEST(CsvDataset, NamesLineAndColumnOfAWrongNumber) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& text, CsvOptions options) {
    const std::string path = folder.write("f.csv", text);
    const std::string message = message_of([&] { CsvDataset(path, options); });
    const std::string begin = "data file \"" + path + "\" ";
    return message.starts_with(begin) ? message.substr(begin.size()) : message;
  };
  EXPECT_EQ(refusal("a,b\n1,2\n\n3,four\n", {}),
            "line 4, column 1 (\"b\"): \"four\" is wrong; allowed is a number "
            "that fits Float");
  EXPECT_EQ(refusal("1,2\n3.5,4\n", {.header = false, .dtype = at::kLong}),
            "line 2, column 0: \"3.5\" is wrong; allowed is an integer of 64 "
            "bits; for other numbers set the dtype to at::kFloat");
  EXPECT_EQ(refusal("a,b\n1,9e99\n", {}),
            "line 2, column 1 (\"b\"): \"9e99\" is too large; allowed is a "
            "number that fits Float");
  EXPECT_EQ(refusal("a,b\n1, \n", {}),
            "line 2, column 1 (\"b\"): the field is empty; set `missing` to "
            "read empty fields as a number");
  EXPECT_EQ(refusal("a,b\n1,2\n1,2,3\n", {}),
            "line 3 has 3 fields, but line 1 has 2; all rows must have the "
            "same number");
  EXPECT_THAT(refusal("a\n\"1\x01\n" + std::string(100, 'x') + "\"\n", {}),
              ::testing::StartsWith("line 2, column 0 (\"a\"): "
                                    "\"1\\x01\\x0axxx"));
  // Bytes that are not UTF-8 made the text of the error invalid.
  EXPECT_THAT(refusal("a\n\xff\xfe\n", {}),
              ::testing::StartsWith("line 2, column 0 (\"a\"): \"  \" is"));
  EXPECT_EQ(refusal("", {}), "has no line with the names of its columns");
  EXPECT_EQ(refusal("\n", {.header = false}),
            "has no row whose columns could be counted");
}

TEST(CsvDataset, ReadsMissingFieldsIfToldHow) {
  const TemporaryFolder folder;
  const std::string path = folder.write("f.csv", "a,b\n,2\n3,\"\"\n");
  const CsvDataset data(path, {.missing = -1});
  EXPECT_TRUE(torch::equal(data.data(),
                           torch::tensor({-1.f, 2.f, 3.f, -1.f}).view({2, 2})));
  const auto nan = CsvDataset(path, {.missing = std::nan("")});
  EXPECT_EQ(nan.data().isnan().sum().item<int>(), 2);
}

TEST(CsvDataset, RefusesColumnsAndOptionsThatAreNotThere) {
  const TemporaryFolder folder;
  const std::string path = folder.write("f.csv", "a,b,b\n1,2,3\n");
  const auto refuses = [&](CsvOptions options, const char* message) {
    EXPECT_THAT([&] { CsvDataset(path, options); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
  };
  refuses({.columns = {"c"}}, "its columns are \"a\", \"b\", \"b\"");
  refuses({.target = {"b"}}, "are named \"b\"; give the column's number");
  refuses({.columns = {3}}, "it has 3 columns, 0 to 2, or -1 for the last");
  refuses({.target = {-4}}, "there is no column -4");
  refuses({.header = false, .columns = {"a"}}, "names need `header`");
  refuses({.separator = '"'}, "the separator is a quote");
  refuses({.dtype = at::kHalf}, "a dtype is Half");
  refuses({.target = {"a"}, .missing = 0.5},
          "missing is 0.500000, which is not an integer");
}

TEST(CsvDataset, SurvivesDamage) {
  const TemporaryFolder folder;
  const std::string good = "id,\"x,y\",n\n\"a\nb\",2.5,3\nc,-1e3,4\n";
  const auto use = [&](const std::string& damaged) {
    CsvDataset(folder.write("f", damaged), {.columns = {1}, .target = {"n"}});
  };
  for_damaged(good, 300, use);
  EXPECT_LE(for_damaged(gzipped(good), 300, use), 1u);
}

// ---- IDX, MNIST ----

std::string big_endian_32(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

std::string idx_text(char type, const std::vector<uint32_t>& sizes,
                     const std::string& elements) {
  std::string text = "\0\0"s + type + static_cast<char>(sizes.size());
  for (const uint32_t size : sizes) text += big_endian_32(size);
  return text + elements;
}

// 10 images of 2 x 3; pixel p of image i is 10 i + p. Labels are i % 4.
struct SmallMnist {
  SmallMnist() {
    for (int i = 0; i < 10; ++i) {
      for (int p = 0; p < 6; ++p) pixels += static_cast<char>(10 * i + p);
      labels += static_cast<char>(i % 4);
    }
    images = idx_text(8, {10, 2, 3}, pixels);
    labels = idx_text(8, {10}, labels);
  }
  std::string pixels;
  std::string images;
  std::string labels;
};

TEST(MnistDataset, ReadsPlainAndCompressedFilesWhereTheyMayBe) {
  const SmallMnist small;
  for (const std::string place : {"", "MNIST/raw/"}) {
    for (const bool packed : {false, true}) {
      const TemporaryFolder folder;
      const std::string ending = packed ? ".gz" : "";
      for (const std::string part : {"train", "t10k"}) {
        const auto write = [&](const std::string& name,
                               const std::string& text) {
          folder.write(place + part + name + ending,
                       packed ? gzipped(text) : text);
        };
        write("-images-idx3-ubyte", small.images);
        write("-labels-idx1-ubyte", small.labels);
      }
      for (const bool train : {true, false}) {
        MnistDataset mnist(folder.path(), {.train = train});
        EXPECT_EQ(mnist.size(), 10u);
        const auto sample = mnist.get(7);
        EXPECT_EQ(sample.data.sizes(), (c10::IntArrayRef{1, 2, 3}));
        EXPECT_EQ(sample.data.dtype(), torch::kByte);
        EXPECT_EQ(sample.data[0][1][2].item<int>(), 75);
        EXPECT_EQ(sample.target.item<int64_t>(), 3);
        EXPECT_EQ(mnist.target().dtype(), torch::kLong);
        gives_equal_batches(mnist);
      }
    }
  }
}

TEST(MnistDataset, SaysWhatIsMissingOrWrong) {
  const SmallMnist small;
  const TemporaryFolder folder;
  const auto refusal = [&] {
    return message_of([&] { MnistDataset mnist(folder.path()); });
  };
  EXPECT_THAT(refusal(), HasSubstr("there is no file train-images-idx3-ubyte "
                                   "or train-images-idx3-ubyte.gz in \""));
  folder.write("train-images-idx3-ubyte", small.images);
  EXPECT_THAT(refusal(), HasSubstr("there is no file train-labels-idx1-ubyte"));
  folder.write("train-labels-idx1-ubyte", idx_text(8, {9}, "123456789"));
  EXPECT_THAT(
      refusal(),
      HasSubstr("train-labels-idx1-ubyte\" has 9 rows, but \"" + folder.path() +
                "/train-images-idx3-ubyte\" has 10; give two files "
                "that belong together"));
  folder.write("train-labels-idx1-ubyte", idx_text(8, {11}, "123456789ab"));
  EXPECT_THAT(refusal(), HasSubstr("has 11 rows"));
  folder.write("train-labels-idx1-ubyte", small.images);
  EXPECT_THAT(refusal(), HasSubstr("does not hold labels"));
  folder.write("train-labels-idx1-ubyte", small.labels);
  EXPECT_EQ(refusal(), "");
  folder.write("train-images-idx3-ubyte", small.labels);
  EXPECT_THAT(refusal(), HasSubstr("does not hold images"));
}

TEST(IdxDataset, HasTheTypeAndSizesOfTheFile) {
  const TemporaryFolder folder;
  const std::string floats =
      folder.write("x", idx_text(13, {3, 2},
                                 "\x3f\x80\0\0\x40\0\0\0\x40\x40\0\0"
                                 "\0\0\0\0\0\0\0\0\xbf\x80\0\0"s));
  const std::string shorts =
      folder.write("y", idx_text(11, {3}, "\0\1\1\0\xff\xff"s));
  IdxDataset pair(floats, shorts);
  EXPECT_EQ(pair.dtype(), at::kFloat);
  EXPECT_THAT(pair.sizes(), ElementsAre(2));
  EXPECT_TRUE(torch::equal(pair.get(0).data, torch::tensor({1.f, 2.f})));
  EXPECT_TRUE(
      torch::equal(pair.target(), torch::tensor({1, 256, -1}, torch::kLong)));
  gives_equal_batches(pair);
  const IdxDataset swapped(shorts, floats);
  EXPECT_EQ(swapped.get(1).data.item<int16_t>(), 256);
  EXPECT_TRUE(torch::equal(swapped.get(1).target, torch::tensor({3.f, 0.f})));
}

// ---- CIFAR ----

// Records with `labels` labels; label j of record r is r + j, pixel p of it is
// r + p, all modulo 256.
std::string cifar_records(int first, int count, int labels) {
  std::string text;
  for (int r = first; r < first + count; ++r) {
    for (int j = 0; j < labels; ++j) text += static_cast<char>(r + j);
    for (int p = 0; p < 3072; ++p) text += static_cast<char>(r + p);
  }
  return text;
}

TEST(CifarDataset, ReadsTheFilesOneAfterAnother) {
  const TemporaryFolder folder;
  for (int i = 0; i < 5; ++i) {
    folder.write(
        "cifar-10-batches-bin/data_batch_" + std::to_string(i + 1) + ".bin",
        cifar_records(2 * i, 2, 1));
  }
  folder.write("test_batch.bin", cifar_records(3, 1, 1));
  Cifar10Dataset train(folder.path());
  EXPECT_EQ(train.size(), 10u);
  for (int64_t i = 0; i < 10; ++i) {
    const auto sample = train.get(static_cast<size_t>(i));
    EXPECT_EQ(sample.target.item<int64_t>(), i);
    EXPECT_EQ(sample.data.sizes(), (c10::IntArrayRef{3, 32, 32}));
    EXPECT_EQ(sample.data[1][2][3].item<int64_t>(),
              (i + 1024 + 2 * 32 + 3) % 256);
  }
  gives_equal_batches(train);
  EXPECT_EQ(Cifar10Dataset(folder.path(), {.train = false}).size(), 1u);
}

TEST(CifarDataset, HasFineAndCoarseLabels) {
  const TemporaryFolder folder;
  folder.write("cifar-100-binary/train.bin", cifar_records(0, 5, 2));
  folder.write("test.bin", cifar_records(7, 1, 2));
  Cifar100Dataset fine(folder.path());
  const Cifar100Dataset coarse(folder.path(), {.coarse = true});
  EXPECT_EQ(fine.get(3).target.item<int64_t>(), 4);
  EXPECT_EQ(coarse.get(3).target.item<int64_t>(), 3);
  EXPECT_EQ(fine.get(3).data[0][0][5].item<int64_t>(), 8);
  EXPECT_TRUE(torch::equal(fine.get(3).data, coarse.get(3).data));
  gives_equal_batches(fine);
  const Cifar100Dataset test(folder.path(), {.train = false});
  EXPECT_EQ(test.get(0).target.item<int64_t>(), 8);
}

TEST(CifarDataset, NamesFileAndByteOfWhatIsWrong) {
  const TemporaryFolder folder;
  const auto test = [&](const std::string& content) {
    folder.write("test_batch.bin", content);
    return Cifar10Dataset(folder.path(), {.train = false});
  };
  EXPECT_THAT(message_of([&] { Cifar10Dataset data(folder.path()); }),
              HasSubstr("there is no file data_batch_1.bin in \""));
  EXPECT_THAT(message_of([&] { test(cifar_records(0, 3, 1).substr(1)); }),
              HasSubstr("test_batch.bin\" has 9218 bytes, which is not a whole "
                        "number of records of 3073 bytes: it was cut short"));
  EXPECT_THAT(message_of([&] { test(""); }), HasSubstr("has 0 bytes"));
  const auto damaged = test(cifar_records(9, 2, 1));
  EXPECT_EQ(damaged.get(0).target.item<int64_t>(), 9);
  const char* message =
      "is damaged: the label of record 1 (byte 3073) is 10; CIFAR-10 has the "
      "labels 0 to 9";
  EXPECT_THAT([&] { damaged.get(1); },
              ThrowsMessage<DataFileError>(HasSubstr(message)));
  EXPECT_THAT([&] { damaged.get_batch(std::vector<size_t>{0, 1}); },
              ThrowsMessage<DataFileError>(HasSubstr(message)));
  folder.write("train.bin", cifar_records(99, 2, 2));
  const Cifar100Dataset fine(folder.path());
  EXPECT_THAT([&] { fine.get(0); },
              ThrowsMessage<DataFileError>(HasSubstr("(byte 1) is 100")));
}

// ---- Tokens ----

std::string tokens_text(int first, int count, size_t bytes) {
  std::string text;
  for (int token = first; token < first + count; ++token) {
    for (size_t i = 0; i < bytes; ++i) {
      text += static_cast<char>(static_cast<uint64_t>(token) >> (8 * i));
    }
  }
  return text;
}

TEST(TokenDataset, PredictsTheNextToken) {
  const TemporaryFolder folder;
  for (const auto& [dtype, bytes] :
       {std::pair{at::kUInt16, size_t{2}}, {at::kUInt32, size_t{4}}}) {
    const std::string path =
        folder.write("t.bin", "headr" + tokens_text(60000, 24, bytes));
    TokenDataset tokens(path, 4, {.dtype = dtype, .header_bytes = 5});
    EXPECT_EQ(tokens.tokens(), 24);
    EXPECT_EQ(tokens.size(), 5u);
    EXPECT_EQ(tokens.unused_tokens(), 3);
    const auto sample = tokens.get(2);
    EXPECT_TRUE(torch::equal(sample.data, torch::arange(60008, 60012)));
    EXPECT_TRUE(torch::equal(sample.target, torch::arange(60009, 60013)));
    gives_equal_batches(tokens);

    TokenDataset overlapping(path, 4,
                             {.dtype = dtype, .stride = 3, .header_bytes = 5});
    EXPECT_EQ(overlapping.size(), 7u);
    EXPECT_EQ(overlapping.unused_tokens(), 1);
    EXPECT_EQ(overlapping.get(6).target[3].item<int64_t>(), 60022);
    gives_equal_batches(overlapping);
  }
}

TEST(TokenDataset, ReadsTheBytesOfAText) {
  const TemporaryFolder folder;
  const TokenDataset bytes(folder.write("t.txt", "ab\xff\nz"), 4,
                           {.dtype = at::kByte, .vocabulary = 256});
  ASSERT_EQ(bytes.size(), 1u);
  EXPECT_TRUE(torch::equal(bytes.get(0).data,
                           torch::tensor({97, 98, 255, 10}, torch::kLong)));
  EXPECT_TRUE(torch::equal(bytes.get(0).target,
                           torch::tensor({98, 255, 10, 122}, torch::kLong)));
}

TEST(TokenDataset, CountsTheSamplesThatFitWhole) {
  const TemporaryFolder folder;
  for (int count = 0; count < 30; ++count) {
    const std::string path = folder.write("t", tokens_text(0, count, 2));
    for (int64_t length : {1, 2, 5, 40}) {
      for (int64_t stride : {1, 2, 5, 7, 100}) {
        size_t expected = 0;
        while (static_cast<int64_t>(expected) * stride + length + 1 <= count) {
          ++expected;
        }
        if (expected == 0) {
          ASSERT_THAT(
              message_of(
                  [&] { TokenDataset(path, length, {.stride = stride}); }),
              HasSubstr("has " + std::to_string(count) +
                        " tokens, but a sample needs sequence_length + 1, " +
                        std::to_string(length + 1)));
          continue;
        }
        const TokenDataset tokens(path, length, {.stride = stride});
        ASSERT_EQ(tokens.size(), expected);
        const auto last = tokens.get(expected - 1).target[-1].item<int64_t>();
        ASSERT_EQ(tokens.unused_tokens(), count - 1 - last);
      }
    }
  }
}

TEST(TokenDataset, SaysWhatIsWrong) {
  const TemporaryFolder folder;
  const std::string path = folder.write("t", tokens_text(95, 10, 2) + "x");
  const auto refuses = [&](int64_t length, TokenOptions options,
                           const char* message) {
    EXPECT_THAT(message_of([&] { TokenDataset(path, length, options); }),
                HasSubstr(message));
  };
  refuses(4, {},
          "t\" has 21 bytes of tokens, which is not a multiple of 2: it "
          "was cut short, or dtype or header_bytes are wrong");
  refuses(4, {.header_bytes = 22}, "fewer than its header of 22");
  refuses(0, {}, "sequence_length is 0; it must be 1 or more");
  refuses(4, {.stride = 0}, "stride is 0; it must be 1 or more");
  refuses(4, {.header_bytes = -1}, "header_bytes is -1");
  refuses(4, {.vocabulary = 0}, "vocabulary is 0");
  refuses(4, {.dtype = at::kInt}, "dtype is Int; at::kByte, at::kUInt16");
  const TokenDataset tokens(path, 4, {.header_bytes = 1, .vocabulary = 100});
  EXPECT_EQ(tokens.size(), 2u);
}

TEST(TokenDataset, NamesATokenOutsideOfTheVocabulary) {
  const TemporaryFolder folder;
  const TokenDataset tokens(folder.write("t", tokens_text(95, 10, 2)), 2,
                            {.vocabulary = 99});
  EXPECT_EQ(tokens.get(0).target[1].item<int64_t>(), 97);
  EXPECT_THAT([&] { tokens.get(1); },
              ThrowsMessage<DataFileError>(
                  HasSubstr("has the token 99 at byte 8, outside of the "
                            "vocabulary of 99")));
}

// ---- Images ----

std::string sample_image(const std::string& name) {
  return read_file(LOCKSTEP_SOURCE_DIR "/tests/data/datasets/samples/" + name);
}

TEST(ImageFolder, GivesImagesWithTheirClass) {
  const TemporaryFolder folder;
  folder.write("cat/2.png", sample_image("colour.png"));
  folder.write("cat/1.png", sample_image("gray.png"));
  folder.write("ant/x.png", sample_image("alpha.png"));
  folder.write("ant/readme.txt", "no image");
  ImageFolder images(folder.path());
  EXPECT_THAT(images.classes(), ElementsAre("ant", "cat"));
  EXPECT_EQ(images.size(), 3u);
  EXPECT_EQ(images.path(1), folder.file("cat/1.png"));
  EXPECT_EQ(images.target(2), 1);
#if LOCKSTEP_HAS_PNG
  const auto gray = images.get(1);
  EXPECT_EQ(gray.data.sizes(), (c10::IntArrayRef{3, 10, 13}));
  EXPECT_EQ(gray.data.dtype(), torch::kByte);
  EXPECT_EQ(gray.data.sum().item<int64_t>(), 3 * 14235);
  EXPECT_EQ(gray.target.item<int64_t>(), 1);
  const auto colour = images.get(2).data;
  EXPECT_TRUE(torch::equal(colour, images.get(0).data)) << "without its alpha";
  EXPECT_TRUE(torch::equal(colour.select(1, 2).select(1, 3),
                           torch::tensor({53, 107, 161}, torch::kByte)));
  gives_equal_batches(images);
#endif
}

TEST(ImageFolder, NamesTheFileThatIsWrong) {
  const TemporaryFolder folder;
  folder.write("a/1.png", sample_image("colour.png").substr(0, 60));
  folder.write("a/2.jpg", "text");
  folder.write("a/3.png", sample_image("colour.png"));
  std::filesystem::create_symlink("nothing", folder.file("a/4.png"));
  const ImageFolder images(folder.path(), {.max_pixels = 129});
  EXPECT_THAT([&] { images.get(1); },
              ThrowsMessage<DataFileError>(
                  HasSubstr("a/2.jpg\" is neither a JPEG nor a PNG file")));
  EXPECT_THAT([&] { images.get(3); },
              ThrowsMessage<std::system_error>(
                  HasSubstr("a/4.png\" cannot be opened")));
#if LOCKSTEP_HAS_PNG
  EXPECT_THAT([&] { ImageFolder(folder.path()).get(0); },
              ThrowsMessage<DataFileError>(
                  HasSubstr("a/1.png\" is damaged or cut short near byte")));
  EXPECT_THAT([&] { images.get(2); },
              ThrowsMessage<DataFileError>(HasSubstr("1 to 129 pixels")));
#endif
  EXPECT_THAT([&] { ImageFolder(folder.path(), {.extensions = {"png"}}); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("an extension is \"png\"; give it in lower case")));
  EXPECT_EQ(ImageFolder(folder.path(), {.extensions = {".jpg"}}).size(), 1u);
}

#if LOCKSTEP_HAS_PNG && LOCKSTEP_HAS_JPEG
// All together: files of several kinds, random transforms, workers.
TEST(ImageFolder, AugmentedImagesDoNotDependOnTheWorkers) {
  const TemporaryFolder folder;
  const std::vector<std::string> names{
      "alpha.png",      "cmyk.jpg",    "colour.jpg",
      "colour.png",     "gray.jpg",    "gray.png",
      "interlaced.png", "palette.png", "progressive.jpg"};
  for (size_t i = 0; i < names.size(); ++i) {
    folder.write(std::to_string(i % 3) + "/" + names[i],
                 sample_image(names[i]));
  }
  MapDataset images(ImageFolder(folder.path()),
                    Compose(RandomResizedCrop(8), RandomHorizontalFlip(),
                            RandomCrop(8, {.padding = 2}), ToFloat()));
  EXPECT_EQ(images.get(0).data.sizes(), (c10::IntArrayRef{3, 8, 8}));
  EXPECT_FALSE(torch::equal(images.get(0, SampleSeed{1}).data,
                            images.get(0, SampleSeed{2}).data));
  gives_equal_batches(images);
}
#endif

}  // namespace
}  // namespace lockstep::internal
