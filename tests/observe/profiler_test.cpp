#include "lockstep/observe/profiler.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/observe/trace_metadata.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/profile_on_demand.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/harness/temporary_folder.h"
#include "tests/observe/trace.h"

// The clock of 1970 as this process and LibTorch see it, in place of the C
// library's: libfaketime in one function.
static std::atomic<int64_t> clock_shift_s{0};
extern "C" int clock_gettime(clockid_t id, struct timespec* time) noexcept {
  const long failed = ::syscall(SYS_clock_gettime, id, time);
  if (failed == 0 && id == CLOCK_REALTIME) time->tv_sec += clock_shift_s.load();
  return static_cast<int>(failed);
}

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using namespace testing;  // NOLINT
using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kMillisecond = 1'000'000;

// A folder that all ranks of the world see, empty.
std::string shared_folder(const World& world, const char* name) {
  const auto path = world.folder / name;
  if (world.rank == 0) {
    fs::remove_all(path);
    fs::create_directories(path);
  }
  barrier();
  return path;
}

std::string trace_of(const std::string& folder, int rank, int step) {
  return folder + "/rank" + std::to_string(rank) + "." + std::to_string(step) +
         ".pt.trace.json";
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename());
  }
  return names;
}

torch::nn::Sequential small_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                               torch::nn::Linear(16, 4));
}

// Every event lies within those that begin before it in its thread, as trace
// viewers require: Perfetto drops one that does not.
void expect_nested(const Trace& trace) {
  std::map<std::string, std::vector<json>> open;
  for (const auto& event : trace.events("")) {
    // Kineto's own event of the whole trace.
    if (event.value("cat", "") == "Trace") continue;
    auto& stack = open[event.at("tid").dump()];
    while (!stack.empty() &&
           trace.end_ns(stack.back()) <= trace.begin_ns(event)) {
      stack.pop_back();
    }
    if (!stack.empty()) {
      EXPECT_LE(trace.end_ns(event), trace.end_ns(stack.back()))
          << event << " outlives " << stack.back();
    }
    stack.push_back(event);
  }
}

