#include "lockstep/base/system_file.h"

#include <gmock/gmock.h>

#include "lockstep/base/control_groups.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(SystemFile, ListsOfNumbersAreRead) {
  EXPECT_THAT(numbers_of("0-3,8"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(numbers_of("5"), ElementsAre(5));
  for (const char* wrong :
       {"", "a", "1-", "1,,2", "-1", "3;4", "3,x", "0-99999999"}) {
    EXPECT_THAT(numbers_of(wrong), IsEmpty()) << wrong;
  }
}

TEST(SystemFile, LinesFieldsAndNumbersAreRead) {
  const TemporaryFolder folder;
  const auto file = folder.file("some");
  write_file(file, "42 and more\nkey:\t value\ninactive_file 17\ninactive 3\n");
  EXPECT_EQ(first_line(file), "42 and more");
  EXPECT_EQ(number_in(file), 42);
  EXPECT_EQ(field_of(file, "key"), "value");
  EXPECT_EQ(field_of(file, "inactive_file", ' '), "17");
  EXPECT_EQ(field_of(file, "inactive", ' '), "3");
  EXPECT_EQ(field_of(file, "inactive"), std::nullopt);
  write_file(file, "max\n");
  EXPECT_EQ(number_in(file), std::nullopt);
  write_file(file, "always [madvise] never\n");
  EXPECT_EQ(chosen_word(file), "madvise");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("some"));
  EXPECT_EQ(first_line(folder.file("other")), std::nullopt);
  EXPECT_THAT(names_in(folder.file("other")), IsEmpty());
}

TEST(OomKills, AreThoseOfTheOwnGroup) {
  const TemporaryFolder folder;
  const ControlGroupPlace place{folder.path(), folder.file("membership")};
  write_file(place.membership, "0::/job\n");
  EXPECT_EQ(oom_kills(place), 0);
  folder.write("memory.events", "oom 9\noom_kill 9\n");
  folder.write("job/memory.events", "oom 2\noom_kill 3\noom_group_kill 1\n");
  EXPECT_EQ(oom_kills(place), 3);
  write_file(place.membership, "4:memory:/job\n0::/\n");
  folder.write("memory/job/memory.oom_control",
               "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
  EXPECT_EQ(oom_kills(place), 5);
}

}  // namespace
}  // namespace lockstep::internal::testing
