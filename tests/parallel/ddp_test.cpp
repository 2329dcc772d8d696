#include "lockstep/parallel/ddp/distributed_data_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/trace/span.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width = 4, int64_t out = 1) {
    first = register_module("first", torch::nn::Linear(3, width));
    second = register_module("second", torch::nn::Linear(width, out));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(torch::tanh(first(x)));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

torch::Tensor batch(int rank, int64_t rows = 4) {
  torch::manual_seed(100 + rank);
  return torch::randn({rows, 3});
}

// Returns the mean over the ranks of the gradients of one parameter set on each
// rank's batch, all computed by this rank.
std::vector<torch::Tensor> mean_gradients(Net& net, int world_size) {
  std::vector<torch::Tensor> mean;
  for (auto& p : net->parameters()) mean.push_back(torch::zeros_like(p));
  for (int rank = 0; rank < world_size; ++rank) {
    auto grads = torch::autograd::grad({net->forward(batch(rank)).sum()},
                                       net->parameters());
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += grads[i] / world_size;
    }
  }
  return mean;
}

void expect_gradients(const Net& net, const std::vector<torch::Tensor>& want,
                      const char* when) {
  auto parameters = net->parameters();
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_TRUE(torch::allclose(parameters[i].grad(), want[i], 1e-5, 1e-6))
        << when << ", parameter " << i << "\n"
        << parameters[i].grad() << "\nwanted\n"
        << want[i];
  }
}

WORLD_TEST(DistributedDataParallel, GivesEveryRankTheModelOfRankZero, 1, 2, 3) {
  auto group = init_process_group("gloo");
  torch::manual_seed(world.rank);
  Net net;
  DistributedDataParallel<Net> model(net);
  torch::manual_seed(0);
  Net first;
  for (auto& p : first->named_parameters()) {
    EXPECT_TRUE(model->named_parameters()[p.key()].equal(p.value()));
  }
}

WORLD_TEST(DistributedDataParallel, AveragesGradientsHoweverTheyAreZeroed, 1, 2,
           3) {
  auto group = init_process_group("gloo");
  torch::manual_seed(0);
  Net net;
  DistributedDataParallel<Net> model(net, {.first_bucket_mb = 1e-5});
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 6; ++step) {
    bool set_to_none = step % 3 != 2;
    optimizer.zero_grad(set_to_none);
    auto want = mean_gradients(net, world.size);
    model(batch(world.rank)).sum().backward();
    expect_gradients(net, want, set_to_none ? "set to none" : "zeroed");
    for (auto& p : net->parameters()) {
      EXPECT_FALSE(p.grad().is_view());
      EXPECT_FALSE(p.grad().requires_grad());
    }
    optimizer.step();
  }
}

WORLD_TEST(DistributedDataParallel, AccumulatesOverBackwardsWithoutZeroGrad,
           2) {
  auto group = init_process_group("gloo");
  torch::manual_seed(0);
  Net net;
  DistributedDataParallel<Net> model(net);
  auto once = mean_gradients(net, world.size);
  auto sum = once;
  // Before and after the buckets are rebuilt.
  for (int round = 1; round <= 3; ++round) {
    model(batch(world.rank)).sum().backward();
    expect_gradients(net, sum, "accumulated");
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + once[i];
  }
}

WORLD_TEST(DistributedDataParallel, NoSyncAccumulatesOnThisRankOnly, 2, 3) {
  auto group = init_process_group("gloo");
  torch::manual_seed(0);
  Net net;
  DistributedDataParallel<Net> model(net);
  for (bool set_to_none : {true, true, false}) {
    net->zero_grad(set_to_none);
    auto twice = mean_gradients(net, world.size);
    for (auto& grad : twice) grad *= 2;
    {
      auto guard = model.no_sync();
      model(batch(world.rank)).sum().backward();
    }
    auto local = torch::autograd::grad({net->forward(batch(world.rank)).sum()},
                                       net->parameters());
    expect_gradients(net, local, "under no_sync");
    model(batch(world.rank)).sum().backward();
    expect_gradients(net, twice, "after no_sync");
  }
}

