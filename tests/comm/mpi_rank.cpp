// The ranks that mpi_test.cpp starts under mpirun; each process runs one part:
//
//   comm_mpi_rank PART
//
// Its lines begin with "rank R:".
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/mpi/communicator.h"

namespace {

using std::chrono::milliseconds;

// The most elements of all ranks together that one of the calls below was given
// to count.
std::atomic<int64_t> most_counted{0};

void note_count(int64_t count) {
  int64_t most = most_counted;
  while (most < count && !most_counted.compare_exchange_weak(most, count)) {
  }
}

void note_count_of_each(int count, MPI_Comm communicator) {
  int ranks = 0;
  MPI_Comm_size(communicator, &ranks);
  note_count(int64_t{count} * ranks);
}

}  // namespace

// These take the place of MPI's own functions in the whole process, in the
// module with the backend, too.
int MPI_Iallgather(const void* in, int count, MPI_Datatype type, void* out,
                   int out_count, MPI_Datatype out_type, MPI_Comm communicator,
                   MPI_Request* request) {
  note_count_of_each(out_count, communicator);
  return PMPI_Iallgather(in, count, type, out, out_count, out_type,
                         communicator, request);
}

int MPI_Igather(const void* in, int count, MPI_Datatype type, void* out,
                int out_count, MPI_Datatype out_type, int root,
                MPI_Comm communicator, MPI_Request* request) {
  note_count_of_each(count, communicator);
  return PMPI_Igather(in, count, type, out, out_count, out_type, root,
                      communicator, request);
}

int MPI_Iscatter(const void* in, int count, MPI_Datatype type, void* out,
                 int out_count, MPI_Datatype out_type, int root,
                 MPI_Comm communicator, MPI_Request* request) {
  note_count_of_each(out_count, communicator);
  return PMPI_Iscatter(in, count, type, out, out_count, out_type, root,
                       communicator, request);
}

int MPI_Ireduce_scatter(const void* in, void* out, const int* counts,
                        MPI_Datatype type, MPI_Op op, MPI_Comm communicator,
                        MPI_Request* request) {
  int ranks = 0;
  MPI_Comm_size(communicator, &ranks);
  note_count(std::accumulate(counts, counts + ranks, int64_t{0}));
  return PMPI_Ireduce_scatter(in, out, counts, type, op, communicator, request);
}

int MPI_Ireduce_scatter_block(const void* in, void* out, int count,
                              MPI_Datatype type, MPI_Op op,
                              MPI_Comm communicator, MPI_Request* request) {
  note_count_of_each(count, communicator);
  return PMPI_Ireduce_scatter_block(in, out, count, type, op, communicator,
                                    request);
}

namespace {

// Writes the line at once, because several ranks share one pipe.
template <typename... Parts>
void say(const Parts&... parts) {
  std::ostringstream line;
  line << "rank " << lockstep::get_rank() << ": ";
  (line << ... << parts) << '\n';
  std::cout << line.str() << std::flush;
}

float sum_over(const lockstep::ProcessGroupPtr& group, float value) {
  auto tensor = at::full({3}, value);
  lockstep::all_reduce(tensor, {.group = group});
  return tensor[2].item<float>();
}

// Joins without any environment variables.
void world() {
  auto group = lockstep::init_process_group("mpi");
  say("of ", group->size(), ", local rank ", lockstep::get_local_rank(),
      ", sum ", sum_over(nullptr, group->rank() + 1.0f), ", backends ",
      group->backend_config());
}

// Uses the program's own MPI, and two communicators, of the even and of the odd
// ranks, which number the ranks backwards.
void communicator() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  for (int round = 0; round < 2; ++round) {
    auto group = lockstep::init_process_group_mpi(MPI_Comm_c2f(half));
    auto pair = lockstep::new_group({0, 1});
    say("was ", rank, " in MPI_COMM_WORLD, sum ",
        sum_over(nullptr, static_cast<float>(rank)), ", of a pair ",
        sum_over(pair, 1));
  }
  MPI_Comm_free(&half);
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended) throw std::runtime_error("MPI was finalised behind our back");
  MPI_Finalize();
}