WORLD_TEST(Profiler, TraceHasEachStepAndEachBucketOnce, 2) {
  auto group = init_process_group();
  const auto folder = shared_folder(world, "buckets");
  auto net = small_net();
  // Four parameters, each in a bucket of its own.
  DistributedDataParallel<torch::nn::Sequential> model(net,
                                                       {.bucket_cap_mb = 1e-6});
  std::vector<std::string> ready;
  Profiler profiler(
      {.folder = folder,
       .schedule = {{.wait = 1, .warmup = 1, .active = 2, .repeat = 1}},
       .record_shapes = true,
       .on_trace_ready = [&](const std::string& f) { ready.push_back(f); }});
  for (int step = 0; step < 6; ++step) {
    EXPECT_EQ(profiler.step_number(), step);
    model(torch::ones({2, 8})).sum().backward();
    profiler.step();
  }
  EXPECT_THAT(ready, ElementsAre(trace_of(folder, world.rank, 2)));
  const Trace trace(trace_of(folder, world.rank, 2));
  EXPECT_THAT(
      trace.counts("ProfilerStep"),
      ElementsAre(Pair("ProfilerStep#2", 1), Pair("ProfilerStep#3", 1)));
  const auto spans = trace.counts("lockstep::");
  EXPECT_THAT(spans, Contains(Pair("lockstep::ddp::publish_bucket", 2 * 4)));
  EXPECT_THAT(spans, Contains(Pair("lockstep::comm::reduce_bucket", 2 * 4)));
  EXPECT_THAT(spans, Contains(Pair("lockstep::ddp::wait", 2)));
  // From the first gradient to the last average: that cannot lie within others.
  EXPECT_THAT(spans, Not(Contains(Key("lockstep::ddp::backward"))));
  std::multiset<int64_t> buckets;
  for (const auto& event : trace.events("lockstep::comm::reduce_bucket")) {
    buckets.insert(event.at("args").at("bucket").get<int64_t>());
  }
  EXPECT_THAT(buckets, ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
  EXPECT_EQ(trace.counts("record_param_comms")["record_param_comms"], 2 * 4);
  // The model's own operators: two layers, with a ReLU between them.
  auto operators = trace.counts("aten::");
  EXPECT_EQ(operators["aten::addmm"], 2 * 2);
  EXPECT_EQ(operators["aten::mm"], 2 * 3);  // the input needs no gradient
  EXPECT_EQ(operators["aten::threshold_backward"], 2);
  expect_nested(trace);

  const auto& ours = trace["lockstep"];
  EXPECT_EQ(ours.at("version"), 1);
  EXPECT_EQ(ours.at("rank"), world.rank);
  EXPECT_EQ(ours.at("world_size"), 2);
  EXPECT_EQ(ours.at("pid"), ::getpid());
  EXPECT_FALSE(ours.at("host").get<std::string>().empty());
  // One clock.
  EXPECT_LE(std::abs(ours.at("clock_offset_ns").get<int64_t>()),
            ours.at("clock_uncertainty_ns").get<int64_t>());
  const auto& distributed = trace["distributedInfo"];
  EXPECT_EQ(distributed.at("backend"), "lockstep");
  EXPECT_EQ(distributed.at("rank"), world.rank);
  EXPECT_EQ(distributed.at("world_size"), 2);
  barrier();
  EXPECT_THAT(names_in(folder), UnorderedElementsAre("rank0.2.pt.trace.json",
                                                     "rank1.2.pt.trace.json"));
}

// The parameters that c10d's NCCL backend tells profilers, for each backend
// once.
void expect_params_of_calls(const World& world, const char* backend) {
  auto group = init_process_group(backend);
  auto odd = new_group({1});
  auto all = new_group({0, 1}, {.backend = backend});
  const auto folder = shared_folder(world, backend);
  {
    Profiler profiler(
        {.folder = folder, .record_shapes = true, .execution_trace = true});
    all_reduce(torch::ones({6}));
    broadcast(torch::ones({2, 2}, torch::kLong), 1, {.group = all});
    all_gather_into_tensor(torch::ones({6}), torch::ones({3}));
    barrier();
    if (world.rank == 0) {
      send(torch::ones({5}), 1);
    } else {
      recv(torch::ones({5}), 0);
    }
    all_reduce(torch::ones({3}), {.async_op = true})->wait();
    profiler.stop();
  }
  const Trace trace(trace_of(folder, world.rank, 0));
  std::vector<json> calls;
  for (const auto& event : trace.events("record_param_comms")) {
    calls.push_back(event.at("args"));
  }
  std::vector<std::string> names;
  for (const auto& call : calls) {
    names.push_back(call.at("Collective name"));
    EXPECT_EQ(call.at("Group size"), 2);
  }
  ASSERT_THAT(
      names, ElementsAre("allreduce", "broadcast", "_allgather_base", "barrier",
                         world.rank == 0 ? "send" : "recv", "allreduce"));
  EXPECT_EQ(calls[0].at("Process Group Name"), "0");
  EXPECT_EQ(calls[0].at("Process Group Description"), "default_pg");
  EXPECT_EQ(calls[0].at("In msg nelems"), 6);
  EXPECT_EQ(calls[0].at("Out msg nelems"), 6);
  EXPECT_EQ(calls[0].at("dtype"), "Float");
  EXPECT_EQ(calls[1].at("Process Group Name"), all->name());
  EXPECT_EQ(calls[1].at("dtype"), "Long");
  EXPECT_EQ(calls[2].at("In msg nelems"), 3);
  EXPECT_EQ(calls[2].at("Out msg nelems"), 6);
  expect_nested(trace);
  // Replay tools take collectives and groups from the execution trace.
  const auto executed = json::parse(read_file(
      folder + "/rank" + std::to_string(world.rank) + ".0.pt.et.json"));
  std::vector<std::string> replayed;
  std::string groups;
  for (const auto& node : executed.at("nodes")) {
    const auto inputs = node.at("inputs").at("values");
    if (node.at("name") == "record_param_comms") {
      replayed.push_back(inputs.at(4));
    } else if (node.at("name") == "## process_group:init ##") {
      groups = inputs.at(0);
    }
  }
  EXPECT_EQ(replayed, names);
  EXPECT_THAT(groups, HasSubstr("\"pg_name\":\"0\""));
  // Rank 0 is not a member of the first new group; all groups were counted.
  const auto& distributed = trace["distributedInfo"];
  EXPECT_EQ(distributed.at("pg_count"), 3);
  EXPECT_EQ(distributed.at("pg_config").size(), world.rank == 0 ? 2 : 3);
  EXPECT_EQ(distributed.at("pg_config").back().at("ranks"), json({0, 1}));
}
WORLD_TEST(Profiler, CollectivesHaveC10dsParameters, 2) {
  expect_params_of_calls(world, "lockstep");
}
WORLD_TEST(Profiler, CollectivesOfGlooHaveC10dsParameters, 2) {
  expect_params_of_calls(world, "gloo");
}

WORLD_TEST(Profiler, AsynchronousCollectivesAreSeenInTheThreadThatRunsThem, 2) {
  auto group = init_process_group("shm");
  const auto folder = shared_folder(world, "asynchronous");
  Profiler profiler({.folder = folder});
  {
    const Span span("test", "caller");
    const auto work = all_reduce(torch::ones({3}), {.async_op = true});
    while (!work->isCompleted())
      std::this_thread::yield();  // wait() may run it
  }
  profiler.stop();
  const Trace trace(trace_of(folder, world.rank, 0));
  auto counts = trace.counts("lockstep::");
  ASSERT_THAT(counts, ElementsAre(Pair("lockstep::comm_thread::all_reduce", 1),
                                  Pair("lockstep::test::caller", 1)));
  EXPECT_NE(trace.events("lockstep::comm_thread")[0].at("tid"),
            trace.events("lockstep::test")[0].at("tid"));
}

// Tells in a file that a thread waits for an operation.
class WaitTeller final : public SpanObserver {
 public:
  explicit WaitTeller(std::string file) : file_(std::move(file)) {}
  void on_begin(const SpanBegin& begin) noexcept override {
    if (begin.category == "comm" && begin.name == "wait") {
      std::ofstream(file_) << "waits";
    }
  }
  void on_end(const SpanEnd&) noexcept override {}

 private:
  const std::string file_;
};

// Rank 1 sends only when rank 0 is in the wait, so that this must block.
void expect_wait_is_seen(const World& world, const std::string& backend) {
  auto group = init_process_group(backend);
  const auto folder = shared_folder(world, ("wait_" + backend).c_str());
  const auto told = folder + "/told";
  Profiler profiler({.folder = folder});
  auto tensor = torch::full({3}, world.rank);
  if (world.rank == 0) {
    const SpanSubscription subscription(std::make_shared<WaitTeller>(told));
    irecv(tensor, 1)->wait();
    EXPECT_TRUE(torch::equal(tensor, torch::ones({3}, at::kLong)));
  } else {
    const auto deadline = Deadline::after(std::chrono::seconds(20));
    while (!fs::exists(told) && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(fs::exists(told));
    isend(tensor, 0)->wait();
  }
  profiler.stop();
  if (world.rank != 0) return;
  const Trace trace(trace_of(folder, world.rank, 0));
  EXPECT_THAT(trace.counts("lockstep::comm::wait"),
              ElementsAre(Pair("lockstep::comm::wait", 1)));
  // c10d's event of a message of Gloo outlives the call that begins it.
  if (backend != "gloo") expect_nested(trace);
}
WORLD_TEST(Profiler, WaitForAMessageIsSeen, 2) {
  expect_wait_is_seen(world, "lockstep");
}
WORLD_TEST(Profiler, WaitForAMessageOfGlooIsSeen, 2) {
  expect_wait_is_seen(world, "gloo");
}

// Threads that LibTorch knows nothing of, too.
TEST(Profiler, SpansOfAllThreadsAreSeen) {
  const TemporaryFolder folder;
  Profiler profiler({.folder = folder.path()});
  const Span open_at_the_end("test", "open");
  std::thread([] { const Span span("test", "other_thread"); }).join();
  { const Span span("test", "own_thread"); }
  profiler.stop();
  { const Span span("test", "too_late"); }
  const Trace trace(trace_of(folder.path(), 0, 0));
  ASSERT_THAT(trace.counts("lockstep::test"),
              ElementsAre(Pair("lockstep::test::open", 1),
                          Pair("lockstep::test::other_thread", 1),
                          Pair("lockstep::test::own_thread", 1)));
  EXPECT_NE(trace.events("lockstep::test::other")[0].at("tid"),
            trace.events("lockstep::test::own")[0].at("tid"));
}

// Each part of the library has its spans, and the page lists them all.
WORLD_TEST(Profiler, EveryPartOfATrainingHasItsSpansAndThePageNamesThem, 2) {
  auto group = init_process_group();
  const auto folder = shared_folder(world, "parts");
  Profiler profiler({.folder = folder});
  auto net = small_net();
  DistributedDataParallel<torch::nn::Sequential> model(net);
  ZeroRedundancyOptimizer<optim::SGD> optimizer(model, {.lr = 0.1});
  TensorDataset dataset(torch::ones({8, 8}), torch::ones({8, 4}));
  DistributedSampler sampler(8);
  DataLoader loader(dataset, sampler, {.batch_size = 2, .num_workers = 1});
  for (auto& batch : loader) {
    optimizer.zero_grad();
    torch::mse_loss(model(batch.data), batch.target).backward();
    optimizer.step();
  }
  optim::Adam(net->parameters(), {}).step();
  optim::AdamW(net->parameters(), {}).step();
  TrainingState state{.model = net.ptr()};
  save_snapshot(folder + "/snapshot.pt", state);
  load_snapshot(folder + "/snapshot.pt", state);

  FullyShard<torch::nn::Linear> unit([] { return torch::nn::Linear(8, 4); });
  unit(torch::ones({2, 8})).sum().backward();

  torch::nn::Sequential stage(torch::nn::Linear(8, 8));
  Pipeline pipeline({{group->rank(), stage}},
                    {.schedule = schedule_1f1b(2, 2),
                     .loss = [](const at::Tensor& output, const at::Tensor&) {
                       return output.sum();
                     }});
  pipeline.step(torch::ones({4, 8}), torch::ones({4, 8}));
  profiler.stop();

  const Trace trace(trace_of(folder, world.rank, 0));
  auto spans = trace.counts("lockstep::");
  const auto stage_name = std::to_string(world.rank);
  for (const std::string& name : std::vector<std::string>{
           "ddp::publish_bucket", "ddp::wait", "zero::step", "zero::gather",
           "data::wait", "data::fetch", "snapshot::save", "snapshot::load",
           "fsdp::gather", "fsdp::reduce", "fsdp::wait",
           "pipeline::" + stage_name + "F0", "pipeline::" + stage_name + "F1",
           "pipeline::" + stage_name + "B0"}) {
    EXPECT_THAT(spans, Contains(Key("lockstep::" + name)));
  }
  EXPECT_EQ(spans["lockstep::zero::step"], 2);
  EXPECT_EQ(spans["lockstep::optim::step"], 2 + 2);  // SGD in it, Adam, AdamW
  EXPECT_EQ(spans["lockstep::data::wait"], 2);
  expect_nested(trace);

  const auto page = read_file(LOCKSTEP_SOURCE_DIR "/docs/profiling.md");
  for (const auto& [name, count] : spans) {
    // The page has one row for all collectives and one for all actions.
    std::string listed = name;
    for (const char* family : {"comm_thread::", "pipeline::"}) {
      const auto prefix = std::string("lockstep::") + family;
      if (name.starts_with(prefix)) listed = prefix;
    }
    if (name.starts_with("lockstep::comm::") &&
        name != "lockstep::comm::reduce_bucket") {
      listed = "lockstep::comm::";
    }
    EXPECT_THAT(page, HasSubstr("`" + listed)) << name;
  }
}

WORLD_TEST(ClockOffset, LiesWithinItsUncertainty, 1, 2, 3) {
  auto group = init_process_group();
  const int64_t shift = 5 * kSecond * world.rank;
  clock_shift_s = 5 * world.rank;
  ClockOffset best{.uncertainty_ns = std::numeric_limits<int64_t>::max()};
  for (int i = 0; i < 5; ++i) {
    const auto measured = measure_clock_offset(group);
    // The ranks have one clock, so this holds however busy the machine is.
    EXPECT_LE(std::abs(measured.offset_ns + shift), measured.uncertainty_ns);
    if (measured.uncertainty_ns < best.uncertainty_ns) best = measured;
  }
  clock_shift_s = 0;
  EXPECT_LE(std::abs(best.offset_ns + shift), kMillisecond);
  if (world.rank == 0) {
    EXPECT_EQ(best.offset_ns, 0);
    EXPECT_EQ(best.uncertainty_ns, 0);
  }
}

WORLD_TEST(ClockOffset, RankWhoseClockIsFiveSecondsAheadIsAligned, 2) {
  auto group = init_process_group();
  const auto folder = shared_folder(world, "clocks");
  clock_shift_s = 5 * world.rank;
  {
    Profiler profiler({.folder = folder});
    for (int i = 0; i < 3; ++i) {
      const Span span("test", "meeting");
      barrier();
    }
    profiler.stop();
  }
  clock_shift_s = 0;
  barrier();
  const Trace first(trace_of(folder, 0, 0));
  const Trace second(trace_of(folder, 1, 0));
  const auto offset = second["lockstep"].at("clock_offset_ns").get<int64_t>();
  const auto uncertainty =
      second["lockstep"].at("clock_uncertainty_ns").get<int64_t>();
  EXPECT_LE(std::abs(offset + 5 * kSecond), uncertainty);
  const auto here = first.events("lockstep::test::meeting");
  const auto there = second.events("lockstep::test::meeting");
  ASSERT_EQ(here.size(), 3);
  ASSERT_EQ(there.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    // No rank leaves a barrier before the other has come. Kineto's conversion
    // of times is part of what is tested, so the bound is that of the issue.
    const int64_t bound = std::max(uncertainty, kMillisecond);
    EXPECT_LE(first.begin_ns(here[i]),
              second.end_ns(there[i]) + offset + bound);
    EXPECT_LE(second.begin_ns(there[i]) + offset,
              first.end_ns(here[i]) + bound);
  }
}

WORLD_TEST(ClockOffset, IsNoneInADryRun, 1) {
  auto group = init_process_group("fake", {.world_size = 8, .rank = 3});
  const auto offset = measure_clock_offset(group);
  EXPECT_EQ(offset.offset_ns, 0);
  EXPECT_EQ(offset.uncertainty_ns, 0);
}

WORLD_TEST(ClockOffset, IsMeasuredAgainAtTheEndOfACycle, 2) {
  auto group = init_process_group();
  const auto folder = shared_folder(world, "again");
  {
    Profiler profiler({.folder = folder});
    clock_shift_s = 5 * world.rank;
    profiler.stop();
  }
  clock_shift_s = 0;
  const Trace trace(trace_of(folder, world.rank, 0));
  EXPECT_LE(std::abs(trace["lockstep"].at("clock_offset_ns").get<int64_t>() +
                     5 * kSecond * world.rank),
            trace["lockstep"].at("clock_uncertainty_ns").get<int64_t>());
}

TEST(Profiler, WritesAtTheEndOfEveryCycle) {
  const TemporaryFolder folder;
  {
    Profiler profiler(
        {.folder = folder.path(),
         .schedule = {{.warmup = 0, .active = 2, .skip_first = 1}}});
    std::vector<ProfilerAction> actions;
    for (int step = 0; step < 6; ++step) {
      actions.push_back(profiler.action());
      torch::ones({2}) + 1;
      profiler.step();
    }
    using enum ProfilerAction;
    EXPECT_THAT(actions, ElementsAre(none, record, record_and_save, record,
                                     record_and_save, record));
    // The cycle that is under way is written, too.
  }
  EXPECT_THAT(
      names_in(folder.path()),
      UnorderedElementsAre("rank0.1.pt.trace.json", "rank0.3.pt.trace.json",
                           "rank0.5.pt.trace.json"));
  const Trace trace(trace_of(folder.path(), 0, 3));
  EXPECT_THAT(
      trace.counts("ProfilerStep"),
      ElementsAre(Pair("ProfilerStep#3", 1), Pair("ProfilerStep#4", 1)));
  EXPECT_THAT(trace.counts("aten::"), Contains(Pair("aten::ones", 2)));
  EXPECT_FALSE(trace.contains("distributedInfo"));
}

TEST(Profiler, MemoryAndShapesAreRecordedIfAskedFor) {
  const TemporaryFolder folder;
  const auto record = [&](const char* name, ProfilerOptions options) {
    options.folder = folder.file(name);
    Profiler profiler(options);
    torch::ones({3, 7}) + 1;
    profiler.stop();
    return Trace(trace_of(options.folder, 0, 0));
  };
  const auto memory_events = [](const Trace& trace) {
    int found = 0;
    for (const auto& event : trace["traceEvents"]) {
      found += event.value("name", "") == "[memory]";
    }
    return found;
  };
  const auto plain = record("plain", {});
  EXPECT_EQ(memory_events(plain), 0);
  EXPECT_FALSE(plain.events("aten::add")[0].at("args").contains("Input Dims"));
  const auto full =
      record("full", {.record_shapes = true, .profile_memory = true});
  EXPECT_GE(memory_events(full), 2);
  EXPECT_EQ(full.events("aten::add")[0].at("args").at("Input Dims")[0],
            json({3, 7}));
}

TEST(Profiler, ExecutionTraceIsWrittenIfAskedFor) {
  const TemporaryFolder folder;
  Profiler profiler({.folder = folder.path(), .execution_trace = true});
  torch::ones({3, 7}) + 1;
  profiler.stop();
  const auto content =
      json::parse(read_file(folder.file("rank0.0.pt.et.json")));
  std::set<std::string> names;
  for (const auto& node : content.at("nodes")) names.insert(node.at("name"));
  EXPECT_THAT(names, Contains("aten::add"));
}

// LibTorch frees what records operators, also while a thread is in it.
WORLD_TEST(Profiler, ThreadsMayComputeWhileAnExecutionTraceEnds, 1) {
  std::atomic<bool> ended = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!ended) torch::ones({3}) + 1;
    });
  }
  for (int i = 0; i < 10; ++i) {
    Profiler profiler(
        {.folder = world.folder / "profile", .execution_trace = true});
    profiler.stop();
  }
  ended = true;
  for (auto& thread : threads) thread.join();
}

