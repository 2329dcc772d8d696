#include "lockstep/kernels/kernels.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/kernels/elements.h"

namespace lockstep::internal::kernels {
namespace {

// Counts around the multiples of vectors and blocks of every target and type.
// At the largest, the stores begin to be aligned and streamed.
const std::vector<size_t> kCounts = {
    0,  1,  2,  3,  4,   5,   7,   8,   9,   15,  16,  17,   31,   32,  33,
    47, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 1000, 2047, 2100};
constexpr size_t kMostElements = 2100;
constexpr uint8_t kGuard = 0xa5;

// Sources of one type, and their reduction by reduce_scalar(). Elements do not
// depend on each other, so the first n results are those of the first n
// elements.
struct Problem {
  Problem(DType type, ReduceOp operation, size_t source_count, size_t offset)
      : dtype(type), op(operation), expected(kMostElements * size_of(type), 0) {
    std::mt19937_64 rng(source_count * 1000 + offset);
    for (size_t s = 0; s < source_count; ++s) {
      // Each source has another alignment.
      const size_t elements = offset == 0 ? 0 : (offset + s) % 7;
      sources.emplace_back(kMostElements * size_of(dtype),
                           elements * size_of(dtype));
      fill(sources.back().data(), kMostElements, dtype, rng);
    }
    void* const result[] = {expected.data()};
    reduce_scalar(result, pointers(), kMostElements, dtype, op);
  }

  std::vector<const void*> pointers() const {
    std::vector<const void*> result;
    for (const Bytes& source : sources) {
      result.push_back(source.data());
    }
    return result;
  }

  DType dtype;
  ReduceOp op;
  std::vector<Bytes> sources;
  Bytes expected;
};

std::string describe(const Problem& problem, size_t count) {
  return std::string(name_of(problem.op)) + " of " + std::to_string(count) +
         " " + name_of(problem.dtype) + " from " +
         std::to_string(problem.sources.size()) + " sources";
}

// Reduces into fresh destinations, and checks the results and the bytes around
// them.
void expect_into_fresh(const Problem& problem, size_t count,
                       size_t destination_count, size_t offset, Stores stores) {
  const size_t size = size_of(problem.dtype);
  std::vector<Bytes> destinations;
  std::vector<void*> pointers;
  for (size_t d = 0; d < destination_count; ++d) {
    destinations.emplace_back((count + 2) * size, (offset + d * offset) * size,
                              kGuard);
    pointers.push_back(destinations.back().data() + size);
  }
  reduce(pointers, problem.pointers(), count, problem.dtype, problem.op,
         stores);
  const Bytes guard(size, 0, kGuard);
  for (const Bytes& destination : destinations) {
    EXPECT_TRUE(same_elements(destination.data() + size,
                              problem.expected.data(), count, problem.dtype))
        << describe(problem, count);
    EXPECT_EQ(std::memcmp(destination.data(), guard.data(), size), 0)
        << describe(problem, count) << " wrote before the destination";
    EXPECT_EQ(std::memcmp(destination.data() + (count + 1) * size, guard.data(),
                          size),
              0)
        << describe(problem, count) << " wrote past the destination";
  }
}

class ReduceOnTarget : public testing::TestWithParam<std::string> {
 protected:
  // Calls `body` with every type and each operation that reduces it.
  template <typename Body>
  void for_each_reduction(Body body) {
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kReduceOps) {
        if (is_reducible(dtype, op)) {
          body(dtype, op);
        }
        if (HasFailure()) {
          return;  // one failure is enough
        }
      }
    }
  }

 private:
  ForcedTarget forced_{GetParam()};
};

TEST_P(ReduceOnTarget, EqualsTheScalarLoopBitByBit) {
  for_each_reduction([](DType dtype, ReduceOp op) {
    for (const size_t sources : {1, 2, 3, 5, 8, 64}) {
      const Problem problem(dtype, op, sources, 0);
      for (const size_t count : kCounts) {
        expect_into_fresh(problem, count, 1, 0, Stores::cached);
      }
    }
  });
}

TEST_P(ReduceOnTarget, WritesTheSameToEveryDestination) {
  for_each_reduction([](DType dtype, ReduceOp op) {
    for (const size_t sources : {2, 3}) {
      const Problem problem(dtype, op, sources, 0);
      for (const size_t destinations : {2, 3, 64}) {
        for (const size_t count : {1, 33, 600, 2100}) {
          expect_into_fresh(problem, count, destinations, 0, Stores::cached);
        }
      }
    }
  });
}

TEST_P(ReduceOnTarget, TakesPointersThatAreAlignedToAnElementOnly) {
  for_each_reduction([](DType dtype, ReduceOp op) {
    for (const size_t offset : {1, 3}) {
      const Problem problem(dtype, op, 3, offset);
      for (const size_t count : kCounts) {
        expect_into_fresh(problem, count, 2, offset, Stores::cached);
      }
    }
  });
}

TEST_P(ReduceOnTarget, StreamingStoresWriteTheSame) {
  for_each_reduction([](DType dtype, ReduceOp op) {
    for (const size_t offset : {0, 1, 5}) {
      const Problem problem(dtype, op, 2, offset);
      for (const size_t count : kCounts) {
        expect_into_fresh(problem, count, 2, offset, Stores::streaming);
      }
    }
  });
}

TEST_P(ReduceOnTarget, ADestinationMayBeASource) {
  for_each_reduction([](DType dtype, ReduceOp op) {
    for (const Stores stores : {Stores::cached, Stores::streaming}) {
      for (const size_t offset : {0, 3}) {
        for (const size_t count : kCounts) {
          // All of them: the worst case.
          Problem problem(dtype, op, 3, offset);
          std::vector<void*> destinations;
          for (Bytes& source : problem.sources) {
            destinations.push_back(source.data());
          }
          reduce(destinations, problem.pointers(), count, dtype, op, stores);
          for (const Bytes& source : problem.sources) {
            EXPECT_TRUE(same_elements(source.data(), problem.expected.data(),
                                      count, dtype))
                << describe(problem, count);
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, ReduceOnTarget,
                         testing::ValuesIn(supported_targets()),
                         name_of_target);

}  // namespace
}  // namespace lockstep::internal::kernels