WORLD_TEST(DistributedDataParallel, ClippingSeesTheAveragedGradients, 2) {
  auto group = init_process_group("gloo");
  torch::manual_seed(0);
  Net net;
  DistributedDataParallel<Net> model(net);
  auto want = mean_gradients(net, world.size);
  double squares = 0;
  for (auto& g : want) squares += g.pow(2).sum().item<double>();
  model(batch(world.rank)).sum().backward();
  double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
  EXPECT_NEAR(norm, std::sqrt(squares), 1e-5);
}

// The gradients come in another order on each rank.
WORLD_TEST(DistributedDataParallel, RebuildsBucketsInRankZerosOrder, 2, 3) {
  struct EitherWayImpl : torch::nn::Module {
    explicit EitherWayImpl(bool last_is_first) : is_last_first(last_is_first) {
      torch::manual_seed(3);
      last = register_module("last", torch::nn::Linear(3, 3));
      first = register_module("first", torch::nn::Linear(3, 3));
    }
    torch::Tensor forward(torch::Tensor x) {
      return is_last_first ? first(last(x)) : last(first(x));
    }
    bool is_last_first;
    torch::nn::Linear last{nullptr}, first{nullptr};
  };
  // All ranks register the layers in one order; rank 0 alone uses them in the
  // other.
  const auto made_by = [](int rank) {
    return std::make_shared<EitherWayImpl>(/*last_is_first=*/rank != 0);
  };
  const auto gradients_of = [&](int rank) {
    auto net = made_by(rank);
    net->forward(batch(rank)).square().sum().backward();
    std::vector<torch::Tensor> all;
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.grad());
    }
    return all;
  };
  for (const char* backend : {"lockstep", "gloo"}) {
    SCOPED_TRACE(backend);
    auto group = init_process_group(backend);
    auto net = made_by(world.rank);
    DistributedDataParallel<std::shared_ptr<EitherWayImpl>> model(
        net, {.bucket_cap_mb = 40.0 / (1 << 20), .first_bucket_mb = 1e-5});
    // One bucket has all parameters until an order is known.
    EXPECT_THAT(model.bucket_names(),
                ElementsAre(ElementsAre("last.weight", "last.bias",
                                        "first.weight", "first.bias")));
    model(batch(world.rank)).square().sum().backward();
    {
      auto guard = model.no_sync();  // any forward in training
      model(batch(world.rank));
    }
    // A bias has 12 bytes, a weight 36.
    EXPECT_THAT(model.bucket_names(),
                ElementsAre(ElementsAre("last.bias"),
                            ElementsAre("last.weight", "first.bias"),
                            ElementsAre("first.weight")));
    net->zero_grad();
    model(batch(world.rank)).square().sum().backward();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      auto mean = torch::zeros_like(net->parameters()[i]);
      for (int rank = 0; rank < world.size; ++rank) {
        mean += gradients_of(rank)[i] / world.size;
      }
      EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), mean));
    }
  }
}

WORLD_TEST(DistributedDataParallel, BucketLimitsDefaultAsPythons, 2) {
  auto group = init_process_group("gloo");
  // A layer has 0.6 MiB.
  auto buckets = [&](const DistributedDataParallelOptions& options) {
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) {
      net->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(396, 396).bias(false)));
    }
    DistributedDataParallel<torch::nn::Sequential> model(net, options);
    for (int i = 0; i < 2; ++i) {
      model(torch::ones({1, 396})).sum().backward();
    }
    return model.bucket_names();
  };
  // The limit is 1 MiB for the first bucket, then 25.
  EXPECT_THAT(buckets({}), ElementsAre(ElementsAre("3.weight", "2.weight"),
                                       ElementsAre("1.weight", "0.weight")));
  // If one limit is given, it holds for all buckets.
  EXPECT_THAT(
      buckets({.bucket_cap_mb = 25}),
      ElementsAre(ElementsAre("3.weight", "2.weight", "1.weight", "0.weight")));
  EXPECT_THAT(buckets({.bucket_cap_mb = 25, .first_bucket_mb = 0.5}),
              ElementsAre(ElementsAre("3.weight"),
                          ElementsAre("2.weight", "1.weight", "0.weight")));
}