TEST(Profiler, AFolderThatCannotBeWrittenIsOneLineAndTrainingMayGoOn) {
  const TemporaryFolder folder;
  const auto file = folder.file("file");
  Profiler profiler(
      {.folder = file + "/traces", .schedule = {{.warmup = 0, .active = 1}}});
  fs::remove_all(file);
  write_file(file, "");
  const auto message = message_of([&] { profiler.step(); });
  EXPECT_THAT(message,
              AllOf(HasSubstr(file + "/traces/rank0.0.pt.trace.json"),
                    HasSubstr("Not a directory"), Not(HasSubstr("\n"))));
  EXPECT_EQ(profiler.step_number(), 1);
  fs::remove(file);
  profiler.step();
  EXPECT_EQ(Trace(trace_of(file + "/traces", 0, 1))
                .counts("ProfilerStep")["ProfilerStep#1"],
            1);
}

// Nothing was recorded then.
TEST(Profiler, GoesOnAfterARecordingThatCouldNotBegin) {
  const TemporaryFolder folder;
  const auto file = folder.file("file");
  Profiler profiler({.folder = file + "/traces",
                     .schedule = {{.warmup = 1, .active = 1}},
                     .execution_trace = true});
  fs::remove_all(file);
  write_file(file, "");
  EXPECT_NE(message_of([&] { profiler.step(); }), "");
  fs::remove(file);
  for (int step = 2; step <= 4; ++step) profiler.step();
  EXPECT_EQ(Trace(trace_of(file + "/traces", 0, 3))
                .counts("ProfilerStep")["ProfilerStep#3"],
            1);
}

