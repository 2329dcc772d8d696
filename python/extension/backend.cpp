#include "backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "interruption.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/comm/watched_store.h"
#include "lockstep/comm/work_queue.h"
#include "lockstep/worker/flight_dump.h"

namespace lockstep::internal::python {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using WorkPtr = Backend::WorkPtr;

// How long pending operations of a program that ends without an exception may
// go on. Such a program may have failed, too, and then peers may never come to
// these operations: sys.exit(1) looks here like any other end.
constexpr milliseconds kLastOperations{5'000};

// The state that the backends of this process share.
struct World {
  std::mutex mutex{};
  std::set<Backend*> backends{};
  // Those of the default group, as long as it lives.
  std::weak_ptr<LifeSigns> life_signs{};
};

World& world() {
  static auto* const instance = new World;  // outlives every backend
  return *instance;
}

StorePtr prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// Returns the group's part of the store, in which a C++ rank has its keys.
// torch.distributed gives each backend a part of that, "cpu/".
StorePtr part_of_group(const StorePtr& store) {
  const auto of_device =
      c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
  return of_device ? of_device->getUnderlyingStore() : store;
}

// A program may destroy its groups and make others in the same store, where the
// keys of the earlier ones still are. So each time has keys of its own, under a
// number that counts the joins of each rank. Ranks join equally often. The
// first time has the keys that a C++ rank expects.
StorePtr part_of_join(const StorePtr& store, int rank) {
  const auto joins = store->add("lockstep/joins/" + std::to_string(rank), 1);
  return joins == 1 ? store
                    : prefixed("join" + std::to_string(joins) + "/", store);
}

// Returns null if there is none, or if it has another backend.
std::shared_ptr<LifeSigns> life_signs_of_default() {
  const std::lock_guard lock(world().mutex);
  return world().life_signs.lock();
}

std::shared_ptr<LifeSigns> life_signs_for(const Request& request,
                                          bool default_group,
                                          const StorePtr& store) {
  if (!default_group) return life_signs_of_default();
  auto signs = std::make_shared<LifeSigns>(prefixed("lockstep/", store),
                                           request.rank, request.size,
                                           /*rank_zero_has_store=*/true);
  const std::lock_guard lock(world().mutex);
  world().life_signs = signs;
  return signs;
}

// As init_process_group() of C++ makes it, so that the ranks meet.
ProcessGroupPtr make_group(Request request) {
  const bool default_group = request.global_ranks.empty();
  if (default_group) {
    request.global_ranks.resize(request.size);
    std::iota(request.global_ranks.begin(), request.global_ranks.end(), 0);
    arm_flight_dump(request.rank, request.size);
  }
  const auto name = default_group ? kDefaultGroupName : request.group_name;
  const auto part = part_of_join(part_of_group(request.store), request.rank);
  const auto life_signs = life_signs_for(request, default_group, part);
  const auto watched =
      c10::make_intrusive<WatchedStore>(part, life_signs, request.global_ranks);
  GroupInside::Backends backends;
  const auto entry = resolve_backends("cpu:" + request.kind).at(c10::kCPU);
  try {
    backends.emplace(c10::kCPU,
                     entry->create({.store = prefixed("cpu/", watched),
                                    .rank = request.rank,
                                    .size = request.size,
                                    .timeout = request.timeout,
                                    .group_name = request.group_name,
                                    .global_ranks = request.global_ranks}));
    if (default_group) life_signs->learn_all();
  } catch (const std::exception& error) {
    watched->give_up(c10::str("rank ", request.global_ranks[request.rank],
                              " gave up: ", words_of(error)));
    throw;
  }
  return ProcessGroupPtr(std::make_shared<GroupInside>(
      name, request.rank, request.global_ranks, request.timeout,
      GroupInside::Generation{.store = prefixed("lockstep/", watched),
                              .life_signs = life_signs,
                              .backends = std::move(backends)},
      "cpu:" + request.kind, /*checks_calls=*/false));
}

// A work of the library as torch.distributed expects it.
class Work final : public c10d::Work {
 public:
  Work(int rank, WorkPtr work, ProcessGroupPtr group)
      : c10d::Work(rank, work->retrieveOpType()),
        work_(std::move(work)),
        group_(std::move(group)) {}
  ~Work() override {
    // A message that goes on waits for the group's thread.
    const WithoutGil without_gil;
    work_.reset();
    group_.reset();
  }

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override {
    return group_->group_rank(work_->sourceRank());
  }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { wait(::kNoTimeout); }
  bool wait(milliseconds timeout) override {
    return interruptible([&] { return work_->wait(timeout); });
  }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return work_->getFuture();
  }
  uint64_t getSequencenumber() const override {
    return work_->getSequencenumber();
  }

 private:
  WorkPtr work_;
  ProcessGroupPtr group_;
};

const at::Tensor& single(const char* operation, const Backend::Tensors& list) {
  if (list.size() != 1) {
    throw std::invalid_argument(c10::str(operation, ": the list holds ",
                                         list.size(),
                                         " tensors; give one for this rank"));
  }
  return list[0];
}

const Backend::Tensors& single(const char* operation,
                               const Backend::TensorLists& lists) {
  if (lists.size() != 1) {
    throw std::invalid_argument(
        c10::str(operation, ": ", lists.size(), " lists were given; give one"));
  }
  return lists[0];
}

// Only the root has a list; the other ranks have none, or an empty one.
at::TensorList if_any(const Backend::TensorLists& lists) {
  return lists.empty() ? at::TensorList() : at::TensorList(lists[0]);
}

}  // namespace

