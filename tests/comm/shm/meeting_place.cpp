#include "tests/comm/shm/meeting_place.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <exception>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::shm::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

fs::path file_of(const fs::path& folder, std::string key) {
  for (auto& letter : key) {
    if (letter == '/') letter = '.';
  }
  return folder / key;
}

}  // namespace

MeetingPlace::MeetingPlace() : owner_(::getpid()) {
  auto pattern =
      (fs::temp_directory_path() / "lockstep-meeting-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw_errno("mkdtemp");
  folder_ = pattern;
  fs::permissions(folder_, fs::perms::all);
}

MeetingPlace::~MeetingPlace() {
  std::error_code ignored;
  if (::getpid() == owner_) fs::remove_all(folder_, ignored);
}

Exchange MeetingPlace::exchange() const {
  return {
      .set =
          [folder = folder_](const std::string& key, const std::string& value) {
            std::ostringstream writer;
            writer << file_of(folder, key).string() << ".new." << ::getpid()
                   << "." << std::this_thread::get_id();
            std::ofstream(writer.str()) << value;
            fs::rename(writer.str(), file_of(folder, key));
          },
      .get = [folder = folder_](const std::string& key, milliseconds allowed)
          -> std::optional<std::string> {
        const auto deadline = Deadline::after(allowed);
        for (;;) {
          std::ifstream file(file_of(folder, key));
          if (file) {
            return std::string{std::istreambuf_iterator<char>(file), {}};
          }
          if (deadline.expired()) return std::nullopt;
          std::this_thread::sleep_for(milliseconds(1));
        }
      }};
}

std::string MeetingPlace::get(const std::string& key) const {
  const auto value = exchange().get(key, std::chrono::seconds(20));
  if (!value) throw std::runtime_error("no key " + key);
  return *value;
}

std::string MeetingPlace::socket_of(int rank) const {
  std::istringstream words(get("shm/" + std::to_string(rank)));
  std::string here;
  std::string size;
  std::string name;
  words >> here >> size >> name;
  return name;
}

Meeting meeting_of(int rank, int size) {
  return {.rank = rank,
          .size = size,
          .global_ranks = {},
          .timeout = std::chrono::seconds(60),
          .tuning = {.one_shot_bytes = 256,
                     .chunk_bytes = 4096,
                     .streaming_bytes = 65536}};
}

std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
    return "met";
  } catch (const Unavailable& error) {
    return std::string("Unavailable: ") + error.what();
  } catch (const GroupBroken& error) {
    return std::string("GroupBroken: ") + error.what();
  } catch (const std::invalid_argument& error) {
    return std::string("invalid_argument: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("exception: ") + error.what();
  }
}

std::vector<Membership> meet_in_threads(const MeetingPlace& place, int size) {
  std::vector<Membership> members(size);
  std::vector<std::exception_ptr> errors(size);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          members[rank] = meet(place.exchange(), meeting_of(rank, size));
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return members;
}

Process::Process(const std::function<std::string()>& body) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("pipe");
  output_ = FileDescriptor(ends[0]);
  FileDescriptor input(ends[1]);
  const auto parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw_errno("fork");
  if (pid_ > 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  std::string result;
  const auto outcome = outcome_of([&] { result = body(); });
  if (outcome != "met") result = outcome;
  ::_exit(::write(input.get(), result.data(), result.size()) < 0 ? 1 : 0);
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), output_(std::move(other.output_)) {}

void Process::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

std::string Process::result() {
  std::string text;
  std::array<char, 4096> piece{};
  for (;;) {
    const auto got = ::read(output_.get(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(piece.data(), static_cast<size_t>(got));
  }
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
  return text;
}

size_t open_descriptors() {
  // Subtracts the descriptor of the folder that is being read.
  return static_cast<size_t>(
             std::distance(fs::directory_iterator("/proc/self/fd"), {})) -
         1;
}

}  // namespace lockstep::internal::shm::testing
