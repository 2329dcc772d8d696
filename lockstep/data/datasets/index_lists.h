#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// Computations of the datasets that select samples of others; errors are
// std::invalid_argument with the dataset's name.
namespace lockstep::internal {

// Throws unless all of `indices` are less than `size`.
void check_subset(const std::vector<size_t>& indices, size_t size);

// Throws unless [first, first + count) lies in [0, size).
void check_taken(size_t count, size_t first, size_t size);

// Returns once * times; throws if that overflows.
size_t repeated_size(size_t once, size_t times);

// Throws if there is no dataset. `ends` are the running sums of the sizes.
void check_concat(const std::vector<size_t>& ends);

// Returns torch.randperm(size) of a CPU generator with this seed.
std::vector<size_t> random_order(size_t size, uint64_t seed);

// Returns the numbers of the samples in each part (random_split).
std::vector<std::vector<size_t>> split_at_random(
    size_t size, const std::vector<double>& lengths, uint64_t seed);

}  // namespace lockstep::internal
