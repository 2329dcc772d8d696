#pragma once

#include <utility>
#include <vector>

#include "lockstep/data/collate_samples.h"

namespace lockstep {

// Makes one batch of samples, as torch.utils.data.default_collate does:
//
// - at::Tensors of one shape become a tensor [B, ...].
// - Numbers become a tensor [B]: bool of bool, int64 of any integer, and
//   floating point and complex numbers of their own type.
// - A std::pair, std::tuple, std::array or torch::data::Example becomes one of
//   the collated members.
// - std::maps with the same keys become a map of the collated values, and
//   std::vectors of one length a vector of the collated elements.
// - std::strings, and samples of any other type, stay a std::vector of the
//   samples.
//
// A type of your own is collated by a function `collate` in its namespace,
// which is found wherever the type is, also inside a pair or a map:
//
//   struct Sample { at::Tensor image; int64_t label; };
//   struct Batch { at::Tensor images; at::Tensor labels; };
//   Batch collate(std::vector<Sample> samples) {
//     return {lockstep::collate_member(samples, &Sample::image),
//             lockstep::collate_member(samples, &Sample::label)};
//   }
//
// Throws std::invalid_argument if maps differ in their keys or vectors in their
// length, and c10::Error if tensors differ in their shape.
template <class Sample>
auto default_collate(std::vector<Sample> samples) {
  return internal::collate_samples(std::move(samples));
}

// Makes one batch of one member of each sample. Moves the members away.
template <class Sample, class Member>
auto collate_member(std::vector<Sample>& samples, Member Sample::*member) {
  std::vector<Member> members;
  members.reserve(samples.size());
  for (Sample& sample : samples) members.push_back(std::move(sample.*member));
  return internal::collate_samples(std::move(members));
}

// Stands for default_collate() as the Collate of a DataLoader.
struct DefaultCollate {};

}  // namespace lockstep
