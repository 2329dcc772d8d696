// Tests of texts for a terminal and for a shell.
#include "lockstep/base/shown_text.h"

#include <gtest/gtest.h>

#include <string>

namespace lockstep::internal {
namespace {

TEST(ShownText, OnlyWhatIsShownStays) {
  EXPECT_EQ(shown_text("line\n\tnext \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"),
            "line\n\tnext \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80");
  EXPECT_EQ(shown_text("\x1b[31mred\x07\r\x7f"), " [31mred   ");
  EXPECT_EQ(shown_text(std::string("\0x", 2)), " x");
  // The control characters above ASCII, in UTF-8 and as single bytes.
  EXPECT_EQ(shown_text("\xC2\x9B"
                       "31m \x9b"
                       "31m"),
            " 31m  31m");
  // Those that reverse the direction of writing.
  EXPECT_EQ(shown_text("a\xE2\x80\xAE"
                       "b\xE2\x81\xA6"
                       "c\xE2\x80\x8F"
                       "d"),
            "a b c d");
  // Bytes that are not UTF-8: cut, too long, above the last character.
  EXPECT_EQ(shown_text("\xE2\x82"), "  ");
  EXPECT_EQ(shown_text("\xC0\xAF"), "  ");
  EXPECT_EQ(shown_text("\xE0\x80\xAF"), "   ");
  EXPECT_EQ(shown_text("\xF0\x8F\xBF\xBF"), "    ");
  EXPECT_EQ(shown_text("\xF5\x80\x80\x80"), "    ");
  EXPECT_EQ(shown_text("\xF4\x90\x80\x80"), "    ");
  EXPECT_EQ(shown_text("\xED\xA0\x80"), "   ");  // half of a pair of UTF-16
  EXPECT_EQ(shown_line("a\nb\tc"), "a b c");
}

TEST(ShownText, AShellReadsAWordAsOne) {
  EXPECT_EQ(shell_word("/tmp/a-b_c.json"), "/tmp/a-b_c.json");
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(shell_word("/tmp/it's $(here);"), "'/tmp/it'\\''s $(here);'");
  EXPECT_EQ(shell_word("a\nb\x1b'"), "$'a\\x0ab\\x1b\\x27'");
}

}  // namespace
}  // namespace lockstep::internal