TEST(Profiler, AFolderInWhichNoTraceCanBeIsRefusedAtOnce) {
  const TemporaryFolder folder;
  const auto file = folder.write("file", "");
  const auto refusal = [&](const std::string& name) {
    return message_of([&] { const Profiler p({.folder = name}); });
  };
  EXPECT_THAT(refusal(file + "/traces"),
              AllOf(HasSubstr(file + "/traces cannot be written: Not a dir"),
                    HasSubstr("in which this process may write"),
                    Not(HasSubstr("\n"))));
  EXPECT_THAT(refusal("/proc"), HasSubstr("/proc cannot be written: "));
  for (const char* name : {"a\nb", "a\tb", "a\xff"}) {
    EXPECT_THAT(refusal(folder.file(name)),
                AllOf(HasSubstr("Profiler: the folder"), Not(HasSubstr("\n"))));
  }
  for (const char* name : {"a\\b", "a\"b", "s3://b"}) {
    EXPECT_THAT(refusal(folder.file(name)),
                AllOf(HasSubstr("Kineto cannot write traces in the folder " +
                                folder.file(name)),
                      Not(HasSubstr("\n"))));
  }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("file"));
  // A trial leaves nothing behind, and unusual names that are allowed work.
  const auto allowed = folder.file("a: b, {\xc3\xbc}");
  {
    Profiler profiler({.folder = allowed});
    EXPECT_TRUE(names_in(allowed).empty());
  }
  EXPECT_TRUE(Trace(trace_of(allowed, 0, 0)).contains("lockstep"));
}

