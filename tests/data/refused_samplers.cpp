// Must not compile; the test data_loader_refuses_samplers reads the compiler's
// message.
#include <torch/data/samplers/distributed.h>
#include <torch/data/samplers/random.h>
#include <torch/data/samplers/sequential.h>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/tensor_dataset.h"

namespace samplers = torch::data::samplers;

void refused(lockstep::TensorDataset& dataset, samplers::RandomSampler& random,
             samplers::SequentialSampler& sequential,
             samplers::DistributedRandomSampler& distributed) {
  lockstep::DataLoader first(dataset, random, {.batch_size = 2});
  lockstep::DataLoader second(dataset, sequential);
  lockstep::DataLoader third(dataset, distributed, {.batch_size = 2});
}