void serialized() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  {
    auto group = lockstep::init_process_group("mpi");
    const int next = (group->rank() + 1) % group->size();
    const int previous = (group->rank() + group->size() - 1) % group->size();
    int right = 0;
    for (int i = 0; i < 100; ++i) {
      auto tensor = at::full({1000}, 1.0f);
      auto in = at::zeros({1000});
      auto work = lockstep::all_reduce(tensor, {.async_op = true});
      auto receiving = lockstep::irecv(in, previous);
      auto sending =
          lockstep::isend(at::full({1000}, static_cast<float>(i)), next);
      receiving->wait();
      work->wait();
      sending->wait();
      right += tensor.eq(group->size()).all().item<bool>() &&
               in.eq(i).all().item<bool>();
    }
    say("level ", level == MPI_THREAD_SERIALIZED ? "serialized" : "other", ", ",
        right, " of 100 are right");
  }
  MPI_Finalize();
}

// Rank 0 sends more than rank 1 receives, but not much: OpenMPI 4.1 may crash
// after a large message.
void truncated() {
  auto group = lockstep::init_process_group("mpi");
  if (group->rank() == 0) {
    lockstep::isend(at::zeros({20}), 1)->wait();
    return;
  }
  try {
    lockstep::recv(at::zeros({10}), 0);
  } catch (const c10::DistBackendError& error) {
    say(error.what_without_backtrace());
  }
}

void funneled() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  try {
    auto group = lockstep::init_process_group("mpi");
  } catch (const std::invalid_argument& error) {
    std::cout << "refused: " + std::string(error.what()) + "\n" << std::flush;
  }
  MPI_Finalize();
}

// Prints what `body` throws; prints nothing if it does not throw.
template <typename Body>
void say_refusal(const Body& body) {
  std::string line;
  try {
    body();
  } catch (const c10::Error& error) {
    line = std::string("refused: ") + error.what_without_backtrace() + "\n";
  } catch (const std::exception& error) {
    line = std::string("refused: ") + error.what() + "\n";
  }
  std::cout << line << std::flush;
}

void refused() {
  say_refusal([] { auto group = lockstep::init_process_group("mpi"); });
}

void hasty() {
  say_refusal([] {
    auto group =
        lockstep::init_process_group("mpi", {.timeout = milliseconds(-5)});
  });
}

// Makes MPI groups under a default group of Gloo: first before MPI has made
// any, then when MPI's last default group numbered the ranks differently.
void strangers() {
  const int rank = std::stoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const int size = std::stoi(std::getenv("OMPI_COMM_WORLD_SIZE"));
  const auto under_gloo = [&](const std::string& file, int as) {
    auto group = lockstep::init_process_group(
        "gloo",
        {.init_method = std::string("file://") +
                        std::getenv("LOCKSTEP_TEST_FOLDER") + "/" + file,
         .world_size = size,
         .rank = as});
    say_refusal([] { lockstep::new_group({}, {.backend = "mpi"}); });
    // Gloo's other end may still be connecting to this rank.
    lockstep::barrier();
  };
  under_gloo("before", rank);
  { auto group = lockstep::init_process_group("mpi"); }
  under_gloo("reversed", size - 1 - rank);
}

// The communicator of an init_process_group_mpi() that failed early, because
// there was a group already, must not be used by the next one.
void forgotten() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  {
    auto group = lockstep::init_process_group("mpi");
    say_refusal([] {
      auto other =
          lockstep::init_process_group_mpi(MPI_Comm_c2f(MPI_COMM_SELF));
    });
  }
  {
    auto group = lockstep::init_process_group("mpi");
    say("of ", group->size());
  }
  MPI_Finalize();
}