// The first rank throws before the clocks are compared. The other waits.
WORLD_TEST(Profiler, ARankWhoseFolderIsRefusedThrowsAlone, 2) {
  auto group = init_process_group();
  auto both = new_group({0, 1}, {.timeout = std::chrono::seconds(1)});
  const auto folder = shared_folder(world, "refused");
  if (world.rank == 0) {
    write_file(folder + "/file", "");
    EXPECT_THROW(Profiler({.folder = folder + "/file", .group = both}),
                 std::runtime_error);
  } else {
    EXPECT_THROW(Profiler({.folder = folder, .group = both}), c10::DistError);
  }
  barrier();
}

WORLD_TEST(Profiler, RanksThatHaveNoGroupYetHaveTheLaunchersNumbers, 2) {
  const auto folder = (world.folder / "early").string();
  const auto refused = message_of([&] {
    Profiler profiler({.folder = folder});
    profiler.stop();
  });
  EXPECT_EQ(refused, "");
  const Trace trace(trace_of(folder, world.rank, 0));
  EXPECT_EQ(trace["lockstep"].at("rank"), world.rank);
  EXPECT_EQ(trace["lockstep"].at("world_size"), 2);
  auto group = init_process_group();
  barrier();
  EXPECT_THAT(names_in(folder), UnorderedElementsAre("rank0.0.pt.trace.json",
                                                     "rank1.0.pt.trace.json"));
}

