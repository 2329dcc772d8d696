#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::internal {

// Returns the value of environment variable `name`, or nothing if it is unset
// or empty (Python's rendezvous treats the two alike). Not safe if another
// thread calls setenv() at the same time.
std::optional<std::string> get_env(const char* name);

// Returns the same as an integer in [lowest, highest]. If the variable is set
// to anything else, throws std::invalid_argument that names the variable, its
// value and the range.
std::optional<int64_t> get_env_int(const char* name, int64_t lowest,
                                   int64_t highest);

// Returns `text` as a decimal integer in [lowest, highest]. If `text` as a
// whole is not such an integer, throws std::invalid_argument whose text begins
// with `what` ("--nproc-per-node").
int64_t parse_int(std::string_view what, std::string_view text, int64_t lowest,
                  int64_t highest);

// Returns `text` without the white space around it.
std::string stripped(std::string_view text);

// Returns the name that gethostname() gives to this machine; "localhost" if it
// has none.
std::string host_name();

// Returns `count` random hexadecimal digits, for names and secrets that nobody
// can guess. `count`: even, at most 512. Throws std::system_error if the system
// has none.
std::string random_digits(size_t count);

// Returns whether the texts are equal, in a time that does not tell where they
// differ.
bool is_same_secret(std::string_view one, std::string_view other);

// Remembers the process that made it. An object that stands for something
// outside the process's own memory (sockets, memory of several processes,
// threads) can thus see whether it is used in a child that was forked later.
// The child's copy of such an object must leave all of that alone: it belongs
// to the parent.
//
// A value type. is_foreign() costs one relaxed load; safe in any thread. Only
// children of fork() are noticed, not those of vfork() and clone(), after which
// a program may do nothing but exec.
class ProcessMark {
 public:
  ProcessMark();
  bool is_foreign() const noexcept;

 private:
  uint64_t forks_;
};

}  // namespace lockstep::internal