// Runs the operations that take a part of each rank. A part alone is within
// LOCKSTEP_MPI_MAX_COUNT=1000, the parts of two ranks together are not.
void parts_of_ranks() {
  auto group = lockstep::init_process_group("mpi");
  const int rank = group->rank();
  const int size = group->size();
  const auto of_rank = [](int64_t count, int of) {
    return at::full({count}, of + 1.0f);
  };
  const auto list_of = [&](int64_t count) {
    std::vector<at::Tensor> list;
    for (int i = 0; i < size; ++i) list.push_back(of_rank(count, i));
    return list;
  };
  const auto zeros = [&](int64_t count) {
    return at::zeros({count * size}).chunk(size);
  };
  const auto equal = [](const at::TensorList& one, const at::TensorList& two) {
    return at::cat(one).equal(at::cat(two));
  };
  most_counted = 0;
  bool right = true;
  // 600 bytes of each rank.
  const auto own = of_rank(150, rank);
  auto gathered = zeros(150);
  lockstep::all_gather(gathered, own);
  right &= equal(gathered, list_of(150));
  gathered = zeros(150);
  lockstep::gather(own, rank == 0 ? gathered : std::vector<at::Tensor>());
  right &= rank != 0 || equal(gathered, list_of(150));
  auto scattered = at::zeros({150});
  lockstep::scatter(scattered,
                    rank == 0 ? list_of(150) : std::vector<at::Tensor>());
  right &= scattered.equal(own);
  // 600 elements of each rank.
  auto sum = at::zeros({600});
  const auto wanted = of_rank(600, rank).mul_(size);
  lockstep::reduce_scatter_tensor(sum, at::cat(list_of(600)));
  right &= sum.equal(wanted);
  sum.zero_();
  lockstep::reduce_scatter(sum, list_of(600));
  right &= sum.equal(wanted);
  say("counted ", most_counted.load(), " at most, ", right ? "right" : "wrong");
}

// Rank 1 gives up a receive before rank 0 has sent.
void late() {
  auto group = lockstep::init_process_group("mpi");
  auto given_up = at::zeros({4});
  if (group->rank() == 1) {
    say_refusal(
        [&] { lockstep::recv(given_up, 0, {.timeout = milliseconds(200)}); });
    say_refusal([&] {
      lockstep::recv(given_up, lockstep::kAnySource,
                     {.timeout = milliseconds(200)});
    });
  }
  sum_over(nullptr, 1);
  if (group->rank() == 0) {
    lockstep::send(at::full({4}, 7.0f), 1);
  } else {
    auto tensor = at::zeros({4});
    lockstep::recv(tensor, 0, {.timeout = milliseconds(10'000)});
    say("got ", tensor[3].item<float>(), ", not ", given_up[3].item<float>());
  }
}

// Runs until another process makes it fail.
template <int kTimeoutMs>
void forever() {
  auto group = lockstep::init_process_group(
      "mpi", {.timeout = std::chrono::seconds(20)});
  say("pid ", ::getpid());
  auto tensor = at::ones({1 << 16});
  try {
    for (int i = 0;; ++i) {
      lockstep::all_reduce(tensor, {.timeout = milliseconds(kTimeoutMs)});
      if (i == 0) say("under way");
    }
  } catch (const c10::DistBackendError& error) {
    say(error.what_without_backtrace());
    try {
      lockstep::all_reduce(tensor);
    } catch (const c10::DistBackendError& second) {
      say("then ", second.what_without_backtrace());
    }
    throw;
  }
}

// Rank 1 returns from main while the others wait for it.
void leaves() {
  auto group = lockstep::init_process_group("mpi");
  if (group->rank() == 1) throw std::runtime_error("rank 1 has had enough");
  sum_over(nullptr, 1);
}

// Reduces more elements than an int counts. Run it by hand: it takes 9 GB and a
// minute.
void large() {
  auto group = lockstep::init_process_group("mpi");
  const int64_t count = (int64_t{1} << 31) + 5;
  auto tensor = at::full({count}, group->rank() + 1, at::kByte);
  lockstep::all_reduce(tensor);
  const int sum = group->size() * (group->size() + 1) / 2;
  const bool reduced = tensor.eq(sum).all().item<bool>();
  tensor.fill_(group->rank() + 7);
  lockstep::broadcast(tensor, 1);
  say("reduced ", reduced, ", moved ", tensor.eq(8).all().item<bool>());
}

}  // namespace

int main(int argc, char** argv) {
  static const std::map<std::string, void (*)()> parts{
      {"world", world},
      {"communicator", communicator},
      {"serialized", serialized},
      {"truncated", truncated},
      {"funneled", funneled},
      {"refused", refused},
      {"hasty", hasty},
      {"strangers", strangers},
      {"forgotten", forgotten},
      {"parts_of_ranks", parts_of_ranks},
      {"late", late},
      {"forever", forever<1'000>},
      {"patient", forever<60'000>},
      {"leaves", leaves},
      {"large", large}};
  const auto part = parts.find(argc > 1 ? argv[1] : "");
  if (part == parts.end()) return 2;
  try {
    part->second();
  } catch (const std::exception&) {
    return 3;
  }
  return 0;
}
