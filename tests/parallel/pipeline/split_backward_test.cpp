// A backward in two parts gives the gradients of one, for graphs in which the
// ways to inputs and to parameters part in every manner.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "lockstep/parallel/pipeline/split_backward.h"

namespace lockstep::internal::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Graph = std::function<Tensors(const Tensors& inputs, const Tensors& w)>;

at::Tensor leaf(std::vector<int64_t> sizes) {
  return torch::randn(sizes, torch::kDouble).requires_grad_();
}

// Compares with torch::autograd::backward(). `inputs` are received ones, `w`
// the parameters.
void expect_same(const Tensors& inputs, const Tensors& w, const Graph& graph) {
  Tensors gradients;
  const Tensors outputs = graph(inputs, w);
  for (const at::Tensor& output : outputs) {
    gradients.push_back(torch::randn_like(output));
  }
  torch::autograd::backward(outputs, gradients);
  Tensors expected_inputs, expected;
  for (at::Tensor input : inputs) {
    expected_inputs.push_back(input.grad());
    input.mutable_grad().reset();
  }
  for (at::Tensor parameter : w) {
    expected.push_back(parameter.grad());
    parameter.mutable_grad().reset();
  }

  SplitBackward split;
  const Tensors mine = split.inputs(graph(inputs, w), gradients, inputs);
  for (const at::Tensor& parameter : w) {
    EXPECT_FALSE(parameter.grad().defined());
  }
  ASSERT_EQ(mine.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_FALSE(inputs[i].grad().defined());
    ASSERT_EQ(mine[i].defined(), expected_inputs[i].defined());
    if (mine[i].defined()) {
      EXPECT_TRUE(mine[i].allclose(expected_inputs[i], 1e-12, 1e-12));
    }
  }
  split.parameters();
  for (size_t i = 0; i < w.size(); ++i) {
    ASSERT_EQ(w[i].grad().defined(), expected[i].defined()) << i;
    if (w[i].grad().defined()) {
      EXPECT_TRUE(w[i].grad().allclose(expected[i], 1e-12, 1e-12)) << i;
    }
  }
}

TEST(SplitBackward, LayersAfterEachOther) {
  expect_same({leaf({3, 4})},
              {leaf({4, 4}), leaf({4}), leaf({4, 4}), leaf({4})},
              [](const Tensors& x, const Tensors& w) {
                auto h = torch::tanh(torch::linear(x[0], w[0], w[1]));
                h = torch::layer_norm(h, {4}, w[1], w[3]);
                return Tensors{torch::linear(h, w[2], w[3]).relu()};
              });
}

// Python has to hold back gradients here, so that the later use is not counted
// again on the way of the earlier one.
TEST(SplitBackward, AParameterThatIsUsedTwiceIsCountedOnceForEachUse) {
  expect_same({leaf({3, 4})}, {leaf({4}), leaf({4, 4})},
              [](const Tensors& x, const Tensors& w) {
                auto h = (x[0] * w[0]).tanh();
                h = torch::matmul(torch::matmul(h, w[1]).tanh(), w[1]);
                return Tensors{(h * w[0] + x[0]).tanh() * w[0]};
              });
}

TEST(SplitBackward, AParameterFunctionMeetsTheWayOfTheInputs) {
  expect_same({leaf({3, 4})}, {leaf({4}), leaf({4}), leaf({2})},
              [](const Tensors& x, const Tensors& w) {
                auto scale = (w[0] * w[1]).exp();
                auto h = x[0] * scale + scale.sin();
                return Tensors{h.tanh(), scale * h.sum(0)};
              });
}

TEST(SplitBackward, OutputsWithoutInputsAndInputsWithoutUse) {
  expect_same(
      {leaf({3, 4}), leaf({2}), torch::ones({3, 4}, torch::kDouble)},
      {leaf({4}), leaf({4, 4})}, [](const Tensors& x, const Tensors& w) {
        return Tensors{torch::matmul(x[0] + x[2], w[1]), w[0] * 2, x[0].exp()};
      });
}

