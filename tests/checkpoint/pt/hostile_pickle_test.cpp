// .pt files that somebody has made to do harm (fault 20): each is refused with
// a one-line error, in little time and little memory.

#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>

#include <map>
#include <string>

#include "lockstep/checkpoint/pt/pickle.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using namespace std::string_literals;

// Writes a .pt file around `pickle`, with one storage of 16 bytes.
void write_pt_file(const std::string& path, const std::string& pickle) {
  caffe2::serialize::PyTorchStreamWriter writer(path);
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("data/0", "0123456789abcdef", 16);
  writer.writeEndOfFile();
}

std::string int4(int32_t value) {
  return "J"s + std::string(reinterpret_cast<const char*>(&value), 4);
}
std::string text(const std::string& value) {
  const auto size = static_cast<uint32_t>(value.size());
  return "X"s + std::string(reinterpret_cast<const char*>(&size), 4) + value;
}
// Returns the pickle of a tensor over that storage, as torch.save writes it.
std::string tensor(const std::string& storage_class, int32_t numel,
                   int32_t offset, const std::string& size,
                   const std::string& stride) {
  return "ctorch._utils\n_rebuild_tensor_v2\n(("s + text("storage") +
         "ctorch\n" + storage_class + "\n" + text("0") + text("cpu") +
         int4(numel) + "tQ" + int4(offset) + "(" + size + "t(" + stride +
         "t\x89" + "ccollections\nOrderedDict\n)RtR";
}
std::string model(const std::string& value) {
  return "\x80\x02}("s + text("w") + value + "u.";
}

TEST(HostilePickle, EachIsRefusedWithItsReason) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a.pt");
  const auto refusal = [&](const std::string& pickle) {
    write_pt_file(path, pickle);
    return message_of([&] { load_snapshot_file(path); });
  };
  const std::string two = int4(2);
  const std::string one = int4(1);
  const std::string good = tensor("FloatStorage", 4, 0, two + two, two + one);
  EXPECT_EQ(refusal(model(good)), "");

  EXPECT_THAT(refusal("\x80\x02"
                      "cos\nsystem\n"s +
                      "(" + text("touch /tmp/owned") + "tR."),
              HasSubstr("is an os.system, not a dict"));
  EXPECT_THAT(refusal("\x80\x04"s + "\x8c\x08" + "builtins" + "\x8c\x04" +
                      "eval" + "\x93."),
              HasSubstr("is a builtins.eval, not a dict"));
  EXPECT_THAT(refusal(model("ctorch\nFloatStorage\n)R")),
              HasSubstr("calls something that is not a function"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 400, 0, two, one))),
              HasSubstr("has 16 bytes instead of 1600"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", -4, 0, two, one))),
              HasSubstr("claims -4"));
  EXPECT_THAT(refusal(model(tensor("DoubleStorage", 4, 0, two, one))),
              HasSubstr("bytes instead of 32"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, 0, int4(5), one))),
              HasSubstr("beyond its storage"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, 3, two, one))),
              HasSubstr("beyond its storage"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, 0, two, int4(4)))),
              HasSubstr("beyond its storage"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, 3, two, int4(-1)))),
              HasSubstr("negative"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, -1, two, one))),
              HasSubstr("negative"));
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, 0, int4(-2), one))),
              HasSubstr("negative"));
  EXPECT_THAT(refusal(model(tensor("BoolStorage", 16, 0, two, one))),
              HasSubstr("neither 0 nor 1"));
  const std::string big = int4(INT32_MAX);
  const std::string zero = int4(0);
  EXPECT_THAT(refusal(model(tensor("FloatStorage", 4, 0, big + big + big,
                                   zero + zero + zero))),
              HasSubstr("larger than memory"));
  // The second tensor reads, as another dtype, a storage that was checked for
  // bool only.
  EXPECT_THAT(refusal("\x80\x02}("s + text("a") + good + text("b") +
                      tensor("IntStorage", 4, 0, two, one) + "u."),
              HasSubstr("described in two ways"));
  EXPECT_THAT(
      refusal("\x80\x02}("s + text("a") + good + text("a") + good + "u."),
      HasSubstr("twice"));
  EXPECT_THAT(refusal("\x80\x02N."s), HasSubstr("not a dict"));
  // Only a run that has a scheduler refuses what is not the state of one.
  const auto scheduler = [&](const std::string& value) {
    const std::string refused =
        refusal("\x80\x02}("s + text("MODEL_STATE") + "}" +
                text("SCHEDULER_STATE") + value + "u.");
    return refused.empty() ? load_snapshot_file(path).scheduler_unreadable
                           : refused;
  };
  const std::string counter = "ccollections\nCounter\n";
  const std::string counts = "}(" + one + two + "u";
  EXPECT_EQ(scheduler("}(" + text("m") + counter + counts + "\x85Ru"), "");
  EXPECT_THAT(scheduler(one),
              HasSubstr("SCHEDULER_STATE is an int, not a dict"));
  EXPECT_THAT(scheduler("}(" + one + one + "u"), HasSubstr("not a dict by"));
  EXPECT_THAT(scheduler("}(" + text("m") + "}(" + one + text("x") + "uu"),
              HasSubstr("a count is a str, not an int"));
  EXPECT_THAT(scheduler("}(" + text("m") + counter + ")Ru"),
              HasSubstr("a Counter is not made of a dict"));
  EXPECT_THAT(scheduler("}(" + text("m") + counter + one + "\x85Ru"),
              HasSubstr("a Counter is not made of a dict"));
  EXPECT_THAT(refusal(model(int4(7))), HasSubstr("its keys are w"));
  EXPECT_THAT(refusal("\x80\x02"s + std::string(1000, ']') + "."),
              HasSubstr("left over"));
  EXPECT_THAT(refusal("\x80\x02h\x07."s), HasSubstr("never stored"));
  EXPECT_THAT(refusal("\x80\x02t."s), HasSubstr("mark"));
  EXPECT_THAT(refusal("\x80\x02(R."s), HasSubstr("stack is empty"));
  EXPECT_THAT(refusal("\x80\x02X\xff\xff\xff\xff."s), HasSubstr("too early"));
  EXPECT_THAT(refusal("\x80\x02\x8a\xff"s), HasSubstr("too early"));
  EXPECT_THAT(refusal("\x80\x09N."s), HasSubstr("protocol is 9"));
  EXPECT_THAT(refusal("\x80\x02i."s), HasSubstr("opcode 105"));
}

