#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// Which samples of a dataset this process visits, and in which order. A
// DataLoader refers to a sampler and never copies it, so that what the training
// loop tells the sampler (an epoch, a restored position) reaches the next loop.
//
// A *pass* is one loop over the loader. Not synchronised: a sampler belongs to
// the thread that runs the loop; the loader's workers never touch it.
class Sampler {
 public:
  virtual ~Sampler() = default;

  // Starts a pass: the indices to visit, each in [0, dataset_size()).
  virtual std::vector<size_t> begin_pass() = 0;

  // The loop has received the next `count` indices of the pass. The loader
  // calls this for every batch that it hands out, with its batch size (also
  // for a shorter last batch), and never for one that is only prefetched.
  virtual void consumed(int64_t count) = 0;

  // Indices of a whole pass (of one that was not resumed).
  virtual int64_t size() const = 0;

  // The size of the dataset that the indices refer to.
  virtual int64_t dataset_size() const = 0;
};

}  // namespace lockstep