WORLD_TEST(DistributedDataParallel, BuffersFollowRankZero, 2) {
  auto group = init_process_group("gloo");
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  DistributedDataParallel<torch::nn::Sequential> model(net);
  for (int step = 0; step < 3; ++step) {
    model(batch(world.rank)).sum().backward();
  }
  torch::NoGradGuard no_grad;
  model(batch(world.rank));  // begins with rank 0's, then adds one batch
  auto count = net->named_buffers()["1.num_batches_tracked"];
  EXPECT_EQ(count.item<int64_t>(), 4);
  net->eval();
  auto mean = net->named_buffers()["1.running_mean"];
  std::vector<at::Tensor> means{at::empty_like(mean), at::empty_like(mean)};
  all_gather(means, mean);
  EXPECT_FALSE(means[0].equal(means[1]));  // 4th forward's batch
  torch::AutoGradMode grad(true);
  model(batch(world.rank));
  model(batch(world.rank));
  all_gather(means, mean);
  EXPECT_TRUE(means[0].equal(means[1]));
}

WORLD_TEST(DistributedDataParallel, BuffersMayTravelBeforeABackward, 2) {
  auto group = init_process_group("gloo");
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  DistributedDataParallel<torch::nn::Sequential> model(net);
  // The second forward overwrites the buffers that the first one's graph holds.
  auto first = model(batch(world.rank)).sum();
  (first + model(batch(world.rank)).sum()).backward();
}

WORLD_TEST(DistributedDataParallel, BuffersOfAnyDtypeTravel, 2) {
  auto group = init_process_group("gloo");
  Net net;
  std::vector<torch::Tensor> buffers;
  for (auto dtype :
       {torch::kByte, torch::kShort, torch::kLong, torch::kBool, torch::kHalf,
        torch::kBFloat16, torch::kComplexFloat, torch::kFloat8_e4m3fn}) {
    for (int64_t size : {0, 1, 3}) {
      buffers.push_back(net->register_buffer(
          "buffer" + std::to_string(buffers.size()),
          torch::full({size}, world.rank == 0 ? 1 : 0).to(dtype)));
    }
  }
  buffers.push_back(net->register_buffer(
      "strided", torch::full({2, 3}, 1 - world.rank, torch::kFloat).t()));
  DistributedDataParallel<Net> model(net);
  for (const auto& buffer : buffers) {
    EXPECT_TRUE(buffer.to(torch::kComplexFloat).eq(1).all().item<bool>())
        << buffer;
  }
}

WORLD_TEST(DistributedDataParallel, BuffersStayLocalWhereNotBroadcast, 2) {
  auto group = init_process_group("gloo");
  Net net;
  auto mine = net->register_buffer("mine", torch::full({1}, world.rank));
  DistributedDataParallel<Net> model(net, {.broadcast_buffers = false});
  model(batch(0)).sum().backward();
  EXPECT_EQ(mine.item<int64_t>(), world.rank);
}

WORLD_TEST(DistributedDataParallel, TiedParametersCountOnce, 2) {
  auto group = init_process_group("gloo");
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      first = register_parameter("first", torch::ones({3, 3}));
      tied = register_parameter("tied", first);
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return x.mm(first).tanh().mm(tied);
    }
    torch::Tensor first, tied;
  };
  auto net = std::make_shared<TiedImpl>();
  DistributedDataParallel<std::shared_ptr<TiedImpl>> model(net);
  EXPECT_THAT(model.bucket_names(), ElementsAre(ElementsAre("first")));
  auto want = torch::zeros({3, 3});
  for (int rank = 0; rank < world.size; ++rank) {
    want += torch::autograd::grad({net->forward(batch(rank)).sum()},
                                  {net->first})[0] /
            world.size;
  }
  model(batch(world.rank)).sum().backward();
  EXPECT_TRUE(torch::allclose(net->first.grad(), want));
}

