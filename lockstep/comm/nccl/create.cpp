#include "lockstep/comm/nccl/create.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/nccl/departure.h"

namespace lockstep::internal::nccl {
namespace {

class Nccl final : public c10d::ProcessGroupNCCL, public BackendTraits {
 public:
  Nccl(const BackendRequest& request, c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(request.store, request.rank, request.size,
                         std::move(options)),
        global_rank_(request.global_ranks.at(request.rank)) {}

  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // c10d's own destructor aborts pending operations, unless shutdown() was
  // called.
  ~Nccl() override {
    const bool alone = departure_ && departure_->seen();
    departure_.reset();
    if (aborted_) return;
    try {
      if (!alone) {
        shutdown();
        return;
      }
    } catch (const std::exception&) {
      // Operations of it have failed, and said so in c10d's log.
    }
    end();
  }

  void connect(const c10::Device& device) {
    eagerConnectSingleDevice(device);
    departure_ = std::make_unique<Departure>(
        store_, getSize(), [this](int rank) { abandon(rank); });
  }

  bool sums_sparse() const override { return false; }

  // The destructor does it, unless another rank has left.
  bool needs_shutdown() const override { return false; }

  void abort() override {
    if (aborted_) return;
    aborted_ = true;
    if (departure_) departure_->announce(global_rank_);
    end();
  }

 private:
  // Does what c10d does after an error of NCCL itself: the operations end with
  // this reason, and TORCH_NCCL_ASYNC_ERROR_HANDLING says what becomes of the
  // process. c10d's abort() would end them as if they had succeeded.
  void abandon(int rank) {
    try {
      abortComms(
          c10::str("rank ", rank, " left the group because of an error"));
    } catch (const std::exception&) {
      // NCCL could not abort: the timeout of the operations remains.
    }
  }

  void end() {
    try {
      ProcessGroupNCCL::abort();
    } catch (const std::exception&) {
      // The abort took longer than the group's timeout. A rank that calls
      // abort() has an error already.
    }
  }

  int global_rank_;
  bool aborted_ = false;
  std::unique_ptr<Departure> departure_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  const auto device = local_device();
  if (!device.is_cuda()) throw std::invalid_argument(missing());
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.global_ranks.begin(),
                                        request.global_ranks.end());
  // Must come before anything of CUDA is made, which would otherwise land on
  // device 0 on every rank.
  c10::cuda::set_device(device.index());
  auto backend = c10::make_intrusive<Nccl>(request, std::move(options));
  backend->setBoundDeviceId(device);
  // NCCL itself would wait for ever for a rank that does not come.
  gather_texts(request.members(), "lockstep/here/", "",
               Deadline::after(request.timeout));
  backend->connect(device);
  return backend;
}

std::string missing() {
  if (local_device().is_cuda()) return {};
  return "no GPU is visible here; check the driver (nvidia-smi) and "
         "CUDA_VISIBLE_DEVICES, or name a backend for CPUs, or none to choose "
         "by device";
}

}  // namespace lockstep::internal::nccl
