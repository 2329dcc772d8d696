#pragma once

#include <string>
#include <string_view>

// Makes text of other processes safe for a terminal and for a shell. All that a
// command prints passes through here, as it may come from another user's job.
namespace lockstep::internal {

// Returns `text` with a blank for each character that a terminal could obey
// instead of show: control characters except newlines and tabs, those that
// reverse the direction of writing, and bytes that are not UTF-8.
std::string shown_text(std::string_view text);
// The same, with blanks for newlines and tabs, too.
std::string shown_line(std::string_view text);

// Returns `text` as a shell reads it as one word. A word with control
// characters is quoted as $'...', which bash, zsh and ksh know.
std::string shell_word(std::string_view text);

}  // namespace lockstep::internal