WORLD_TEST(DistributedDataParallel, ADifferentShapeNamesRankAndParameter, 2,
           3) {
  auto group = init_process_group("gloo");
  auto wrap = [&] {
    DistributedDataParallel<Net> model(Net(4, world.rank == 1 ? 2 : 1));
  };
  EXPECT_THAT(wrap, ThrowsMessage<std::invalid_argument>(AllOf(
                        HasSubstr("rank 1 has"), HasSubstr("'second.weight'"),
                        HasSubstr("[2, 4]"), HasSubstr("[1, 4]"))));
}

WORLD_TEST(DistributedDataParallel, AMissingParameterNamesRankAndParameter, 2) {
  auto group = init_process_group("gloo");
  torch::nn::Sequential net(torch::nn::Linear(3, 3));
  if (world.rank == 1) net->push_back(torch::nn::Linear(3, 3));
  auto wrap = [&] {
    DistributedDataParallel<torch::nn::Sequential> model(net);
  };
  EXPECT_THAT(wrap, ThrowsMessage<std::invalid_argument>(
                        AllOf(HasSubstr("no parameter number 2"),
                              HasSubstr("rank 1 has parameter '1.weight'"))));
}

// Python's check would not notice these differences.
WORLD_TEST(DistributedDataParallel, OtherDifferencesAreNamedOnEveryRank, 2, 3) {
  auto group = init_process_group("gloo");
  auto last = world.size - 1;
  auto rank = "rank " + std::to_string(last) + " has ";
  auto expect_refused = [&](const Net& net, const std::string& words) {
    EXPECT_THAT([&] { DistributedDataParallel<Net> model(net); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(HasSubstr("rank 0 has "), HasSubstr(rank + words))));
  };
  Net other;
  if (world.rank == last) other->to(torch::kDouble);
  expect_refused(other, "parameter 'first.weight' of Double[4, 3]");
  Net frozen;
  if (world.rank == last) frozen->first->bias.requires_grad_(false);
  expect_refused(frozen, "parameter 'first.bias' of Float[4] without grad");
  Net renamed;
  renamed->register_parameter(world.rank == last ? "b" : "a", torch::ones({1}));
  expect_refused(renamed, "parameter 'b'");
  Net transposed;
  auto square = torch::ones({2, 2});
  transposed->register_parameter("square",
                                 world.rank == last ? square.t() : square);
  expect_refused(transposed, "parameter 'square' of Float[2, 2] with strides");
  Net buffered;
  if (world.rank != last) buffered->register_buffer("count", torch::ones({1}));
  expect_refused(buffered, "no buffer number 4");
  // The group still works.
  DistributedDataParallel<Net> model((Net()));
  model(batch(world.rank)).sum().backward();
}

// Applies what is set when this rank next asks for something: set() of a
// TCPStore does not wait for an answer, so others may ask before it has
// arrived.
class LateStore : public c10d::PrefixStore {
 public:
  using PrefixStore::compareSet;
  using PrefixStore::PrefixStore;
  using PrefixStore::wait;
  ~LateStore() override { arrive(); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    const std::lock_guard lock(mutex_);
    under_way_.emplace_back(key, value);
  }
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override {
    arrive();
    return PrefixStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    arrive();
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    arrive();
    return PrefixStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    arrive();
    return PrefixStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    arrive();
    PrefixStore::wait(keys, timeout);
  }

 private:
  void arrive() {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, value] : under_way_) PrefixStore::set(key, value);
    under_way_.clear();
  }
  std::mutex mutex_;
  std::vector<std::pair<std::string, std::vector<uint8_t>>> under_way_;
};

