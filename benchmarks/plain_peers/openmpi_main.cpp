// OpenMPI as a peer for `lockstep bench`: openmpi_peer, with WORLD_SIZE in the
// environment. It runs itself under mpirun, whose ranks call MPI_Allreduce on
// raw memory.

#include <mpi.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "benchmarks/plain_peers/serve.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"

namespace {

using lockstep::internal::kernels::DType;
using lockstep::internal::kernels::ReduceOp;
using nlohmann::json;

// How soon a rank that has nothing to do sees that rank 0 has a request.
constexpr std::chrono::milliseconds kPause{5};
constexpr size_t kAlignment = 64;

const std::map<DType, MPI_Datatype> kTypes{
    {DType::float32, MPI_FLOAT}, {DType::float64, MPI_DOUBLE},
    {DType::int8, MPI_INT8_T},   {DType::uint8, MPI_UINT8_T},
    {DType::int32, MPI_INT32_T}, {DType::int64, MPI_INT64_T},
};
const std::map<ReduceOp, MPI_Op> kOps{
    {ReduceOp::sum, MPI_SUM},   {ReduceOp::product, MPI_PROD},
    {ReduceOp::min, MPI_MIN},   {ReduceOp::max, MPI_MAX},
    {ReduceOp::band, MPI_BAND}, {ReduceOp::bor, MPI_BOR},
    {ReduceOp::bxor, MPI_BXOR},
};

// Checks no return values: MPI's own error handler ends all ranks, and says why
// on stderr.
class MpiReducer : public lockstep::internal::bench::Reducer {
 public:
  MpiReducer() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  json facts() const override {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    std::string text(version, static_cast<size_t>(length));
    return {{"mpi", text.substr(0, text.find(','))}};
  }
  std::string refusal(size_t count, DType dtype, ReduceOp op) const override {
    constexpr size_t kMost = std::numeric_limits<int>::max();
    if (count > kMost) {
      return "MPI_Allreduce takes at most " + std::to_string(kMost) +
             " elements; " + std::to_string(count) + " were asked for";
    }
    if (!kTypes.contains(dtype)) return "MPI has no type for 16-bit floats";
    if (!kOps.contains(op)) return "MPI has no mean";
    return {};
  }
  void* allocate(size_t bytes) override {
    return ::operator new(bytes, std::align_val_t(kAlignment));
  }
  void release(void* data) override {
    ::operator delete(data, std::align_val_t(kAlignment));
  }
  void all_reduce(void* data, size_t count, DType dtype, ReduceOp op) override {
    if (dtype != last_dtype_ || op != last_op_) choose(dtype, op);
    MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), type_, op_,
                  MPI_COMM_WORLD);
  }
  int64_t greatest(int64_t number) override {
    MPI_Allreduce(MPI_IN_PLACE, &number, 1, MPI_INT64_T, MPI_MAX,
                  MPI_COMM_WORLD);
    return number;
  }
  std::string from_first(const std::string& text) override {
    // A blocking call would keep a core busy while another side is measured.
    uint64_t bytes = text.size();
    MPI_Request request;
    MPI_Ibcast(&bytes, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD, &request);
    for (int done = 0;;) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done) break;
      std::this_thread::sleep_for(kPause);
    }
    std::string all = text;
    all.resize(bytes);
    MPI_Bcast(all.data(), static_cast<int>(bytes), MPI_CHAR, 0, MPI_COMM_WORLD);
    return all;
  }
  std::vector<std::string> to_first(const std::string& text) override {
    const auto own = static_cast<int>(text.size());
    if (rank_ != 0) {
      MPI_Send(text.data(), own, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
      return {};
    }
    std::vector<std::string> all(static_cast<size_t>(size_));
    all[0] = text;
    for (int from = 1; from < size_; ++from) {
      MPI_Status status;
      MPI_Probe(from, 0, MPI_COMM_WORLD, &status);
      int length = 0;
      MPI_Get_count(&status, MPI_CHAR, &length);
      all[from].resize(static_cast<size_t>(length));
      MPI_Recv(all[from].data(), length, MPI_CHAR, from, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
    }
    return all;
  }

 private:
  void choose(DType dtype, ReduceOp op) {
    type_ = kTypes.at(dtype);
    op_ = kOps.at(op);
    last_dtype_ = dtype;
    last_op_ = op;
  }

  int rank_ = 0;
  int size_ = 0;
  DType last_dtype_ = DType::float32;
  ReduceOp last_op_ = ReduceOp::sum;
  MPI_Datatype type_ = MPI_FLOAT;
  MPI_Op op_ = MPI_SUM;
};

// Replaces this process by mpirun; does not return.
void become_mpirun(char** argv) {
  const auto ranks = lockstep::internal::get_env("WORLD_SIZE");
  if (!ranks) throw std::invalid_argument("WORLD_SIZE is not set");
  // Containers often run as root, which mpirun refuses; here it starts only
  // this program.
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  // If `lockstep bench` is killed, mpirun gets SIGTERM: SIGKILL would leave its
  // files.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  execlp("mpirun", "mpirun", "--quiet", "--oversubscribe", "--bind-to", "none",
         "-n", ranks->c_str(), self.c_str(), static_cast<char*>(nullptr));
  lockstep::internal::throw_errno(std::string(argv[0]) + ": mpirun");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (!lockstep::internal::get_env("OMPI_COMM_WORLD_SIZE"))
      become_mpirun(argv);
    // mpirun gives its ranks process groups of their own, so each must die by
    // itself when mpirun dies.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    MPI_Init(&argc, &argv);
    MpiReducer reducer;
    lockstep::internal::bench::serve(reducer);
    MPI_Finalize();
    return 0;
  } catch (const std::exception& error) {
    lockstep::internal::bench::say_failure(error);
    return 1;
  }
}
