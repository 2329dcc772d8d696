#include "tests/parallel/context/whole_sequences.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <numeric>
#include <sstream>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"

namespace lockstep::internal::testing {
namespace {

struct Inputs {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor grad_output;
};

Inputs random_inputs(const Sequences& given) {
  torch::manual_seed(5);
  auto random = [&](int64_t heads, int64_t tokens) {
    // Rounded to the dtype: what is compared is the computation.
    return torch::randn({given.batch, heads, tokens, given.head_dim},
                        at::kDouble)
        .to(given.dtype)
        .to(at::kDouble);
  };
  const int64_t key_tokens = given.key_tokens.value_or(given.tokens);
  return {
      random(given.heads, given.tokens), random(given.key_heads, key_tokens),
      random(given.key_heads, key_tokens), random(given.heads, given.tokens)};
}

// Results of one run: the output and the gradients of query, key and value.
using Results = std::vector<at::Tensor>;

Results run(const Attention& attention, const Inputs& inputs,
            at::ScalarType dtype) {
  auto leaf = [&](const at::Tensor& tensor) {
    return tensor.to(dtype).detach().clone().requires_grad_();
  };
  auto query = leaf(inputs.query);
  auto key = leaf(inputs.key);
  auto value = leaf(inputs.value);
  auto output = attention(query, key, value);
  output.backward(inputs.grad_output.to(dtype));
  return {output.detach(), query.grad(), key.grad(), value.grad()};
}

Results wanted(const Sequences& given, const Inputs& inputs) {
  return run(
      [&](const at::Tensor& query, const at::Tensor& key,
          const at::Tensor& value) {
        return attention_by_formula(given, query, key, value);
      },
      inputs, at::kDouble);
}

at::Tensor part_of(const Sequences& given, const at::Tensor& whole) {
  if (given.lengths.empty()) {
    return context_shard(whole, 2, {.order = given.order});
  }
  const auto begin = given.lengths.begin();
  return whole.narrow(2, std::accumulate(begin, begin + get_rank(), int64_t{0}),
                      given.lengths[static_cast<size_t>(get_rank())]);
}

// Returns the squares of the norms of the difference and of `want`.
at::Tensor squares(const at::Tensor& have, const at::Tensor& want) {
  EXPECT_EQ(have.sizes(), want.sizes());
  if (have.sizes() != want.sizes()) return torch::full({2}, NAN, at::kDouble);
  return at::stack(
      {(have.to(at::kDouble) - want).square().sum(), want.square().sum()});
}

Errors errors_from(const at::Tensor& squares) {
  auto error = [&](int64_t i) {
    const double all = squares[i][1].item<double>();
    const double off = squares[i][0].item<double>();
    return all == 0 ? std::sqrt(off) : std::sqrt(off / all);
  };
  return {error(0), error(1), error(2), error(3)};
}

}  // namespace

std::string describe(const Sequences& given) {
  std::ostringstream text;
  text << given.tokens << " tokens, "
       << (given.order == ContextOrder::zigzag ? "zigzag" : "plain")
       << (given.is_causal ? ", causal" : "") << ", " << given.heads << " over "
       << given.key_heads << " heads";
  if (!given.lengths.empty()) {
    text << ", lengths " << at::IntArrayRef(given.lengths);
  }
  return text.str();
}

at::Tensor attention_by_formula(const Sequences& given, const at::Tensor& query,
                                const at::Tensor& key,
                                const at::Tensor& value) {
  const int64_t repeats = given.heads / given.key_heads;
  const double scale =
      given.scale.value_or(1 / std::sqrt(static_cast<double>(given.head_dim)));
  auto scores =
      at::matmul(query, key.repeat_interleave(repeats, 1).transpose(-2, -1)) *
      scale;
  if (given.is_causal) {
    auto masked = at::ones({scores.size(-2), scores.size(-1)}, at::kBool);
    scores = scores.masked_fill(masked.triu(1), -INFINITY);
  }
  return at::matmul(scores.softmax(-1), value.repeat_interleave(repeats, 1));
}

Errors errors_of(const Sequences& given, const Attention& attention) {
  const auto whole = random_inputs(given);
  const auto want = wanted(given, whole);
  const auto have =
      run(attention,
          {part_of(given, whole.query), part_of(given, whole.key),
           part_of(given, whole.value), part_of(given, whole.grad_output)},
          given.dtype);
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(have[i].scalar_type(), given.dtype);
    sums.push_back(squares(have[i], part_of(given, want[i])));
  }
  auto sum = at::stack(sums);
  all_reduce(sum);
  return errors_from(sum);
}

Errors errors_of_whole(const Sequences& given, const Attention& attention) {
  const auto whole = random_inputs(given);
  const auto want = wanted(given, whole);
  const auto have = run(attention, whole, given.dtype);
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < want.size(); ++i) {
    sums.push_back(squares(have[i], want[i]));
  }
  return errors_from(at::stack(sums));
}

}  // namespace lockstep::internal::testing
