#include "lockstep/base/number_list.h"

#include <gtest/gtest.h>

namespace lockstep::internal {
namespace {

TEST(NumberList, IsReadAsItIsWritten) {
  for (const std::vector<int>& numbers :
       std::vector<std::vector<int>>{{3},
                                     {0, 1},
                                     {0, 2, 4},
                                     {0, 1, 2},
                                     {0, 4, 5, 6, 9},
                                     {7, 8, 9, 11, 12}}) {
    const std::string text = name_numbers("rank", numbers);
    std::string_view rest(text);
    rest.remove_prefix(numbers.size() == 1 ? 5 : 6);
    EXPECT_EQ(read_numbers(rest), numbers) << text;
    EXPECT_EQ(rest, "");
  }
  EXPECT_EQ(name_numbers("rank", std::vector{0, 2, 4, 5, 6, 7}),
            "ranks 0, 2 and 4-7");
  EXPECT_EQ(name_numbers("node", std::vector{1, 2}), "nodes 1 and 2");
}

TEST(NumberList, ALongRunIsNotRead) {
  std::string_view text("0-2000000000, 5 and so on");
  EXPECT_EQ(read_numbers(text), (std::vector{5}));
  EXPECT_EQ(text, "so on");
}

TEST(NumberList, RanksThatSayTheSameAreNamedTogether) {
  std::vector<RanksOfText> all;
  add_text(all, 0, "all_reduce #3");
  add_text(all, 1, "broadcast #3");
  add_text(all, 2, "broadcast #3");
  EXPECT_EQ(name_texts(all),
            "rank 0: all_reduce #3; ranks 1 and 2: broadcast #3");
}

}  // namespace
}  // namespace lockstep::internal