template <typename LockstepOptions, typename Given>
LockstepOptions Backend::options_of(const Given& given) const {
  LockstepOptions options{};
  options.group = group_;
  options.async_op = given.asyncOp;
  // torch.distributed allows a timeout of 0.
  options.timeout = given.timeout == c10d::kUnsetTimeout
                        ? timeout_.load()
                        : std::max(given.timeout, milliseconds(1));
  return options;
}

template <typename Given>
ReductionOptions Backend::reduction_of(const Given& given) const {
  auto options = options_of<ReductionOptions>(given);
  options.op = given.reduceOp == c10d::ReduceOp::PREMUL_SUM
                   ? c10d::ReduceOp(c10d::ReduceOp::SUM)
                   : given.reduceOp;
  return options;
}

namespace {

// Returns `input` multiplied by the factor of PREMUL_SUM; with another
// operation, `input` itself.
at::Tensor multiplied(const c10d::ReduceOp& op, const at::Tensor& input) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return input;
  const auto* by =
      dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (by == nullptr) {
    throw std::invalid_argument(
        "PREMUL_SUM has no factor; make it by "
        "torch.distributed._make_nccl_premul_sum(factor)");
  }
  const auto dtype = input.scalar_type();
  if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) {
    throw std::invalid_argument(
        c10::str("PREMUL_SUM multiplies tensors of floating-point and complex "
                 "numbers, and this one is ",
                 dtype, "; convert it, or use SUM"));
  }
  const c10::NoGradGuard no_grad;
  if (!by->tensor_factor.defined()) return input.mul(by->double_factor);
  // A factor without dimensions changes neither the shape nor the dtype.
  return input.mul(by->tensor_factor.reshape({}));
}

// Does the same in the memory of `tensor`, which is reduced in place.
const at::Tensor& multiply(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const c10::NoGradGuard no_grad;
    tensor.copy_(multiplied(op, tensor));
  }
  return tensor;
}

Backend::Tensors multiplied(const c10d::ReduceOp& op,
                            const Backend::Tensors& inputs) {
  Backend::Tensors all;
  for (const auto& input : inputs) all.push_back(multiplied(op, input));
  return all;
}

}  // namespace

template <typename Operation>
WorkPtr Backend::run(const Operation& operation) const {
  auto work = interruptible(operation);
  // A synchronous operation has ended, and has no work.
  if (!work) return completed_work();
  return c10::make_intrusive<Work>(getRank(), std::move(work), group_);
}

template <typename Operation>
WorkPtr Backend::collect(const Operation& operation) {
  collectives_.fetch_add(1, std::memory_order_relaxed);
  return run(operation);
}