// The program is started again for each case, and finds the folder in its
// environment.
TEST(Profiler, AStaticProfilerWritesItsTrace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  constexpr const char* kVariable = "LOCKSTEP_TEST_STATIC_PROFILER";
  std::optional<TemporaryFolder> own;
  if (!std::getenv(kVariable)) {
    own.emplace();
    ::setenv(kVariable, own->path().c_str(), 1);
  }
  const std::string folder = std::getenv(kVariable);
  const auto run = [&](const char* name, ProfilerOptions options) {
    options.folder = folder + "/" + name;
    static Profiler profiler(options);
    torch::ones({3}).add_(1);
    profiler.step();
    std::exit(0);
  };
  const auto well = ::testing::ExitedWithCode(0);
  EXPECT_EXIT(run("all", {.execution_trace = true}), well, "");
  EXPECT_EXIT(run("steps", {.schedule = {{.warmup = 0, .active = 2}}}), well,
              "");
  EXPECT_EXIT(run("warmup", {.schedule = {{.warmup = 2}}}), well, "");
  ::unsetenv(kVariable);
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_THAT(Trace(trace_of(folder + "/all", 0, 0)).counts("aten::"),
              Contains(Pair("aten::ones", 1)));
  EXPECT_TRUE(json::accept(read_file(folder + "/all/rank0.0.pt.et.json")));
  EXPECT_EQ(Trace(trace_of(folder + "/steps", 0, 0))
                .counts("ProfilerStep")["ProfilerStep#1"],
            1);
  EXPECT_TRUE(names_in(folder + "/warmup").empty());
}

