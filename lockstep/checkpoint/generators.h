#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::internal {

// Return and set the state of the default CPU generator.
at::Tensor generator_state();
void set_generator_state(const at::Tensor& state);

// Returns the state that `rank` of `size` takes from a snapshot in which
// `saved` ranks have saved theirs, of which state_of(r) returns one: its own,
// if the number of ranks is the same; otherwise one that is seeded from rank
// 0's state and from `rank`. Returns nothing if `saved` is 0: the rank keeps
// its own. Throws SnapshotError about `path` if the state is not one of this
// generator.
std::optional<at::Tensor> generator_state_for(
    const std::string& path, size_t saved,
    const std::function<at::Tensor(size_t)>& state_of, size_t rank,
    size_t size);

}  // namespace lockstep::internal