StorageLoader no_storage() {
  return [](const std::string&, c10::ScalarType, uint64_t) -> c10::Storage {
    throw PickleError("no storage");
  };
}

TEST(HostilePickle, NestingIsBounded) {
  std::string deep = "\x80\x02"s + std::string(1'000'000, ']') +
                     std::string(999'999, 'a') + ".";
  PickleValue value = read_pickle(deep, no_storage());
  int depth = 0;
  for (; value.as<PickleValue::List>(); ++depth) {
    PickleValue inner = value.as<PickleValue::List>()->front();
    value = std::move(inner);
  }
  EXPECT_EQ(depth, kMostPickleDepth + 1);
  ASSERT_TRUE(value.as<PickleValue::Opaque>());
  EXPECT_THAT(value.type(), HasSubstr("in more than 32 lists and dicts"));
}

// A class that is not known has a name, which must not be copied for each of a
// million objects.
TEST(HostilePickle, ManyObjectsOfOneUnknownClassTakeNoMemory) {
  const std::string name(200, 'x');
  std::string calls = "\x80\x02(c" + name + "\nC\nq\0"s;
  for (int i = 0; i < 1'000'000; ++i) calls += "h\0)R"s;
  calls += "t0N.";
  EXPECT_TRUE(read_pickle(calls, no_storage()).as<std::monostate>());
  EXPECT_THAT(message_of([&] {
                read_pickle("\x80\x02" + std::string("c") +
                                std::string(200, 'x') + "\n" +
                                std::string(400, 'y') + "\n.",
                            no_storage());
              }),
              HasSubstr("a name has no end"));
  const std::string half = text(std::string(300, 'x'));
  EXPECT_THAT(message_of([&] {
                read_pickle("\x80\x04" + half + half + "\x93.", no_storage());
              }),
              HasSubstr("a class has a name of 600 bytes"));
}

// Each would copy its 100,000 elements.
TEST(HostilePickle, ManySizesAndCountersOfOneObjectTakeNoMemory) {
  const std::string many(100'000, 'N');
  for (const auto& [function, argument] : std::map<std::string, std::string>{
           {"ctorch\nSize\n", "(" + many + "t"},
           {"ccollections\nCounter\n", "}(" + many + "u"}}) {
    std::string calls =
        "\x80\x02" + function + "q\0"s + argument + "q\1"s + "00(";
    for (int i = 0; i < 300'000; ++i) calls += "h\0h\1\x85R"s;
    calls += "t0N.";
    EXPECT_TRUE(read_pickle(calls, no_storage()).as<std::monostate>());
  }
}

// These bits were read and ignored, so signs were wrong.
TEST(HostilePickle, WhatATensorSaysOfItselfIsUsedOrTheTensorIsNone) {
  const auto read = [&](const std::string& storage_class,
                        const std::string& rest) {
    // As tensor(), with other arguments after the strides.
    std::string made = tensor(storage_class, 2, 0, int4(2), int4(1));
    made.resize(made.size() -
                "\x89"
                "ccollections\nOrderedDict\n)RtR"s.size());
    return read_pickle("\x80\x02" + made + rest + "tR.", [](const std::string&,
                                                            c10::ScalarType,
                                                            uint64_t size) {
      return torch::ones({static_cast<int64_t>(size)}, torch::kByte).storage();
    });
  };
  const std::string plain = "\x89N";
  const auto flags = [&](const std::string& name, const std::string& value) {
    return plain + "}" + text(name) + value + "s";
  };
  const std::string yes = "\x88";
  const auto conj = read("ComplexFloatStorage", flags("conj", yes));
  ASSERT_TRUE(conj.as<at::Tensor>());
  EXPECT_TRUE(conj.as<at::Tensor>()->is_conj());
  const auto neg = read("FloatStorage", flags("neg", yes));
  ASSERT_TRUE(neg.as<at::Tensor>());
  EXPECT_LT(neg.as<at::Tensor>()->sum().item<float>(), 0);
  EXPECT_TRUE(read("FloatStorage", plain + "}").as<at::Tensor>());
  for (const auto& strange :
       {flags("conj", yes), flags("neg", "\x89"), flags("scale", yes),
        plain + int4(1), "\x89}" + text("a") + "Ns"}) {
    EXPECT_TRUE(read("FloatStorage", strange).as<PickleValue::Opaque>());
  }
  EXPECT_THROW(read("FloatStorage", int4(1) + "N"), PickleError);
}

TEST(HostilePickle, ACycleIsRefused) {
  // Several bounds apply to a cycle; any of them may refuse it.
  EXPECT_THROW(read_pickle("\x80\x02]q\0h\0a."s, no_storage()), PickleError);
}

TEST(HostilePickle, AListThatMentionsItselfTenFoldIsBounded) {
  // Each list holds the previous one ten times: 10^20 values in 500 bytes.
  std::string bomb = "\x80\x02]q"s + '\0';
  for (char level = 1; level <= 20; ++level) {
    bomb += "](";
    for (int i = 0; i < 10; ++i) bomb += "h"s + static_cast<char>(level - 1);
    bomb += "eq"s + level;
  }
  // The lists are inside a tuple that is popped, which drops all but the last.
  bomb = bomb.substr(0, 2) + "(" + bomb.substr(2) + "t.";
  EXPECT_THAT(message_of([&] { read_pickle(bomb, no_storage()); }),
              HasSubstr("too often"));
}

TEST(HostilePickle, AnyBytesAreAnErrorOrAValue) {
  const std::string good =
      model(tensor("FloatStorage", 4, 0, int4(2) + int4(2), int4(2) + int4(1)));
  const auto load = [](const std::string&, c10::ScalarType, uint64_t size) {
    if (size != 16) throw PickleError("size");
    return torch::zeros({16}, torch::kByte).storage();
  };
  for (size_t at = 0; at < good.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = good;
      changed[at] = static_cast<char>(value);
      try {
        read_pickle(changed, load);
      } catch (const PickleError&) {
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
