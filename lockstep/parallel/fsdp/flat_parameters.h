#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collective_options.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/fsdp/fully_shard_options.h"
#include "lockstep/state/box.h"

namespace lockstep::internal {

class ShardedUnit;

// How the .grad of a shard was used through data(), which version counters of
// the gradient do not see.
struct GradientDataUse {
  c10::VariableVersion written{0};  // of what data() returned
  int reads = 0;                    // calls of data() before the first write
};

// A parameter that a unit will shard, and every place where it is registered.
struct FoundParameter {
  struct Place {
    torch::nn::Module* module;
    std::string key;
  };
  std::string name;  // in the unit's module
  at::Tensor tensor;
  std::vector<Place> places;
};

// Buffers of full parameters and gradients that are not in use at the moment,
// for the next unit: fresh memory would cost a page fault for every 4 KiB.
class BufferPool {
 public:
  explicit BufferPool(ProcessGroupPtr group) : group_(std::move(group)) {}
  // Returns a tensor [count], from memory that the group's ranks share if there
  // is any.
  at::Tensor take(int64_t count, const at::TensorOptions& options);
  void give_back(at::Tensor buffer);
  void clear() { idle_.clear(); }

 private:
  // A unit computes while the next one is gathered, so two are kept.
  static constexpr size_t kMostIdle = 2;
  const ProcessGroupPtr group_;
  std::vector<at::Tensor> idle_;
};

// Returns the unit to whose memory `tensor` belongs, as a shard or as a full
// parameter; null if to none.
std::shared_ptr<ShardedUnit> unit_of(const at::Tensor& tensor);

// The parameters of one unit that have one dtype, one after the other in one
// flat tensor of `padded` elements, of which each rank owns an equal slice, in
// rank order. A parameter's shard is the intersection of its range with the
// slice, which may be empty.
//
// There are two tensors for each parameter, as in Python's FSDP2. The compute
// tensor is the one that the module's members are; it keeps its shape, and its
// memory is the flat tensor. The shard, which has as many dimensions
// (sizes_of_part()), takes its place in the module's dictionary of parameters;
// so the optimizer, clipping and snapshots see shards. A TensorLayout says
// which part a shard is.
//
// Two ways to have the flat tensor:
// - In common: one copy for all ranks of the host. Shards alias it, if the
//   dtypes of both are equal; otherwise refresh() converts this rank's slice.
//   Who may read and write it when is the caller's business (ShardingRoot).
//   A group of one rank is a case of this, too.
// - Gathered: it exists from gather() to release() or keep_part(). At other
//   times the tensors have lost their memory, and throw c10::Error when their
//   data is accessed.
//
// Threads: one at a time. Errors of the group's collectives pass through.
class FlatParameters {
 public:
  // Collective, if the memory is in common. Each tensor of `found` gets its
  // place in the flat tensor, and its own memory is freed. All have one dtype
  // and device and, for the sake of equal shares, requires_grad.
  FlatParameters(std::vector<FoundParameter> found,
                 const FullyShardOptions& options,
                 const std::weak_ptr<ShardedUnit>& unit);
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;
  ~FlatParameters();

  struct Parameter {
    std::string name;
    at::Tensor compute;         // of its shape
    at::Tensor shard;           // with range.size() elements
    int64_t offset;             // in the flat tensor
    Range range;                // of its elements: those in the shard
    uint32_t version = 0;       // of the shard, at note_versions()
    uint32_t full_version = 0;  // of the compute tensor, then
    at::Tensor accumulated{};   // its gradient under no_sync(), in reduce_dtype
    at::Tensor barred{};        // of bar_gradients()
    // Since settle_gradients(): whether this rank gave a gradient to a
    // reduction, whether the shard got one, and the version of the shard's
    // .grad if all of it comes from there.
    bool used = false;
    bool received = false;
    std::optional<uint32_t> fresh_version{};
    std::shared_ptr<GradientDataUse> data_use =
        std::make_shared<GradientDataUse>();
  };
  const std::vector<Parameter>& parameters() const { return parameters_; }
  int64_t padded() const { return slice_ * size_; }
  int64_t slice() const { return slice_; }  // the number of elements of a rank
  int rank() const { return rank_; }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  at::TensorOptions reduce_options() const {
    return options_.dtype(reduce_dtype_);
  }
  bool in_common() const { return in_common_; }
  // ShardedUnit::name() of its unit.
  std::string unit_name() const;
  // After reconfigure(): drops full parameters and all gradients, and takes
  // memory of the new generation of the group, if ranks share it. Shards keep
  // their tensor objects and values. Collective. If it throws, it may be called
  // again.
  void begin_again();

  // ---- Full parameters ----