TEST(Profiler, AThreadThatEndsWritesTheTraceOfItsProfiler) {
  const TemporaryFolder folder;
  std::unique_ptr<Profiler> profiler;
  std::thread([&] {
    profiler = std::make_unique<Profiler>(ProfilerOptions{
        .folder = folder.path(), .schedule = {{.warmup = 1, .active = 2}}});
    profiler->step();
    torch::ones({3}).add_(1);
  }).join();
  EXPECT_THAT(Trace(trace_of(folder.path(), 0, 1)).counts("aten::"),
              Contains(Pair("aten::ones", 1)));
  profiler.reset();
  const Profiler next({.folder = folder.path()});
}

TEST(Profiler, MistakesAreNamed) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of([] { Profiler({.folder = ""}); }),
              HasSubstr("folder is empty"));
  EXPECT_THAT(message_of([] { Profiler({.schedule = {{.active = 0}}}); }),
              HasSubstr("active is 0; it must be 1 or more"));
  Profiler profiler({.folder = folder.path()});
  EXPECT_THAT(message_of([] { const Profiler second; }),
              HasSubstr("profiles already"));
  std::string in_thread;
  std::thread([&] { in_thread = message_of([&] { profiler.step(); }); }).join();
  EXPECT_THAT(in_thread, HasSubstr("step() was called in another thread"));
  profiler.stop();
  profiler.stop();
  EXPECT_THAT(message_of([&] { profiler.step(); }), HasSubstr("after stop()"));
  EXPECT_EQ(profiler.action(), ProfilerAction::none);
}

