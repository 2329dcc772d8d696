#include "lockstep/comm/uncaught.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#include "tests/harness/in_child.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Returns the words about a tensor that does not fit.
std::string words_about_tensor_of(int64_t bytes) {
  try {
    at::empty({bytes}, at::kByte);
  } catch (const std::exception& error) {
    return out_of_memory_words(error);
  }
  return "it fitted";
}

TEST(OutOfMemory, OneLineSaysWhatWasWantedAndWhatHelps) {
  const auto words = words_about_tensor_of(int64_t{1} << 50);
  EXPECT_THAT(words, HasSubstr("out of memory: the system refused "
                               "1073741824 MiB (1125899906842624 bytes)"));
  EXPECT_THAT(words, HasSubstr("divide the model over the ranks (FullyShard)"));
  EXPECT_THAT(words, Not(HasSubstr("\n")));
  EXPECT_THAT(words, Not(HasSubstr(" 0 MiB")));
}

TEST(OutOfMemory, TheLimitOfTheProcessIsNamed) {
  const int code = testing::in_child([] {
    const rlimit limit{.rlim_cur = rlim_t{5} << 30, .rlim_max = RLIM_INFINITY};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) return 2;
    const auto words = words_about_tensor_of(int64_t{6} << 30);
    return words.find(
               "the limit of its address space (ulimit -v) is 5120 MiB;") !=
                   words.npos
               ? 0
               : 1;
  });
  EXPECT_EQ(code, 0);
}

TEST(OutOfMemory, BadAllocHasNoNumberOfBytes) {
  EXPECT_THAT(out_of_memory_words(std::bad_alloc()),
              HasSubstr("the system refused an allocation; "));
}

TEST(OutOfMemory, OtherErrorsHaveNoSuchWords) {
  EXPECT_EQ(out_of_memory_words(std::runtime_error("can't allocate memory")),
            "");
  try {
    TORCH_CHECK(false, "can't allocate memory");
  } catch (const c10::Error& error) {
    EXPECT_EQ(out_of_memory_words(error), "");
  }
}

}  // namespace
}  // namespace lockstep::internal