  // In common with another dtype: converts this rank's slice. No rank may be
  // reading. The others see it after a barrier.
  void refresh();
  // Starts to gather the full parameters, unless that was done: from the parts
  // of keep_part(), if there are any, or from all ranks' shards. Collective of
  // these ranks; does not block. Returns whether it has started.
  bool start_gather(BufferPool& pool);
  // Waits until the full parameters have been gathered; calls start_gather().
  void gather(BufferPool& pool);
  // Frees the full parameters, if they are gathered, and the part of them.
  void release(BufferPool& pool);
  // Frees the full parameters, if they are gathered, but keeps an equal part on
  // each rank of `neighbours`, in rank order. The next gather is one of these
  // ranks alone, and uses the parts up. Shards must not be written meanwhile.
  void keep_part(const ProcessGroupPtr& neighbours, BufferPool& pool);

  // ---- Gradients ----

  // Whether a parameter requires grad now.
  bool trains() const;
  // Which parameters require grad now, "1011"; empty means all.
  std::string trained() const;
  // Makes requires_grad of the compute tensors that of the shards, which a
  // program may have changed.
  void follow_requires_grad();
  // The full gradient of parameter `index`, in reduce_dtype if
  // keep_gradients() was called after the last backward, otherwise undefined.
  at::Tensor& full_gradient(size_t index);
  // Returns the first parameter with a gradient of its own; null if none has.
  const Parameter* with_gradient() const;
  // Gradients that are reduced where backward computed them.
  using LeftGradients = std::map<const Parameter*, at::Tensor>;
  // Moves the gradients, but not those of `left`, to `flat` [padded],
  // multiplied by `factor`; those that are missing count as 0. Throws
  // std::invalid_argument for sparse ones.
  void take_gradients(const at::Tensor& flat, double factor,
                      const LeftGradients& left = {});
  // Returns a copy [slice] of this rank's slice of `flat`, or of `left`.
  at::Tensor own_slice_of(const at::Tensor& flat,
                          const LeftGradients& left) const;
  // Keeps gradients that are not reduced yet in reduce_dtype, so that several
  // backward passes do not accumulate in a half type.
  void keep_gradients();
  void drop_gradients();
  // Zeroes the full gradients, or drops them, as zero_grad() does.
  void zero_gradients(bool set_to_none);
  // Adds a reduced gradient, this rank's slice [slice] of reduce_dtype, to the
  // shards' .grad, after what hooks of the shards make of it. The memory may
  // become that of .grad.
  void add_to_shards(const at::Tensor& reduced);
  // Ends the reductions of a backward. `is_used` says for each parameter in
  // turn whether any rank gave a gradient; if none did, the shard has none,
  // unless it had one before. Calls the shards' post-accumulate hooks.
  void settle_gradients(const std::function<bool()>& is_used);
  // Gives each compute tensor that has no gradient one that throws c10::Error
  // when it is read or written: an optimizer that was made before the module
  // was sharded would otherwise find no gradients, and step nothing in silence.
  // Until open_gradients() backward must not accumulate.
  void bar_gradients();
  void open_gradients();

  // ---- Checks ----

  void note_versions();
  // Returns the first parameter whose shard was written since note_versions();
  // null if none was.
  const Parameter* written() const;
  // The same of full parameters, unless what was written is kept: if this rank
  // is the only one, and shards alias it.
  const Parameter* full_written() const;
  // Throws std::logic_error if a shard has got other memory or another dtype.
  void require_own_memory() const;
  // Returns the first parameter of which torch::nn::utils::clip_grad_norm_ has
  // clipped the shard's gradient since the last call, each rank by another
  // norm; null if there is none.
  const Parameter* take_clipped();

 private:
  // Gives the storages their memory, and shards the values that they had.
  void take_memory();
  // Returns the flat tensor in memory that is in common; undefined if the full
  // parameters are gathered. Collective.
  at::Tensor make_common() const;
  // Whether the shards' memory is a part of the flat tensor.
  bool shards_alias() const {
    return in_common_ && flat_.dtype() == options_.dtype();
  }
  at::Tensor own_slice() const;
  // Waits for a gather, which may fail.
  void end_gather() noexcept;

  std::vector<Parameter> parameters_;
  const ProcessGroupPtr group_;
  const std::weak_ptr<ShardedUnit> unit_;
  const int rank_;
  const int size_;
  const bool may_share_;       // FullyShardOptions::shared_memory
  at::TensorOptions options_;  // of the shards
  at::ScalarType compute_dtype_;
  at::ScalarType reduce_dtype_;
  int64_t slice_ = 0;
  bool in_common_ = false;
  at::Tensor flat_;    // in common: [padded] of compute_dtype
  at::Tensor shards_;  // [slice] of options_
  c10::Storage shard_storage_;
  c10::Storage compute_storage_;
  c10::Storage barred_storage_;
  at::Tensor buffer_;  // gathered: [padded] of compute_dtype
  at::Tensor sent_;    // what is being gathered from this rank
  at::Tensor part_;    // of keep_part(): [padded / ranks] of compute_dtype
  ProcessGroupPtr neighbours_;  // of part_
  WorkPtr work_;
};

}  // namespace lockstep::internal
