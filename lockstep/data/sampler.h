#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// Decides which samples of a dataset this process visits, and in which order. A
// DataLoader refers to a sampler and never copies it, so that what the training
// loop tells the sampler (an epoch, a restored position) reaches the next loop.
//
// A *pass* is one loop over the loader. Not synchronised: a sampler belongs to
// the thread that runs the loop; the loader's workers never touch it.
class Sampler {
 public:
  virtual ~Sampler() = default;

  // Starts a pass and returns the indices to visit, each in [0,
  // dataset_size()).
  virtual std::vector<size_t> begin_pass() = 0;

  // Tells the sampler that the loop has received the next `count` indices of
  // the pass. The loader calls this for every batch that it returns, with its
  // batch size (also if the last batch is shorter), and never for a batch that
  // is only prefetched.
  virtual void consumed(int64_t count) = 0;

  // Returns the number of indices in a whole pass (one that was not resumed).
  virtual int64_t size() const = 0;

  // Returns the size of the dataset that the indices refer to.
  virtual int64_t dataset_size() const = 0;
};

}  // namespace lockstep
