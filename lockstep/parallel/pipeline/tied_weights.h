#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/fsdp/flat_parameters.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/pipeline/pipeline.h"

namespace lockstep::internal {

// The weights that several stages of a pipeline hold, on one rank.
class TiedWeights {
 public:
  // A parameter that this rank holds. In a FullyShard: its shard is registered,
  // values and gradients are the full ones.
  struct Holder {
    int stage = 0;
    std::string name{};  // in the stage's module
    at::Tensor registered{};
    std::shared_ptr<ShardedUnit> unit{};  // null if it is not divided
    FlatParameters* flat = nullptr;       // of `unit`
    size_t index = 0;                     // in `flat`

    at::IntArrayRef sizes() const;
    at::ScalarType gradient_dtype() const;
    at::Tensor& gradient() const;
    // Collective over the unit's group.
    at::Tensor values() const;
    void set_values(const at::Tensor& values) const;
  };

  // Finds this rank's holders. Not collective. Throws std::invalid_argument
  // for names that do not exist.
  TiedWeights(const std::vector<TiedWeight>& weights,
              const std::vector<PipelineStage>& stages,
              const std::vector<int>& rank_of_stage, ProcessGroupPtr group);

  // "[4, 2]Float" for each weight that this rank holds, "" for others: equal on
  // all ranks that hold it.
  std::vector<std::string> shapes() const;

  // For each weight: -1 if this rank does not hold it, 0 if it is frozen
  // (requires_grad false), 1 if it is trained, 2 if this rank holds it several
  // times and only some of them are trained.
  std::vector<int64_t> trained() const;

  // Gives all holders the values of the first. Collective.
  void share_values();

  // Whether this rank's `parameter` is another holder's copy.
  bool is_duplicate(const at::Tensor& parameter) const;

  // Returns stage and name of the first holder of the weight; "" if `parameter`
  // is not tied. Equal on all ranks that hold it.
  std::string name_of(const at::Tensor& parameter) const;

  // Called before a step, or an eval(). Takes gradients of earlier steps away,
  // so that finish() does not add them twice.
  void begin(bool training);
  // Throws std::logic_error if a stage has written a weight, which its other
  // holders would not see. After a step, gives all holders the sum of its
  // gradients, in the order of the ranks that hold it, plus those that begin()
  // has taken away; if no stage has used the weight, only these. Collective.
  void finish(bool training);

 private:
  struct Weight {
    std::string name{};                 // name_of()
    std::vector<int> ranks{};           // of the group, in order of the holders
    std::vector<Holder> mine{};         // each parameter once
    std::vector<uint32_t> versions{};   // at begin(); of `mine`
    std::vector<at::Tensor> earlier{};  // gradients; of `mine`

    bool trains() const {
      return !mine.empty() && mine.front().registered.requires_grad();
    }
  };

  void require_unwritten() const;

  ProcessGroupPtr group_;
  std::vector<Weight> weights_;
};

}  // namespace lockstep::internal