TEST(SplitBackward, WithoutInputsTheSecondPartIsTheWholeBackward) {
  expect_same({torch::ones({3, 4}, torch::kDouble)}, {leaf({4, 4}), leaf({4})},
              [](const Tensors& x, const Tensors& w) {
                return Tensors{torch::linear(x[0], w[0], w[1]).tanh()};
              });
}

TEST(SplitBackward, ConvolutionsAndSplits) {
  expect_same({leaf({2, 4, 6, 6})},
              {leaf({6, 4, 3, 3}), leaf({6}), leaf({2, 2, 1, 1})},
              [](const Tensors& x, const Tensors& w) {
                auto parts = torch::conv2d(x[0], w[0], w[1]).chunk(3, 1);
                return Tensors{torch::conv2d(parts[0].relu(), w[2]) + parts[2],
                               parts[1]};
              });
}

TEST(SplitBackward, InputsThatAreReturnedAsTheyAre) {
  expect_same({leaf({3}), leaf({3})}, {leaf({3})},
              [](const Tensors& x, const Tensors& w) {
                return Tensors{x[0], x[1] * w[0], x[1]};
              });
}

TEST(SplitBackward, HooksOfTensorsCountInBothParts) {
  int calls = 0;
  const at::Tensor w = leaf({4});
  const at::Tensor x = leaf({4});
  at::Tensor h = x * w;
  h.register_hook([&calls](const at::Tensor& gradient) {
    ++calls;
    return gradient * 3;
  });
  SplitBackward split;
  const Tensors gradients =
      split.inputs({h.sin()}, {torch::ones({4}, torch::kDouble)}, {x});
  split.parameters();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(gradients[0].allclose(3 * h.cos() * w));
  EXPECT_TRUE(w.grad().allclose(3 * h.cos() * x));
}

// Says which of its gradients are computed.
struct Product : torch::autograd::Function<Product> {
  static std::vector<int> computed;
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static Tensors backward(torch::autograd::AutogradContext* context,
                          const Tensors& gradients) {
    const Tensors saved = context->get_saved_variables();
    Tensors result(2);
    for (const size_t i : {0, 1}) {
      if (!context->needs_input_grad(i)) continue;
      computed.push_back(static_cast<int>(i));
      result[i] = gradients[0] * saved[1 - i];
    }
    return result;
  }
};
std::vector<int> Product::computed;

TEST(SplitBackward, EachDerivativeIsComputedOnce) {
  const at::Tensor x = leaf({4}), v = leaf({4}), w = leaf({4});
  SplitBackward split;
  Product::computed.clear();
  split.inputs({Product::apply(Product::apply(x, v).tanh(), w)},
               {torch::ones({4}, torch::kDouble)}, {x});
  EXPECT_EQ(Product::computed, (std::vector<int>{0, 0}));
  split.parameters();
  EXPECT_EQ(Product::computed, (std::vector<int>{0, 0, 1, 1}));
}

// Memory that only the first part needs is freed by it.
TEST(SplitBackward, TheFirstPartFreesWhatParametersDoNotNeed) {
  const at::Tensor x = leaf({4}), w = leaf({4});
  at::Tensor scaled = x * w;
  at::Tensor result = scaled.tanh();  // saved by its own node
  c10::weak_intrusive_ptr<at::TensorImpl> saved(result.getIntrusivePtr());
  at::Tensor output = result * 2;
  SplitBackward split;
  split.inputs({output}, {torch::ones({4}, torch::kDouble)}, {x});
  scaled.reset();
  result.reset();
  output.reset();
  EXPECT_TRUE(saved.expired());
  split.parameters();
  EXPECT_TRUE(w.grad().defined());
}

}  // namespace
}  // namespace lockstep::internal::testing