template <typename Operation>
WorkPtr Backend::collect_each(size_t count, const Operation& operation) {
  return collect([&]() -> WorkPtr {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < count; ++i) {
      if (auto work = operation(i)) works.push_back(std::move(work));
    }
    return works.empty() ? nullptr : join_works(std::move(works));
  });
}

Backend::Backend(Request request)
    : c10d::Backend(request.rank, request.size),
      kind_(request.kind),
      default_group_(request.global_ranks.empty()),
      timeout_(request.timeout),
      group_(interruptible([&] { return make_group(std::move(request)); })),
      life_signs_(default_group_ ? life_signs_of_default() : nullptr) {
  const std::lock_guard lock(world().mutex);
  world().backends.insert(this);
}

Backend::~Backend() {
  {
    const std::lock_guard lock(world().mutex);
    world().backends.erase(this);
  }
  const WithoutGil without_gil;
  if (aborted_) {
    // Gloo would wait for its peers for ever.
    (void)std::make_unique<ProcessGroupPtr>(group_).release();
    return;
  }
  leave();
}

const std::string Backend::getBackendName() const {
  return kind_ == "shm" ? "lockstep_shm" : kind_;
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(getBackendName(), timeout_);
  options->group_name = group_->name();
  for (const int rank : group_->global_ranks()) {
    options->global_ranks_in_group.push_back(rank);
  }
  return options;
}

void Backend::setTimeout(milliseconds timeout) { timeout_ = timeout; }

c10d::ErrorType Backend::getError() {
  return group_->failed_peers().empty() ? c10d::ErrorType::SUCCESS
                                        : c10d::ErrorType::REMOTE_ERROR;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  std::vector<int> global_ranks;
  for (const int rank : ranks) global_ranks.push_back(global(rank));
  // Each backend of a group gets a part of the group's store.
  return c10::make_intrusive<Backend>(Request{
      .kind = kind_,
      .store = prefixed("cpu/", prefixed(options->group_name + "/", store)),
      .rank = static_cast<int>(own - ranks.begin()),
      .size = static_cast<int>(ranks.size()),
      .timeout = options->timeout,
      .group_name = options->group_name,
      .global_ranks = std::move(global_ranks)});
}

bool Backend::supportsTensorAlloc(c10::DeviceIndex device) {
  return inside(group_).backend(c10::kCPU).supportsTensorAlloc(device);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  auto& backend = inside(group_).backend(c10::kCPU);
  // The backend refuses other devices and sizes.
  if (size < 1 || !options.device().is_cpu()) {
    return backend.allocateTensor(size, options);
  }
  return memory_->get(size, options,
                      [&](long count, const at::TensorOptions& as) {
                        return backend.allocateTensor(count, as);
                      });
}

WorkPtr Backend::allreduce(Tensors& tensors,
                           const c10d::AllreduceOptions& options) {
  const auto& tensor =
      multiply(options.reduceOp, single("all_reduce", tensors));
  return collect([&] { return all_reduce(tensor, reduction_of(options)); });
}

WorkPtr Backend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& tensor : tensors) multiply(options.reduceOp, tensor);
  return collect(
      [&] { return all_reduce_coalesced(tensors, reduction_of(options)); });
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto& tensor = multiply(options.reduceOp, single("reduce", tensors));
  return collect([&] {
    return lockstep::reduce(tensor, global(options.rootRank),
                            reduction_of(options));
  });
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                const c10d::ReduceScatterOptions& options) {
  const auto list =
      multiplied(options.reduceOp, single("reduce_scatter", inputs));
  return collect([&] {
    return lockstep::reduce_scatter(single("reduce_scatter", outputs), list,
                                    reduction_of(options));
  });
}

WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  return collect([&] {
    return reduce_scatter_tensor(output, multiplied(options.reduceOp, input),
                                 reduction_of(options));
  });
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  return collect_each(inputs.size(), [&](size_t i) {
    return reduce_scatter_tensor(outputs.at(i),
                                 multiplied(options.reduceOp, inputs[i]),
                                 reduction_of(options));
  });
}

