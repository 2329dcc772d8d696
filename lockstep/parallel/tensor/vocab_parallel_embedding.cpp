#include "lockstep/parallel/tensor/vocab_parallel_embedding.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include <sstream>
#include <stdexcept>

#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep::nn {
namespace {

using internal::Range;

// On a device the host would have to wait for the indices; there the kernel of
// rank 0 finds a wrong one.
void check_indices(const at::Tensor& input, int64_t num_embeddings) {
  if (!input.is_cpu() || input.numel() == 0) return;
  auto [least, greatest] = at::aminmax(input);
  const auto first = least.item<int64_t>();
  const auto last = greatest.item<int64_t>();
  if (first >= 0 && last < num_embeddings) return;
  throw std::invalid_argument(
      c10::str("VocabParallelEmbedding: the input has the index ",
               first < 0 ? first : last, ", but the table has ", num_embeddings,
               " rows; allowed are 0 to ", num_embeddings - 1));
}

}  // namespace

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(
    int64_t rows, int64_t columns, const VocabParallelEmbeddingOptions& given)
    : options(given), num_embeddings(rows), embedding_dim(columns) {
  VocabParallelEmbeddingImpl::reset();
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(
    const torch::nn::Embedding& whole,
    const VocabParallelEmbeddingOptions& given)
    : options(given),
      num_embeddings(whole->options.num_embeddings()),
      embedding_dim(whole->options.embedding_dim()) {
  if (whole->options.max_norm() || whole->options.scale_grad_by_freq() ||
      whole->options.sparse()) {
    throw std::invalid_argument(
        "VocabParallelEmbedding: the embedding has max_norm, "
        "scale_grad_by_freq or sparse, which a divided table cannot have; make "
        "it without them");
  }
  options.padding_idx = whole->options.padding_idx();
  take_part(whole->weight);
}

void VocabParallelEmbeddingImpl::reset() {
  torch::nn::Embedding whole(
      torch::nn::EmbeddingOptions(num_embeddings, embedding_dim)
          .padding_idx(options.padding_idx));
  // LibTorch has made it positive.
  options.padding_idx = whole->options.padding_idx();
  take_part(whole->weight);
}

void VocabParallelEmbeddingImpl::take_part(const at::Tensor& whole) {
  group_ = internal::tensor_group(options.group);
  weight = internal::part_of_parameter(whole, 0, group_);
  register_parameter("weight", weight, weight.requires_grad());
}

void VocabParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  std::ostringstream text;  // keeps the flags of `stream` as they are
  text << "lockstep::nn::VocabParallelEmbedding(num_embeddings="
       << weight.size(0) << " of " << num_embeddings
       << ", embedding_dim=" << embedding_dim;
  if (options.padding_idx) text << ", padding_idx=" << *options.padding_idx;
  text << ')';
  stream << text.str();
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& input) {
  if (!group_) {
    return at::embedding(weight, input, options.padding_idx.value_or(-1));
  }
  check_indices(input, num_embeddings);
  const Range rows = internal::tensor_part(num_embeddings, group_);
  at::Tensor term;
  if (rows.size() == 0) {
    // The sum of no numbers makes the result depend on the weight, so that the
    // weight gets a gradient as it does on the other ranks.
    auto shape = input.sizes().vec();
    shape.push_back(embedding_dim);
    term = at::zeros(shape, weight.options()) + weight.sum();
  } else {
    auto elsewhere = input.lt(rows.begin).logical_or_(input.ge(rows.end));
    if (group_->rank() == 0 && !input.is_cpu()) {
      elsewhere.logical_and_(input.ge(0))
          .logical_and_(input.lt(num_embeddings));
    }
    auto local = (input - rows.begin).masked_fill_(elsewhere, 0);
    int64_t padding = options.padding_idx.value_or(-1) - rows.begin;
    if (padding < 0 || padding >= rows.size()) padding = -1;
    term = at::embedding(weight, local, padding)
               .masked_fill_(elsewhere.unsqueeze(-1), 0);
  }
  if (!options.sequence_parallel) {
    return internal::reduce_in_place(term, group_);
  }
  return reduce_scatter_sequence(term, options.sequence_dim, group_);
}

}  // namespace lockstep::nn
