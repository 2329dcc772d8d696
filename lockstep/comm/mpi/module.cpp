#include "lockstep/comm/mpi/create.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/mpi/backend.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal::mpi {
namespace {

using std::chrono::milliseconds;

constexpr size_t kTextSize = 512;

// Throws if a scheduler started several processes but MPI knows only one: each
// would silently be a world of its own.
void refuse_lone_tasks(int size) {
  const auto tasks = get_env_int("SLURM_NTASKS", 0, 1 << 24);
  if (size > 1 || !tasks || *tasks < 2 || get_env("OMPI_COMM_WORLD_SIZE")) {
    return;
  }
  throw std::invalid_argument(
      "SLURM_NTASKS is " + std::to_string(*tasks) +
      ", but MPI sees a world of 1; start with mpirun, or with `srun "
      "--mpi=pmix` if both were built for it");
}

bool all_on_one_host(const Communicator& world, const Deadline& deadline) {
  using Name = std::array<char, MPI_MAX_PROCESSOR_NAME>;
  // On the heap, because a call that fails leaves the memory to MPI.
  auto names = std::make_unique<std::vector<Name>>(world.size() + 1);
  auto& own = names->back();
  int length = 0;
  check(MPI_Get_processor_name(own.data(), &length), "MPI_Get_processor_name");
  try {
    Pending("MPI_Iallgather", [&](MPI_Request* request) {
      return MPI_Iallgather(own.data(), MPI_MAX_PROCESSOR_NAME, MPI_CHAR,
                            names->front().data(), MPI_MAX_PROCESSOR_NAME,
                            MPI_CHAR, world.handle(), request);
    }).wait(deadline, nullptr);
  } catch (...) {
    (void)names.release();
    throw;
  }
  return std::all_of(names->begin(), names->end(),
                     [&](const Name& name) { return name == own; });
}

std::string from_rank_zero(const Communicator& world, const std::string& text,
                           const Deadline& deadline) {
  auto buffer = std::make_unique<std::array<char, kTextSize>>();
  buffer->fill(0);
  text.copy(buffer->data(), kTextSize - 1);
  try {
    Pending("MPI_Ibcast", [&](MPI_Request* request) {
      return MPI_Ibcast(buffer->data(), kTextSize, MPI_CHAR, 0, world.handle(),
                        request);
    }).wait(deadline, nullptr);
  } catch (...) {
    (void)buffer.release();
    throw;
  }
  return buffer->data();
}

class MpiModule final : public Module {
 public:
  void use_communicator(std::optional<int> handle) override {
    given_ = handle;
    unused_ = false;
  }

  LaunchedWorld world(milliseconds timeout) override {
    const auto deadline = Deadline::after(timeout);
    const auto given = std::exchange(given_, std::nullopt);
    start_mpi();
    starting_ = std::make_unique<LivingGroup>();
    auto parent = MPI_COMM_WORLD;
    if (given) {
      parent = MPI_Comm_f2c(static_cast<MPI_Fint>(*given));
      if (parent == MPI_COMM_NULL) {
        throw std::invalid_argument(
            "the communicator is none (MPI_COMM_NULL); give one that this rank "
            "belongs to");
      }
    }
    world_ = Communicator::duplicate(parent, deadline);
    if (world_->size() == 1) starting_.reset();  // no other rank waits
    unused_ = true;
    if (!given) refuse_lone_tasks(world_->size());
    return {
        .rank = world_->rank(),
        .size = world_->size(),
        .one_host = all_on_one_host(*world_, deadline),
        .from_rank_zero = [world = world_, deadline](const std::string& text) {
          return from_rank_zero(*world, text, deadline);
        }};
  }

  c10::intrusive_ptr<c10d::Backend> create(
      const BackendRequest& request) override {
    if (request.group_name == "0") {
      if (!unused_) world(request.timeout);
      unused_ = false;
      if (request.rank != world_->rank() || request.size != world_->size()) {
        throw std::invalid_argument(
            c10::str("this is rank ", request.rank, " of ", request.size,
                     " (RANK and WORLD_SIZE, or the options), but rank ",
                     world_->rank(), " of ", world_->size(),
                     " for MPI; start with mpirun and leave them unset"));
      }
      auto backend = make_backend(request);
      starting_.reset();
      return backend;
    }
    require_world(request);
    return make_backend(request);
  }

 private:
  // Throws unless world_ is that of the default group. The default group may
  // use another backend, or may have been made after world_.
  void require_world(const BackendRequest& request) const {
    const auto& ranks = request.global_ranks;
    const int own = ranks.at(request.rank);
    const int highest = *std::max_element(ranks.begin(), ranks.end());
    if (world_ && world_->rank() == own && highest < world_->size()) return;
    throw std::invalid_argument(c10::str(
        "a group with the backend \"mpi\" needs a default group with \"mpi\", "
        "but ",
        world_ ? c10::str("in the latest one this process was rank ",
                          world_->rank(), " of ", world_->size(),
                          ", and now it is rank ", own)
               : std::string("there was none"),
        "; name \"mpi\" in init_process_group(), or another backend here"));
  }

  c10::intrusive_ptr<c10d::Backend> make_backend(
      const BackendRequest& request) {
    try {
      // MPI itself makes a communicator without a deadline, so wait for the
      // members first.
      gather_texts(request.members(), "mpi/", "",
                   Deadline::after(request.timeout));
      Digest digest;
      digest.add(request.group_name);
      const int tag = static_cast<int>(digest.value() & 0x3fff);
      return c10::make_intrusive<Backend>(
          Communicator::of_members(*world_, request.global_ranks, tag),
          request.timeout);
    } catch (...) {
      // A rank that came late may have found all members, and waits for this
      // one in MPI.
      never_finalize();
      throw;
    }
  }

  std::optional<int> given_;
  std::shared_ptr<Communicator> world_;    // of the latest default group
  bool unused_ = false;                    // no group was made of world_ yet
  std::unique_ptr<LivingGroup> starting_;  // from world() to create()
};

}  // namespace
}  // namespace lockstep::internal::mpi

extern "C" lockstep::internal::mpi::Module* lockstep_open_mpi();

lockstep::internal::mpi::Module* lockstep_open_mpi() {
  // Never destroyed, as MPI is not.
  using namespace lockstep::internal;
  static NoDestructor<mpi::MpiModule> module;
  return &*module;
}