// Regression: on a busy machine a rank went on, and waited for ever, if it
// asked whether the models differ before the store had been told.
WORLD_TEST(DistributedDataParallel, ADifferenceThatTheStoreHearsLateIsNamed,
           2) {
  auto group = init_process_group(
      "gloo", {.timeout = std::chrono::seconds(60),
               .world_size = world.size,
               .rank = world.rank,
               .store = c10::make_intrusive<LateStore>(
                   "", c10::make_intrusive<c10d::FileStore>(
                           world.folder / "late", world.size))});
  Net other;
  if (world.rank == 1) other->to(torch::kDouble);
  EXPECT_THAT([&] { DistributedDataParallel<Net> model(other); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("rank 0 has "),
                        HasSubstr("rank 1 has parameter 'first.weight' of "
                                  "Double[4, 3]"))));
}

// Rank 0 begins as Python's DistributedDataParallel does, which tells nothing
// of its model through the store.
WORLD_TEST(DistributedDataParallel, ADifferenceBesideAPythonRankIsNamed, 3) {
  auto group = init_process_group("gloo");
  const auto short_of_time =
      new_group({}, {.timeout = std::chrono::seconds(3)});
  if (world.rank == 0) {
    std::vector<at::Tensor> counts(world.size);
    for (auto& each : counts) each = torch::zeros({1}, torch::kLong);
    all_gather(counts, torch::full({1}, 4), {.group = short_of_time});
  } else {
    Net other;
    if (world.rank == 2) other->to(torch::kDouble);
    EXPECT_THAT(
        [&] {
          DistributedDataParallel<Net> model(other,
                                             {.process_group = short_of_time});
        },
        ThrowsMessage<std::invalid_argument>(
            HasSubstr("rank 1 has parameter 'first.weight' of Float[4, 3], "
                      "rank 2 has parameter 'first.weight' of Double[4, 3]")));
  }
  barrier();
}

WORLD_TEST(DistributedDataParallel, AnUnusedParameterIsNamed, 1, 2) {
  auto group = init_process_group("gloo");
  Net net;
  net->register_parameter("spare", torch::ones({2}));
  DistributedDataParallel<Net> model(net);
  auto step = [&] { model(batch(world.rank)).sum().backward(); };
  EXPECT_THAT(step, ThrowsMessage<std::runtime_error>(
                        AllOf(HasSubstr("rank " + std::to_string(world.rank)),
                              HasSubstr("'spare'"))));
}

WORLD_TEST(DistributedDataParallel, FrozenParametersStayLocal, 2) {
  auto group = init_process_group("gloo");
  Net net;
  for (auto& p : net->first->parameters()) p.requires_grad_(false);
  DistributedDataParallel<Net> model(net);
  EXPECT_THAT(model.bucket_names(),
              ElementsAre(ElementsAre("second.weight", "second.bias")));
  model(batch(world.rank)).sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
  net->second->weight.requires_grad_(false);
  net->second->bias.requires_grad_(false);
  EXPECT_THAT([&] { DistributedDataParallel<Net> frozen(net); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("no parameter")));
}

WORLD_TEST(DistributedDataParallel, TakesAnyArgumentsAndResults, 2) {
  auto group = init_process_group("gloo");
  struct PairImpl : torch::nn::Module {
    PairImpl() { layer = register_module("layer", torch::nn::Linear(3, 1)); }
    std::pair<torch::Tensor, int> forward(const torch::Tensor& x, int times,
                                          std::unique_ptr<int> moved) {
      return {layer(x) * times, *moved};
    }
    torch::nn::Linear layer{nullptr};
  };
  DistributedDataParallel<std::shared_ptr<PairImpl>> model(
      std::make_shared<PairImpl>());
  auto [out, number] = model(batch(0), 2, std::make_unique<int>(7));
  EXPECT_EQ(number, 7);
  out.sum().backward();
  EXPECT_TRUE(model.module()->layer->weight.grad().defined());
}

