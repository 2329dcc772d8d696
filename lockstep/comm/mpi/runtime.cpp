#include "lockstep/comm/mpi/runtime.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lockstep/comm/mpi/pending.h"

namespace lockstep::internal::mpi {
namespace {

std::mutex calls;
bool serialized = false;  // set before the first group is made

std::atomic<int> living{0};
std::atomic<bool> failed{false};

void finalize_at_exit() {
  if (failed || living > 0 || has_ended()) return;
  MPI_Finalize();
}

const char* level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

}  // namespace

bool has_ended() {
  int ended = 0;
  MPI_Finalized(&ended);
  return ended != 0;
}

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw c10::DistBackendError(std::string(call) + ": " + text.data());
}

std::unique_lock<std::mutex> calls_guard() {
  return serialized ? std::unique_lock(calls)
                    : std::unique_lock(calls, std::defer_lock);
}

void start_mpi() {
  int started = 0;
  MPI_Initialized(&started);
  if (has_ended()) {
    throw std::invalid_argument(
        "MPI was finalised, and cannot be started again in one process; call "
        "MPI_Finalize after the last group is destroyed");
  }
  int level = MPI_THREAD_SINGLE;
  if (started) {
    MPI_Query_thread(&level);
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level),
          "MPI_Init_thread");
    std::atexit(finalize_at_exit);
  }
  if (level < MPI_THREAD_SERIALIZED) {
    throw std::invalid_argument(
        std::string("MPI runs with ") + level_name(level) +
        (started ? "; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave "
                   "it to init_process_group()"
                 : "; Lockstep needs an MPI that has MPI_THREAD_SERIALIZED at "
                   "least"));
  }
  serialized = level == MPI_THREAD_SERIALIZED;
}

void never_finalize() { failed = true; }

LivingGroup::LivingGroup() { ++living; }
LivingGroup::~LivingGroup() { --living; }

Communicator::Communicator(MPI_Comm handle) : handle_(handle) {
  const auto guard = calls_guard();
  // Otherwise MPI would end the whole job at the first error.
  check(MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN),
        "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(handle_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(handle_, &size_), "MPI_Comm_size");
}

Communicator::~Communicator() {
  if (!abandoned_ && !has_ended()) {
    const auto guard = calls_guard();
    MPI_Comm_free(&handle_);
  }
}

std::shared_ptr<Communicator> Communicator::duplicate(
    MPI_Comm parent, const Deadline& deadline) {
  // On the heap for as long as MPI may write it.
  auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  try {
    Pending pending("MPI_Comm_idup", [&](MPI_Request* request) {
      return MPI_Comm_idup(parent, copy.get(), request);
    });
    pending.wait(deadline, nullptr);
  } catch (...) {
    (void)copy.release();
    never_finalize();
    throw;
  }
  return std::make_shared<Communicator>(*copy);
}

std::shared_ptr<Communicator> Communicator::of_members(
    const Communicator& parent, const std::vector<int>& members, int tag) {
  MPI_Comm made = MPI_COMM_NULL;
  {
    const auto guard = calls_guard();
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group group = MPI_GROUP_NULL;
    check(MPI_Comm_group(parent.handle(), &all), "MPI_Comm_group");
    check(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(),
                         &group),
          "MPI_Group_incl");
    const int code = MPI_Comm_create_group(parent.handle(), group, tag, &made);
    MPI_Group_free(&group);
    MPI_Group_free(&all);
    check(code, "MPI_Comm_create_group");
  }
  return std::make_shared<Communicator>(made);
}

}  // namespace lockstep::internal::mpi