WorkPtr Backend::broadcast(Tensors& tensors,
                           const c10d::BroadcastOptions& options) {
  return collect([&] {
    return lockstep::broadcast(single("broadcast", tensors),
                               global(options.rootRank),
                               options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& options) {
  return collect([&] {
    return all_gather(single("all_gather", outputs),
                      single("all_gather", inputs),
                      options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& options) {
  return collect([&] {
    return all_gather_into_tensor(output, input,
                                  options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  return collect([&] {
    return all_gather_coalesced(outputs, inputs,
                                options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return collect_each(inputs.size(), [&](size_t i) {
    return all_gather_into_tensor(outputs.at(i), inputs[i],
                                  options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                        const c10d::GatherOptions& options) {
  return collect([&] {
    return lockstep::gather(single("gather", inputs), if_any(outputs),
                            global(options.rootRank),
                            options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ScatterOptions& options) {
  return collect([&] {
    return lockstep::scatter(single("scatter", outputs), if_any(inputs),
                             global(options.rootRank),
                             options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                          const c10d::AllToAllOptions& options) {
  return collect([&] {
    return all_to_all(outputs, inputs, options_of<CollectiveOptions>(options));
  });
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& options) {
  return collect([&] {
    auto all = options_of<AllToAllSingleOptions>(options);
    all.output_split_sizes = output_splits;
    all.input_split_sizes = input_splits;
    return all_to_all_single(output, input, all);
  });
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return collect([&] {
    return lockstep::barrier(options_of<CollectiveOptions>(options));
  });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options,
                               bool /*wait_all_ranks*/) {
  interruptible([&] {
    const auto all = options_of<CollectiveOptions>(options);
    monitored_barrier({.group = all.group, .timeout = all.timeout});
  });
}

WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return run([&] {
    return isend(single("send", tensors), global(to),
                 {.group = group_, .tag = tag, .timeout = timeout_});
  });
}

WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return run([&] {
    return irecv(single("recv", tensors), global(from),
                 {.group = group_, .tag = tag, .timeout = timeout_});
  });
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return run([&] {
    return irecv(single("recv", tensors), kAnySource,
                 {.group = group_, .tag = tag, .timeout = timeout_});
  });
}

void Backend::abort() {
  if (life_signs_) life_signs_->leave(LifeSigns::End::failed);
  aborted_ = true;
  memory_->close();
  group_->abort();
}

void Backend::shutdown_within(milliseconds limit) {
  if (aborted_ || left_) return;
  try {
    await_pending(limit);
  } catch (const std::exception&) {
    try {
      abort();
    } catch (const std::exception&) {
      // The peers are told by the life sign.
    }
    raise_from_handler();
    return;
  }
  leave();
}

void Backend::sign_off() {
  if (life_signs_ && !inside(group_).is_foreign()) {
    life_signs_->leave(LifeSigns::End::left);
  }
}

void Backend::await_pending(milliseconds limit) const {
  if (inside(group_).is_foreign()) return;
  auto& backend = inside(group_).backend(c10::kCPU);
  // Gloo's operations do not delay leave().
  if (dynamic_cast<const PeerNotices*>(&backend) == nullptr) return;
  // This operation has nothing to do when its turn comes after all that are
  // pending. Unlike the wait in leave(), the wait for a turn looks for signals.
  Tensors nothing;
  c10d::AllreduceCoalescedOptions options;
  options.timeout = std::max(limit, milliseconds(1));
  options.asyncOp = false;
  backend.allreduce_coalesced(nothing, options);
}

void Backend::leave() {
  left_ = true;
  sign_off();
  memory_->close();
  inside(group_).leave();
}

int Backend::global(int64_t rank) const {
  return group_->global_rank(static_cast<int>(rank));
}

void leave_all(bool failed) {
  std::set<Backend*> backends;
  {
    const std::lock_guard lock(world().mutex);
    backends = world().backends;
  }
  const auto deadline = Deadline::after(kLastOperations);
  std::exception_ptr interruption;
  for (auto* const backend : backends) {
    if (failed) {
      backend->abort();
      continue;
    }
    try {
      backend->shutdown_within(deadline.remaining());
    } catch (const std::exception&) {
      interruption = std::current_exception();
      failed = true;
    }
  }
  if (interruption) std::rethrow_exception(interruption);
}

}  // namespace lockstep::internal::python