TEST(Profiler, MayBeMadeAgainAndWhatTheCallbackThrowsComesOut) {
  const TemporaryFolder folder;
  {
    Profiler profiler(
        {.folder = folder.path(), .on_trace_ready = [](const std::string&) {
           throw std::runtime_error("the callback failed");
         }});
    EXPECT_EQ(message_of([&] { profiler.stop(); }), "the callback failed");
  }
  // Warmed up, and never started.
  {
    const Profiler waits(
        {.folder = folder.path(), .schedule = {{.warmup = 1}}});
  }
  Profiler profiler({.folder = folder.path()});
  profiler.stop();
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(Span::observed());
}

// As `lockstep profile` does. Records until something ends the profile.
ProfileOnDemand& profile_from_outside(const std::string& folder) {
  auto& asked = *ProfileOnDemand::provided();
  asked.ask({.folder = folder, .duration = std::chrono::hours(1)});
  asked.on_step(0);  // the warm-up
  asked.on_step(1);
  torch::ones({3}).add_(1);
  return asked;
}

void expect_written(const ProfileOnDemand& asked, const std::string& folder) {
  const auto progress = asked.progress();
  ASSERT_EQ(progress.state, ProfileState::written) << progress.words;
  EXPECT_THAT(Trace(folder + "/" + progress.words).counts("aten::"),
              Contains(Pair("aten::ones", 1)));
}

// The constructor threw out of the training loop.
TEST(Profiler, AProfileFromOutsideMakesWayForOneOfTheProgram) {
  const TemporaryFolder folder;
  auto& asked = profile_from_outside(folder.file("outside"));
  Profiler profiler({.folder = folder.file("own")});
  expect_written(asked, folder.file("outside"));
  profile_from_outside(folder.file("late"));
  EXPECT_EQ(asked.progress().state, ProfileState::failed);
  EXPECT_THAT(asked.progress().words, HasSubstr("profiles already"));
  profiler.stop();
  EXPECT_THAT(Trace(trace_of(folder.file("own"), 0, 0)).counts("aten::"),
              Contains(Pair("aten::ones", 1)));
}

// It went on for ever, and no other profile could begin.
TEST(Profiler, AProfileFromOutsideEndsWithItsThread) {
  const TemporaryFolder folder;
  for (const bool has_profiled : {false, true}) {
    std::thread([&] {
      // This decides which profiler's end comes first.
      if (has_profiled) Profiler({.folder = folder.file("before")}).stop();
      profile_from_outside(folder.path());
    }).join();
    expect_written(*ProfileOnDemand::provided(), folder.path());
    const Profiler next({.folder = folder.file("next")});
  }
}

// A rank that leaves by an exception does not wait for the others.
WORLD_TEST(Profiler, ARankThatThrowsWritesItsTraceAlone, 2) {
  auto group = init_process_group();
  const auto folder = shared_folder(world, "throws");
  try {
    Profiler profiler({.folder = folder});
    if (world.rank == 1) throw std::runtime_error("away");
    EXPECT_EQ(profiler.action(), ProfilerAction::record);
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(fs::exists(trace_of(folder, world.rank, 0)));
  barrier();
}

}  // namespace
}  // namespace lockstep::internal