WORLD_TEST(DistributedDataParallel, TakesLibTorchsOtherResults, 2) {
  const auto x = torch::ones({4, 3}) * (world.rank + 1);
  auto group = init_process_group();
  torch::nn::AdaptiveLogSoftmaxWithLoss softmax(
      torch::nn::AdaptiveLogSoftmaxWithLossOptions(8, 6, {2}));
  DistributedDataParallel<torch::nn::AdaptiveLogSoftmaxWithLoss> classifier(
      softmax);
  // In C++ the loss of an ASMoutput is a number, without a graph.
  (-classifier(torch::ones({4, 8}) * (world.rank + 1),
               torch::tensor({0, 1, 2, 5}))
        .output.mean())
      .backward();
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::LSTM(2, 2));
  DistributedDataParallel<torch::nn::Sequential> recurrent(net);
  using State = std::tuple<torch::Tensor, torch::Tensor>;
  const auto [output, state] =
      recurrent.forward<std::tuple<torch::Tensor, State>>(x.unsqueeze(0));
  output.sum().backward();
  for (const auto& parameters : {softmax->parameters(), net->parameters()}) {
    for (const auto& parameter : parameters) {
      auto mean = parameter.grad().clone();
      all_reduce(mean, {.op = ReduceOp::AVG});
      EXPECT_TRUE(parameter.grad().allclose(mean));
    }
  }
}

WORLD_TEST(DistributedDataParallel, ALeftWrapperLeavesNoHooks, 2) {
  auto group = init_process_group("gloo");
  Net net;
  { DistributedDataParallel<Net> model(net); }
  if (world.rank == 0) net->forward(batch(0)).sum().backward();
  barrier();
}

WORLD_TEST(DistributedDataParallel, MistakesInOptionsAreNamed, 1) {
  EXPECT_THAT([] { DistributedDataParallel<Net> model((Net())); },
              ThrowsMessage<std::runtime_error>(HasSubstr("not initialised")));
  auto group = init_process_group("gloo");
  EXPECT_THAT(
      [] { DistributedDataParallel<Net> model(Net(), {.bucket_cap_mb = 0}); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("bucket_cap_mb is 0")));
}

// Records the spans of a step in the order of their begins, without the waits
// for collectives, which may have ended already.
class StepObserver final : public SpanObserver {
 public:
  void on_begin(const SpanBegin& begin) noexcept override {
    if (begin.category == "comm" && begin.name == "wait") return;
    std::lock_guard lock(mutex_);
    names_.push_back(std::string(begin.category) + " " +
                     std::string(begin.name));
    open_.insert(begin.id);
  }
  void on_end(const SpanEnd& end) noexcept override {
    std::lock_guard lock(mutex_);
    open_.erase(end.id);
  }
  std::vector<std::string> take_names() {
    std::lock_guard lock(mutex_);
    return std::exchange(names_, {});
  }
  size_t still_open() {
    std::lock_guard lock(mutex_);
    return open_.size();
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> names_;
  std::set<uint64_t> open_;
};

WORLD_TEST(DistributedDataParallel, SpansTellOfBackwardAndItsReductions, 2) {
  auto group = init_process_group("gloo");
  DistributedDataParallel<Net> model(Net(), {.bucket_cap_mb = 1e-6});
  auto observer = std::make_shared<StepObserver>();
  SpanSubscription subscription(observer);

  model(batch(world.rank)).sum().backward();
  EXPECT_THAT(observer->take_names(),
              ElementsAre("ddp backward", "ddp publish_bucket",
                          "comm all_reduce", "ddp wait"));
  model->zero_grad();
  auto output = model(batch(world.rank));
  EXPECT_THAT(
      observer->take_names(),
      ElementsAre("ddp rebuild_buckets", "comm broadcast", "comm broadcast"));
  output.sum().backward();
  // Each parameter has a bucket of its own now.
  EXPECT_THAT(
      observer->take_names(),
      ElementsAre("ddp backward", "ddp publish_bucket", "comm all_reduce",
                  "ddp publish_bucket", "comm all_reduce", "ddp publish_bucket",
                  "comm all_reduce", "ddp publish_bucket", "comm all_reduce",
                  "ddp wait"));
  EXPECT_EQ(observer->still_open(), 0);
}

}  // namespace
}  // namespace lockstep::internal
